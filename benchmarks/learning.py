"""Which self-play learns? The built-in policy before and after, at the same number of sampled tokens.

    python benchmarks/learning.py [seeds=5] [arms=conversation,...] [folder=runs/learning] [key=value ...]

Arms: ``conversation`` (conversation preference RL), ``paper`` and ``robust`` (critique self-play with either preset),
and ``conversation-shuffled`` and ``robust-shuffled``, whose rewards are dealt out at random within each group (and
reward stream and round); these must not learn. Every run is a demonstration with its own seed for adapter, prompts and
sampling; `OPTIONS` makes all of them sample about the same number of tokens. Prints one line per run and a table with
95 % intervals (Student's t over seeds) and draws ``learning.svg``. Runs that are in the folder are not repeated.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from _chart import Series, plot_svg
from _intervals import half_width, interval

from viva.threads import prepare_threads

ARMS = ("conversation", "conversation-shuffled", "paper", "robust", "robust-shuffled")
NAMES = {
    "conversation": "conversation preference RL",
    "conversation-shuffled": "preference RL, shuffled rewards",
    "paper": "critique self-play, paper",
    "robust": "critique self-play, robust",
    "robust-shuffled": "robust, shuffled rewards",
}
OPTIONS = {
    "conversation": {"max_steps": "20", "eval_every": "10", "num_test_conversations": "24"},
    "critique": {"max_steps": "16", "batch_size": "32", "eval_every": "8", "num_test_conversations": "24"},
}
FIGURES = {
    "test/direct_accuracy": "direct accuracy",
    "test/conversation/correct/final": "conversation accuracy",
    "test/conversation/rank_correlation": "rank correlation",
    "test/conversation/flip/wrong_to_right": "wrong to right",
    "test/conversation/flip/right_to_wrong": "right to wrong",
}


@dataclass
class ShuffledGroups:
    """A data set whose groups get their own rewards in random order."""

    inner: object
    seed: int

    def __len__(self) -> int:
        return len(self.inner)

    def get_batch(self, index: int) -> list:
        return [
            shuffle_rewards(builder, random.Random(f"{self.seed} {index} {place}"))
            for place, builder in enumerate(self.inner.get_batch(index))
        ]


def shuffle_rewards(builder, rng: random.Random):
    """Deal out the rewards of seats at random; with credit on spans, those of each stream and round."""
    scored, credit = builder.compute_group_rewards, getattr(builder, "credit", None)

    async def shuffled(trajectories, envs):
        results = await scored(trajectories, envs)
        rewards = [reward for reward, _ in results]
        rng.shuffle(rewards)
        return [(reward, metrics) for reward, (_, metrics) in zip(rewards, results, strict=True)]

    def shuffled_credit():
        given = credit()
        spans = []
        for stream in given.streams().values():
            rewards = [span.reward for span in stream]
            rng.shuffle(rewards)
            spans += [replace(span, reward=reward) for span, reward in zip(stream, rewards, strict=True)]
        return replace(given, spans=tuple(spans))

    object.__setattr__(builder, "compute_group_rewards", shuffled)
    if credit is not None:
        object.__setattr__(builder, "credit", shuffled_credit)
    return builder


def recipe_of(arm: str):
    """The recipe's name and ``Config``."""
    import importlib

    name = "conversation_preference_rl" if arm.startswith("conversation") else "critique_self_play"
    return name, importlib.import_module(f"viva.recipes.{name}").Config


