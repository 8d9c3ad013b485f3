"""Which reward teaches a model that others trained? SmolLM2-135M-Instruct on word problems, before and after.

    python benchmarks/real_weights.py [seeds=5] [arms=answers,...] [folder=runs/real_weights] [key=value ...]

Training is that of ``make demo`` (16 steps, 206 one-step problems; 100 others to test on, without a step in common).
Rewards of expert iteration on plain samples, eight to a problem: ``answers`` (true answers, the ceiling), ``majority``
(majority vote of a group, TTRL), ``log_probability`` (the policy's own), ``shuffled`` (true answers dealt out at random
within each group; must not learn); ``peer_prediction`` has four to a problem, since every reply is read behind every
other one. ``hint`` and ``feedback`` pay true answers, too: samples behind a hint about the content, and second attempts
after being told right or wrong; both are trained into the bare question.

Conversations: in ``debate`` four agents answer, see all answers, answer again, and the policy compares their last ones,
pair by pair, by its label probabilities (conversation preference RL without a format); as many problems and steps, half
the samples, each of two replies. ``critique`` is critique self-play of three agents who vote by label probabilities, in
the words of ``examples/smollm2_critique.yaml``, two conversations a step; ``r_sol`` pays its solutions alone.

Every policy is asked greedily, at temperature 1, and for the majority of eight answers at temperature 1. Cells that are
in the folder are not repeated: one line each in ``cells.jsonl``; the table has 95 % intervals (Student's t over seeds).
Needs ``make models``.
"""

import json
import sys
import time
from pathlib import Path

from _intervals import interval

import viva
from viva.recipes.config import parse_options
from viva.recipes.demo import model_path, real_options
from viva.recipes.math_efficiency import Config as MathConfig
from viva.recipes.programs import train_recipe

ASKED = {"temperature 0": (0.0, 1, "direct/avg@1"), "temperature 1": (1.0, 8, "direct/avg@8")}
VOTED = ("majority of 8", "direct/maj@8")
NUM_VOTED = 50
"""The first so many problems are asked eight times each."""


DEBATE = viva.Protocol(
    rounds=[
        viva.Round("answer", "Give only the final number."),
        viva.Round("final", "Give only the final number that you now hold right.", ["answer"]),
    ],
    reward=viva.rewards.tournament(),
)
CONTENT_HINT = (
    "Who buys more: add. Who gives away: subtract. So many boxes, so many things in each: multiply."
)
CRITIQUE = {"batch_size": "6", "num_test_conversations": "0"}
CHANGES: dict[str, dict[str, str]] = {
    "answers": {},
    "majority": {"reward": "majority"},
    "log_probability": {"reward": "log_probability"},
    "shuffled": {"reward": "shuffled"},
    "peer_prediction": {"reward": "peer_prediction", "group_size": "4", "batch_size": "24"},
    "hint": {"strategies": "prompt_augmentation", "hint": CONTENT_HINT},
    "feedback": {"strategies": "feedback", "batch_size": "32"},
    "debate": {"num_agents": "4", "batch_size": "32", "num_test_conversations": "0"},
    "critique": {**CRITIQUE, "reward_weights": '{"r_sol": 1, "r_meta": 1, "r_diag": 2}'},
    "r_sol": {**CRITIQUE, "reward": "r_sol"},
}
"""What each arm changes in the demonstration's options."""
ARMS = tuple(CHANGES)
CONVERSATIONS: dict[str, str | viva.Protocol] = {
    "debate": DEBATE,
    "critique": "critique_self_play",
    "r_sol": "critique_self_play",
}
WORDS = Path(__file__).resolve().parents[1] / "examples" / "smollm2_critique.yaml"


def measured(policy: viva.Run | str, options: dict[str, object]) -> dict[str, float]:
    """Accuracy of a policy, by how it is asked."""
    found: dict[str, float] = {}
    for name, (temperature, count, key) in ASKED.items():
        most = None if count == 1 else NUM_VOTED
        evaluation = viva.evaluate(
            policy,
            eval_temperature=temperature,
            num_samples=count,
            max_test_samples=most,
            resamples=100,
            **options,
        )
        found[name] = evaluation.figures[key].value
        if count > 1:
            found[VOTED[0]] = evaluation.figures[VOTED[1]].value
    return found


def cell(arm: str, seed: int, folder: Path, changed: dict[str, str]) -> dict[str, object]:
    """Train one policy and measure it."""
    run, seconds = trained(
        arm, real_options(folder / f"{arm}-{seed}", str(model_path()), seed=seed) | changed
    )
    last = run.metrics.iloc[-4:].mean(numeric_only=True).to_dict()
    return {
        "arm": arm,
        "seed": seed,
        "seconds": seconds,
        "sampled_tokens": float(run.metrics["rollout/sampled_tokens"].sum()),
        "reward": {name: value for name, value in last.items() if name.startswith(("reward/", "env/"))},
        "after": measured(run, {}),
    }


def trained(arm: str, options: dict[str, str]) -> tuple[viva.Run, float]:
    """The run of an arm, and its seconds."""
    what = CONVERSATIONS.get(arm, "math_efficiency")
    given = options | CHANGES[arm]
    if arm in CONVERSATIONS:
        given = {name: value for name, value in given.items() if name not in ("strategies", "group_size")}
    began = time.time()
    if (
        what == "critique_self_play"
    ):  # in Python, prompts are what is trained on, not the words of a conversation
        arguments = [f"config={WORDS}", *(f"{name}={value}" for name, value in given.items())]
        if train_recipe(what, arguments):
            sys.exit(f"the arm {arm} could not be trained")
        return viva.load_run(given["log_path"]), time.time() - began
    config = parse_options(MathConfig, [f"{name}={value}" for name, value in given.items()])
    named = {name: getattr(config, name) for name in given if name != "model_name"}
    return viva.train(what, model=str(model_path()), **named), time.time() - began


def table(cells: list[dict[str, object]], before: dict[str, float]) -> str:
    """One row an arm: accuracy after training, mean and interval over seeds."""
    names = [*ASKED, VOTED[0]]
    rows = [["arm", "seeds", *names], ["untrained", "", *(f"{100 * before[name]:.1f}" for name in names)]]
    for arm in ARMS:
        found = [each["after"] for each in cells if each["arm"] == arm]
        if found:
            figures = (interval([each[name] for each in found], scale=100).lstrip("+") for name in names)
            rows.append([arm, str(len(found)), *figures])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(argv: list[str]) -> None:
    """Run what is missing and print the table."""
    given = dict(argument.split("=", 1) for argument in argv)
    num_seeds, folder = int(given.pop("seeds", "5")), Path(given.pop("folder", "runs/real_weights"))
    arms = given.pop("arms", ",".join(ARMS)).split(",")
    if unknown := sorted(set(arms) - set(ARMS)):
        sys.exit(f"unknown arm {unknown[0]!r}; allowed: {', '.join(ARMS)}")
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "cells.jsonl"
    cells = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    base = folder / "untrained.json"
    if not base.exists():
        options = real_options(folder / "untrained", str(model_path()))
        asked = {"test_prompts_path": options["test_prompts_path"], "max_tokens": int(options["max_tokens"])}
        base.write_text(json.dumps(measured(str(model_path()), asked)))
    for seed in range(num_seeds):
        for arm in arms:
            if not any(each["arm"] == arm and each["seed"] == seed for each in cells):
                cells.append(cell(arm, seed, folder, given))
                with kept.open("a") as file:
                    file.write(f"{json.dumps(cells[-1])}\n")
    sys.stdout.write(f"\n{table(cells, json.loads(base.read_text()))}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
