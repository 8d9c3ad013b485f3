"""Does conversation preference RL learn? Held-out accuracy of the built-in policy, before and after.

    python benchmarks/learning.py [seeds=5] [arms=true,shuffled] [folder=runs/learning] [key=value ...]

Each run is the demonstration (`viva.recipes.conversation_preference_rl.demo`) with its own seed for adapter,
prompts and sampling, and three steps more. The arm ``shuffled`` deals the rewards of each conversation out to its
agents at random, everything else being equal; it must not learn. Prints one line per run and a table with 95 %
intervals (Student's t over seeds) and draws ``learning.svg``. Runs that are in the folder already are not repeated.
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

from viva.engine.threads import prepare_threads

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


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
    scored = builder.compute_group_rewards

    async def shuffled(trajectories, envs):
        results = await scored(trajectories, envs)
        rewards = [reward for reward, _ in results]
        rng.shuffle(rewards)
        return [(reward, metrics) for reward, (_, metrics) in zip(rewards, results, strict=True)]

    object.__setattr__(builder, "compute_group_rewards", shuffled)
    return builder


def run_once(folder: Path, arm: str, seed: int, changes: dict[str, str]) -> dict[str, float]:
    import chz

    from viva.recipes.common import finish_run, open_run
    from viva.recipes.conversation_preference_rl.build import build_training, make_plan
    from viva.recipes.conversation_preference_rl.demo import demo_options
    from viva.recipes.conversation_preference_rl.train import Config
    from viva.rl.train import train

    options = demo_options(folder, seed=seed) | {"max_steps": "20"} | changes
    config = chz.entrypoint(Config, argv=[f"{name}={value}" for name, value in options.items()])

    async def go() -> None:
        plan = make_plan(config)
        opened = await open_run(plan.options)
        training = await build_training(plan, opened)
        if arm == "shuffled":
            training = replace(training, dataset=ShuffledGroups(training.dataset, seed))
        is_complete = await train(training)
        finish_run(plan.options, opened, training, is_complete=is_complete)

    started = time.monotonic()
    asyncio.run(go())
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    curve = [(row["step"], row["test/direct_accuracy"]) for row in rows if "test/direct_accuracy" in row]
    return {
        "arm": arm,
        "seed": seed,
        "before": curve[0][1],
        "after": curve[-1][1],
        "curve": curve,
        "minutes": (time.monotonic() - started) / 60,
    }


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean over seeds (Student's t)."""
    return T_95[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5


def plot(results: Sequence[dict], output: Path) -> None:
    """Mean accuracy of each arm at each evaluation, with its interval."""
    from viva.report import Series, plot_svg

    names = {"true": "judged by the policy itself", "shuffled": "shuffled rewards"}
    drawn = []
    for arm in dict.fromkeys(result["arm"] for result in results):
        curves = [result["curve"] for result in results if result["arm"] == arm]
        columns = [[curve[place][1] for curve in curves] for place in range(len(curves[0]))]
        points = [(curves[0][place][0], statistics.mean(column)) for place, column in enumerate(columns)]
        band = tuple(half_width(column) for column in columns) if len(curves) > 1 else None
        drawn.append(Series(name=names[arm], points=tuple(points), band=band))
    title = f"Held-out accuracy, asked directly: mean of {len(curves)} seeds, 95 % interval"
    plot_svg(drawn, title=title, y_label="accuracy", output=output)


def table(results: Sequence[dict]) -> str:
    lines = ["| arm | seeds | before | after | gain (95 % interval) | minutes |", "|---|---|---|---|---|---|"]
    for arm in dict.fromkeys(result["arm"] for result in results):
        runs = [result for result in results if result["arm"] == arm]
        gains = [100 * (run["after"] - run["before"]) for run in runs]
        gain = statistics.mean(gains)
        if len(gains) > 1:
            half = half_width(gains)
            shown = f"{gain:+.1f} ({gain - half:+.1f} to {gain + half:+.1f})"
        else:
            shown = f"{gain:+.1f}"
        before, after, minutes = (
            statistics.mean(run[key] for run in runs) for key in ("before", "after", "minutes")
        )
        lines.append(
            f"| {arm} | {len(runs)} | {100 * before:.1f} % | {100 * after:.1f} % | {shown} | {minutes:.1f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    prepare_threads()
    given = dict(argument.split("=", 1) for argument in argv)
    num_seeds = int(given.pop("seeds", "5"))
    arms = given.pop("arms", "true,shuffled").split(",")
    folder = Path(given.pop("folder", "runs/learning"))
    results = []
    for seed in range(num_seeds):
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