def run_once(folder: Path, arm: str, seed: int, changes: dict[str, str]) -> dict:
    import chz

    from viva.recipes.common import finish_run, open_run
    from viva.recipes.demo import demo_options
    from viva.training.loop import train

    name, config_class = recipe_of(arm)
    kind = "conversation" if arm.startswith("conversation") else "critique"
    own = {} if kind == "conversation" else {"preset": arm.removesuffix("-shuffled")}
    options = demo_options(name, folder, seed=seed) | OPTIONS[kind] | own | changes
    config = chz.entrypoint(config_class, argv=[f"{name}={value}" for name, value in options.items()])

    async def go() -> None:
        plan = config.make_plan()
        opened = await open_run(plan)
        training = await plan.config.build_training(plan, opened)
        if arm.endswith("-shuffled"):
            training = replace(training, dataset=ShuffledGroups(training.dataset, seed))
        is_complete = await train(training)
        finish_run(training, model=plan.model, is_complete=is_complete)

    started = time.monotonic()
    asyncio.run(go())
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    tested = [row for row in rows if "test/direct_accuracy" in row]
    return {
        "arm": arm,
        "seed": seed,
        "before": {key: tested[0].get(key) for key in FIGURES},
        "after": {key: tested[-1].get(key) for key in FIGURES},
        "curve": [(tokens_before(rows, row["step"]), row["test/direct_accuracy"]) for row in tested],
        "tokens": sum(row.get("rollout/sampled_tokens", 0) for row in rows),
        "minutes": (time.monotonic() - started) / 60,
    }


def tokens_before(rows: Sequence[dict], step: int) -> float:
    """Thousands of tokens sampled before a step."""
    return sum(row.get("rollout/sampled_tokens", 0) for row in rows if row["step"] < step) / 1000


def plot(results: Sequence[dict], output: Path) -> None:
    """Mean accuracy of each arm at each evaluation, with its interval."""
    drawn = []
    for arm in dict.fromkeys(result["arm"] for result in results):
        curves = [result["curve"] for result in results if result["arm"] == arm]
        columns = [[curve[place][1] for curve in curves] for place in range(len(curves[0]))]
        spent = [statistics.mean(curve[place][0] for curve in curves) for place in range(len(columns))]
        points = [(x, statistics.mean(column)) for x, column in zip(spent, columns, strict=True)]
        band = tuple(half_width(column) for column in columns) if len(curves) > 1 else None
        drawn.append(Series(name=NAMES[arm], points=tuple(points), band=band))
    title = f"Held-out accuracy, asked directly: mean of {len(curves)} seeds, 95 % interval"
    plot_svg(drawn, title=title, x_label="thousand sampled tokens", y_label="accuracy", output=output)


def change(runs: Sequence[dict], key: str) -> str:
    """Before, after and change of one figure over the runs that have it on both sides."""
    pairs = [(run["before"][key], run["after"][key]) for run in runs]
    pairs = [(before, after) for before, after in pairs if before is not None and after is not None]
    if not pairs:
        return "-"
    before, after = (statistics.mean(column) for column in zip(*pairs, strict=True))
    gains = [after - before for before, after in pairs]
    if key == "test/conversation/rank_correlation":
        return f"{before:.2f} -> {after:.2f}, {interval(gains, digits=2)}"
    return f"{100 * before:.1f} -> {100 * after:.1f} %, {interval(gains, scale=100)}"


def table(results: Sequence[dict]) -> str:
    titles = ["arm", "seeds", *FIGURES.values(), "tokens", "minutes"]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for arm in dict.fromkeys(result["arm"] for result in results):
        runs = [result for result in results if result["arm"] == arm]
        cells = [arm, str(len(runs)), *(change(runs, key) for key in FIGURES)]
        cells += [f"{statistics.mean(run['tokens'] for run in runs):,.0f}"]
        cells += [f"{statistics.mean(run['minutes'] for run in runs):.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    prepare_threads()
    given = dict(argument.split("=", 1) for argument in argv)
    num_seeds = int(given.pop("seeds", "5"))
    first_seed = int(given.pop("first_seed", "0"))
    arms = given.pop("arms", ",".join(ARMS)).split(",")
    folder = Path(given.pop("folder", "runs/learning"))
    results = []
    for seed in range(first_seed, first_seed + num_seeds):
        for arm in arms:
            path = folder / f"{arm}-{seed}" / "result.json"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(run_once(path.parent, arm, seed, given)))
            results.append(json.loads(path.read_text()))
            print({key: value for key, value in results[-1].items() if key != "curve"}, flush=True)
    print(table(results))
    plot(results, folder / "learning.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
