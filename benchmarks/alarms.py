"""Do alarms without known answers see votes that were tampered with? Trained runs of the built-in policy.

    python benchmarks/alarms.py run [kinds=honest,inverted] [seeds=20] [first_seed=0] [minutes=4] [folder=runs/alarms]
    python benchmarks/alarms.py levels [write=FILE] [runs=FOLDER,FOLDER,FOLDER]
    python benchmarks/alarms.py table
    python benchmarks/alarms.py collapse [rewards=r_sol,majority] [seed=0] [steps=200] [folder=runs/collapse]
    python benchmarks/alarms.py all                                    # whatever the ledgers of docs/alarms.md lack

Planted, in `_planted_votes.py` and nowhere else: from step 7 of 20 on, the votes and the judge's comparisons of
critique self-play are tampered with in one of six ways, which it lists, or stay honest. Everything else is the recipe
as it is: 4 agents, 4 conversations a step, ``robust`` rewards, LoRA rank 16. A run takes 50 to 60 seconds of one core.
`run` trains what the ledger (``file=``, by default ``alarms.jsonl`` beside this file) has not, and adds one line a run:
the signs and `reward_truth_gap` of every step, and the held-out accuracy every five steps (200 problems, temperature 1;
at the start and the end at temperature 0, too). With ``minutes`` it begins no new run after so many;
a run that was interrupted goes on where it was.
Alarms are computed from those lines by the package's own `viva.run.alarms.Watch`, so new levels need no new runs.
Other options of the recipe need a ledger of their own: ``alarms_initial_judge.jsonl`` has runs in which the policy at
the start judges three pairs of every conversation, too (``initial_judge_pairs=3 file=...``); `table file=...` and
`levels file=...` read it.

`levels` sets references, units and levels on all honest runs of the ledger, or on honest runs of one's own in folders;
without ``write`` it prints those for runs without a measured reference, `viva.run.alarms.MEASURED`. `table` has false
alarms, power, delay and accuracy lost before the stop, with levels set on honest runs of other seeds
(`_alarm_figures.py`).

`collapse` trains one honest run a reward (``robust`` and ``paper`` are the recipe's own) until the held-out accuracy
at temperature 0, measured every 10 steps, is below half of the best one so far, or the steps are spent: ten times those
of `run`. It goes on where it was stopped, and tells when alarms would have ended each run, and at which accuracy.
``collapse_kl.jsonl`` has the same with a KL penalty (``kl_penalty_coef=0.01 file=benchmarks/collapse_kl.jsonl``),
and of two rewards alone.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _alarm_figures import KEPT, collapse_step, collapse_table, levels_of, levels_text, tables
from _planted_votes import KINDS, PlantedDataset

from viva.threads import prepare_threads

LEDGER = Path(__file__).resolve().with_suffix(".jsonl")
COLLAPSES = LEDGER.with_name("collapse.jsonl")
STEPS, ONSET, EVAL_EVERY, SEEDS = 20, 6, 5, 20
STREAMS = {"reward_weights": '{"r_sol": 1, "r_meta": 1, "r_diag": 2}'}
"""All three streams are paid, those of critics and voters, too."""
SIZES = {
    "num_agents": "4",
    "batch_size": "16",
    "max_tokens": "80",
    "lora_rank": "16",
    "max_test_samples": "200",
    "num_test_conversations": "0",
    "tokens_every": "0",
}
REWARDS = (
    "robust",
    "paper",
    "r_sol",
    "r_meta",
    "r_diag",
    "majority",
    "log_probability",
    "peer_prediction",
    "comas",
    "serl",
    "maca",
    "majority_first",
    "serl_votes",
    "answers",
    "shuffled",
)
STAGE = 10
"""Steps of `collapse` between two looks at the accuracy."""
ALL = (
    ("run", {}),
    ("run", {"file": str(LEDGER.with_stem("alarms_initial_judge")), "initial_judge_pairs": "3"}),
    ("collapse", {}),
    (
        "collapse",
        {
            "file": str(COLLAPSES.with_stem("collapse_kl")),
            "rewards": "r_sol,majority,robust,serl,maca,serl_votes,comas,paper",
            "kl_penalty_coef": "0.01",
        },
    ),
)
"""The commands behind the ledgers."""


@dataclass(frozen=True, kw_only=True)
class Greedy:
    """Accuracy at temperature 0 before some steps."""

    evaluator: Any
    steps: Sequence[int]

    async def __call__(self, sampler: Any, step: int, begin: Any) -> Mapping[str, float]:
        if step not in self.steps:
            return {}
        found = await self.evaluator(sampler, step, begin)
        return {"test/greedy_accuracy": found["test/direct_accuracy"]}


def train(
    options: Mapping[str, str], kind: str = "honest", greedy_at: Sequence[int] = ()
) -> list[dict[str, float]]:
    """Train to the end, among voters of a kind; the metrics of all steps and of the last evaluation.

    ``greedy_at`` are the steps before which temperature 0 is measured beside the recipe's own evaluations.
    """
    from viva.eval.direct import DirectEvaluator
    from viva.recipes.common import open_run
    from viva.recipes.config import parse_options
    from viva.recipes.critique_self_play import Config
    from viva.recipes.loop import direct_sampler
    from viva.training.loop import train as train_run

    config = parse_options(Config, [f"{name}={value}" for name, value in options.items()])

    async def go() -> list[dict[str, float]]:
        plan = config.make_plan()
        opened = await open_run(plan)
        try:
            training = await config.build_training(plan, opened)
            asked = DirectEvaluator(
                items=plan.test, direct=direct_sampler(plan.config, plan.check, opened).at(0.0)
            )
            training = replace(
                training,
                dataset=PlantedDataset(honest=training.dataset, kind=kind, onset=ONSET),
                evaluators=[*training.evaluators, Greedy(evaluator=asked, steps=greedy_at)],
                show_steps=False,
                alarms={},
            )
            if not await train_run(training):
                sys.exit("interrupted; the same command goes on")
            return opened.folder.log.metrics()
        finally:
            opened.folder.close()

    return asyncio.run(go())


def cell(kind: str, seed: int, folder: Path, changed: Mapping[str, str]) -> dict[str, Any]:
    """One run's line of the ledger."""
    from viva.recipes.demo import problem_options

    options = problem_options(folder / f"{kind}-{seed}", seed=seed) | SIZES
    options |= {"max_steps": str(STEPS), "eval_every": str(EVAL_EVERY), "behavior_if_exists": "resume"}
    options |= STREAMS | dict(changed)
    rows = train(options, kind, (0, int(options["max_steps"])))
    return {
        "kind": kind,
        "seed": seed,
        "steps": columns(rows),
        "accuracy": measured(rows, "test/direct_accuracy"),
        "greedy": measured(rows, "test/greedy_accuracy"),
        "sampled_tokens": sum(row.get("rollout/sampled_tokens", 0) for row in rows),
        "seconds": round(sum(row.get("time/step", 0.0) for row in rows), 1),
    }


def columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """What the ledger keeps of every step, by metric."""
    played = [row for row in rows if "rollout/groups" in row]
    return {name: [round(row[name], 4) if name in row else None for row in played] for name in KEPT}


def honest_lines(folders: Sequence[str]) -> list[dict[str, Any]]:
    """Lines of runs in folders, which are taken for honest ones."""
    from viva.run.folder import RunFolder

    return [
        {"kind": "honest", "seed": seed, "steps": columns(RunFolder(Path(folder)).log.metrics())}
        for seed, folder in enumerate(folders)
    ]


def measured(rows: Sequence[Mapping[str, float]], name: str) -> list[tuple[int, float]]:
    """Step and figure, wherever it was measured."""
    return [(int(row["step"]), round(row[name], 4)) for row in rows if name in row]


def lines(path: Path) -> list[dict[str, Any]]:
    """The ledger."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def add(path: Path, line: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{json.dumps(line, separators=(',', ':'))}\n")


def need_own_ledger(path: Path, changed: Mapping[str, str]) -> None:
    """End the command if runs with changed options would go into a ledger of runs without."""
    if changed and path.resolve() in (LEDGER, COLLAPSES):
        sys.exit(f"runs with {', '.join(sorted(changed))} changed need a ledger of their own; give file=FILE")


def run(path: Path, given: dict[str, str]) -> None:
    """Train what the ledger lacks, seed by seed."""
    kinds = given.pop("kinds", ",".join(KINDS)).split(",")
    if unknown := sorted(set(kinds) - set(KINDS)):
        sys.exit(f"unknown kind {unknown[0]!r}; allowed: {', '.join(KINDS)}")
    first, count = int(given.pop("first_seed", "0")), int(given.pop("seeds", str(SEEDS)))
    folder, minutes = Path(given.pop("folder", "runs/alarms")), float(given.pop("minutes", "inf"))
    need_own_ledger(path, given)
    latest = time.monotonic() + 60 * minutes
    done = {(line["kind"], line["seed"]) for line in lines(path)}
    for seed in range(first, first + count):
        for kind in kinds:
            if (kind, seed) not in done and time.monotonic() < latest:
                line = cell(kind, seed, folder, given)
                add(path, line)
                print(kind, seed, line["accuracy"], line["greedy"], f"{line['seconds']} s", flush=True)


def collapse(path: Path, given: dict[str, str]) -> None:
    """Train every reward until it collapses or the steps are spent; ``path`` has a line for those that are done."""
    from viva.recipes.demo import problem_options

    rewards = given.pop("rewards", ",".join(REWARDS)).split(",")
    seed, most = int(given.pop("seed", "0")), int(given.pop("steps", str(10 * STEPS)))
    folder = Path(given.pop("folder", "runs/collapse"))
    need_own_ledger(path, given)
    for reward in rewards:
        if any((line["reward"], line["seed"]) == (reward, seed) for line in lines(path)):
            continue
        named = {"preset": reward} | STREAMS if reward in ("robust", "paper") else {"reward": reward}
        place = folder / f"{reward}-{seed}"
        options = problem_options(place, seed=seed) | SIZES | named | given
        options |= {"eval_every": str(STAGE), "eval_temperature": "0", "behavior_if_exists": "resume"}
        rows: list[dict[str, float]] = []
        accuracy: list[tuple[int, float]] = []
        for stop in range(STAGE, most + 1, STAGE):
            rows = train(options | {"max_steps": str(stop)})
            accuracy = measured(rows, "test/direct_accuracy")
            print(reward, accuracy[-1], flush=True)
            if collapse_step(accuracy) is not None:
                break
        add(path, {"reward": reward, "seed": seed, "steps": columns(rows), "accuracy": accuracy})
    print(collapse_table(lines(path), lines(LEDGER)))


def follow(command: str, given: dict[str, str]) -> None:
    """Train what the ledger of ``run`` or ``collapse`` lacks."""
    if command == "run":
        run(Path(given.pop("file", LEDGER)), given)
    else:
        collapse(Path(given.pop("file", COLLAPSES)), given)


def main(argv: Sequence[str]) -> None:
    prepare_threads()
    command, *rest = argv or [""]
    given = dict(argument.split("=", 1) for argument in rest)
    if command in ("run", "collapse"):
        follow(command, given)
    elif command == "all" and not given:
        for each, options in ALL:
            follow(each, dict(options))
    elif command in ("levels", "table"):
        ledger = lines(Path(given.pop("file", LEDGER)))
        target, folders = given.pop("write", None), given.pop("runs", None)
        if folders is not None:
            ledger = honest_lines(folders.split(","))
        if command == "table":
            print(tables(ledger, onset=ONSET))
        elif target is None:
            print(levels_text(levels_of(ledger, own_start=True)))
        else:
            Path(target).write_text(levels_text(levels_of(ledger, own_start=False)))
    else:
        sys.exit(f"give run, levels, table, collapse or all; got {' '.join(argv)!r}")


if __name__ == "__main__":
    main(sys.argv[1:])
