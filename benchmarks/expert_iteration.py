"""Which strategies and estimators teach the bare question? The built-in policy, every arm at equal sampled tokens.

    python benchmarks/expert_iteration.py [arms=iid,hint-shaped,...] [seeds=0,1,2,3,4] [tokens=60000] [problems=500] \\
        [part=0/2] [results=runs/expert_iteration/results.jsonl] [key=value ...]

Arms: ``iid`` alone; ``hint-ESTIMATOR``: half of the samples behind an instruction that helps; ``style-ESTIMATOR``: the
same, and the instruction also makes replies begin with "Well," (a style no reward looks at: which estimators carry it
into the bare question?); ``feedback``, ``conversation`` and ``mixture`` (hint and feedback) beside iid; ``best_of``.
Every run ends after the first step by which it has sampled so many tokens, and asks the test problems plainly at both
ends.

A finished run is one line of `results`, and is not repeated. ``part=0/2`` does every second one of the runs, so that
two processes can share them. The table is of all lines with the same settings: changes of accuracy, and their
difference to ``iid`` of the same seed, with 95 % intervals (Student's t over seeds). Any option of the recipe may be
given.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from _intervals import interval

from viva.threads import prepare_threads

ESTIMATORS = (
    "shaped", "none", "positives", "token_tis", "importance_sampling", "balance", "seq_tis", "seq_is", "distill"
)  # fmt: skip
ARMS = (
    "iid",
    *(f"hint-{name}" for name in ESTIMATORS),
    "feedback",
    "conversation",
    "best_of",
    "mixture",
    *(f"style-{name}" for name in ESTIMATORS),
)
STYLE = "Well,"
NUM_SCORED = 100
"""Test problems behind which the probability of the style is looked up."""
ESTIMATOR_OPTIONS = {"seq_is": '{"force": True}', "distill": '{"teacher": "prompt_augmentation"}'}
STRATEGIES = {  # with samples per strategy and problem, and problems per step: about as many tokens each
    "iid": ("iid", 8, 16),
    "hint": ("iid,prompt_augmentation", 4, 16),
    "style": ("iid,prompt_augmentation", 4, 16),
    "feedback": ("iid,feedback", 4, 11),
    "conversation": ("iid,conversation", 4, 4),
    "best_of": ("best_of", 8, 16),
    "mixture": ("iid,prompt_augmentation,feedback", 4, 8),
}
NUM_AGENTS = 3
OPTIONS = {
    "max_tokens": "72",
    "learning_rate": "1.5e-3",
    "lora_rank": "16",
    "max_steps": "1000",
    "eval_every": "1000",
    "num_agents": str(NUM_AGENTS),
    "num_test_conversations": "32",
    "save_every": "0",
    "samples_every": "0",
}


@dataclass(frozen=True)
class TokenBudget:
    """Ends a run, in place of a stop rule, once so many tokens were sampled."""

    tokens: int

    def crossed(self, rows: Sequence[Mapping[str, float]]) -> str | None:
        spent = sum(row.get("rollout/sampled_tokens", 0) for row in rows)
        return f"{spent:,.0f} tokens were sampled" if spent >= self.tokens else None

    def is_best(self, rows: Sequence[Mapping[str, float]]) -> bool:
        return False


@dataclass
class StyleCounter:
    """A grader that also counts the replies that begin with the style."""

    count: int = 0

    def __call__(self, text: str, answer: str) -> bool:
        from viva.judging.answers import is_correct

        self.count += text.startswith(STYLE)
        return is_correct(text, answer)


@dataclass
class StyleEvaluator:
    """Direct accuracy, and the style: how often replies begin with it, and its mean log-probability there."""

    evaluator: object
    counter: StyleCounter = field(default_factory=StyleCounter)

    async def __call__(self, sampler, step: int, begin) -> dict[str, float]:
        import tinker

        from viva.conversation.rendering import build_prompt, direct_messages

        self.counter.count = 0
        direct = self.evaluator.direct
        direct = replace(direct, check=replace(direct.check, is_right=self.counter))
        metrics = dict(await replace(self.evaluator, direct=direct)(sampler, step, begin))
        renderer = direct.renderer
        style = renderer.tokenizer.encode(STYLE, add_special_tokens=False)
        prompts = [
            build_prompt(renderer, direct_messages(item.question)).to_ints() + style
            for item in self.evaluator.items[:NUM_SCORED]
        ]
        logprobs = await asyncio.gather(
            *(sampler.compute_logprobs(tinker.ModelInput.from_ints(prompt)) for prompt in prompts)
        )
        metrics["test/style_rate"] = self.counter.count / len(self.evaluator.items)
        metrics["test/style_logprob"] = statistics.mean(sum(values[-len(style) :]) for values in logprobs)
        return metrics


def options_of(arm: str, folder: Path, seed: int, num_problems: int) -> dict[str, str]:
    """The recipe's options for an arm; writes the problems into `folder`."""
    from viva.recipes.demo import problem_options, write_problems
    from viva.tiny.tasks import CAREFUL, STYLED

    kind, _, estimator = arm.partition("-")
    strategies, group_size, problems_per_step = STRATEGIES[kind]
    samples = sum(NUM_AGENTS if name == "conversation" else group_size for name in strategies.split(","))
    options = problem_options(folder, seed=seed) | OPTIONS
    write_problems(folder / "test.jsonl", "test", num_problems, seed=0)
    options |= {
        "max_test_samples": str(num_problems),
        "strategies": strategies,
        "group_size": str(group_size),
        "batch_size": str(samples * problems_per_step),
    }
    if "prompt_augmentation" in strategies:
        options["hint"] = STYLED if kind == "style" else CAREFUL
    if kind not in ("iid", "best_of"):
        options["leak_phrases"] = json.dumps([STYLE])
    if estimator:
        options["estimator"] = estimator
    if estimator in ESTIMATOR_OPTIONS:
        options["estimator_options"] = ESTIMATOR_OPTIONS[estimator]
    return options


def run_once(arm: str, seed: int, folder: Path, settings: Mapping[str, str]) -> dict:
    """One run, from its options to its line of results."""
    import chz

    from viva.eval.direct import DirectEvaluator
    from viva.recipes.common import open_run
    from viva.recipes.math_efficiency import Config
    from viva.training.loop import train

    changes = {name: value for name, value in settings.items() if name not in ("tokens", "problems")}
    options = options_of(arm, folder, seed, int(settings["problems"])) | changes
    config = chz.entrypoint(Config, argv=[f"{name}={value}" for name, value in options.items()])

    async def go() -> None:
        plan = config.make_plan()
        opened = await open_run(plan)
        training = await plan.config.build_training(plan, opened)
        evaluators = [
            StyleEvaluator(each) if isinstance(each, DirectEvaluator) else each
            for each in training.evaluators
        ]
        budget = TokenBudget(int(settings["tokens"]))
        training = replace(training, evaluators=evaluators, stop_rule=budget)
        if not await train(training):
            raise SystemExit(f"interrupted in {folder}; the lines so far are kept, this run begins anew")

    started, worked = time.monotonic(), time.process_time()
    asyncio.run(go())
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "rollout/sampled_tokens" in row]
    kept = ("test/", "experts/")
    return {
        "arm": arm,
        "seed": seed,
        "settings": dict(settings),
        "before": {key: value for key, value in rows[0].items() if key.startswith("test/")},
        "after": {key: value for key, value in rows[-1].items() if key.startswith("test/")},
        "first_step": {key: value for key, value in steps[0].items() if key.startswith(kept)},
        "last_step": {key: value for key, value in steps[-1].items() if key.startswith(kept)},
        "steps": len(steps),
        "tokens": sum(row["rollout/sampled_tokens"] for row in steps),
        "minutes": (time.monotonic() - started) / 60,
        "cpu_seconds": time.process_time() - worked,
        "seconds": {
            name: round(sum(row.get(f"time/{name}", 0) for row in rows), 1)
            for name in ("evaluation", "rollouts", "update")
        },
    }


ACCURACY = "test/direct_accuracy"
TOGETHER = "test/conversation/correct/final"


def gain(run: Mapping, key: str = ACCURACY) -> float:
    return run["after"][key] - run["before"][key]


def closed_gap(runs: Sequence[Mapping]) -> str:
    """Share of the initial gap between conversation and direct accuracy that direct accuracy has made up.

    A ratio of means, because single gaps are noisy; the interval is the jackknife's over seeds.
    """

    def share(some: Sequence[Mapping]) -> float:
        gap = statistics.mean(run["before"][TOGETHER] - run["before"][ACCURACY] for run in some)
        return statistics.mean(gain(run) for run in some) / gap if gap else float("nan")

    if len(runs) < 3:
        return f"{share(runs):.2f}"
    count, whole = len(runs), share(runs)
    parts = [share([run for run in runs if run is not left_out]) for left_out in runs]
    return interval([count * whole - (count - 1) * part for part in parts], digits=2)


def conversation_cell(runs: Sequence[Mapping]) -> str:
    if any(TOGETHER not in run["before"] for run in runs):
        return "-"
    before, after = (100 * statistics.mean(run[end][TOGETHER] for run in runs) for end in ("before", "after"))
    return f"{before:.1f} -> {after:.1f} %; gap closed {closed_gap(runs)}"


def table(results: Sequence[Mapping]) -> str:
    titles = [
        "arm",
        "seeds",
        "direct accuracy",
        "gain, points",
        "gain minus that of iid",
        f'replies that begin with "{STYLE}"',
        "its log-probability",
        "in conversation",
        "tokens",
        "steps",
        "minutes",
    ]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    iid = {run["seed"]: run for run in results if run["arm"] == "iid"}
    for arm in ARMS:
        runs = [run for run in results if run["arm"] == arm]
        if not runs:
            continue
        mean = {
            end: {
                key: statistics.mean(run[end][key] for run in runs)
                for key in (ACCURACY, "test/style_rate", "test/style_logprob")
            }
            for end in ("before", "after")
        }
        paired = [gain(run) - gain(iid[run["seed"]]) for run in runs if run["seed"] in iid]
        cells = [
            arm,
            str(len(runs)),
            f"{100 * mean['before'][ACCURACY]:.1f} -> {100 * mean['after'][ACCURACY]:.1f} %",
            interval([gain(run) for run in runs], scale=100),
            interval(paired, scale=100) if paired and arm != "iid" else "-",
            f"{100 * mean['after']['test/style_rate']:.1f} %",
            f"{mean['before']['test/style_logprob']:.1f} -> {mean['after']['test/style_logprob']:.1f}, "
            + interval([gain(run, "test/style_logprob") for run in runs]),
            conversation_cell(runs),
            f"{statistics.mean(run['tokens'] for run in runs):,.0f}",
            f"{statistics.mean(run['steps'] for run in runs):.0f}",
            f"{statistics.mean(run['minutes'] for run in runs):.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def read(path: Path, settings: Mapping[str, str]) -> list[dict]:
    """Lines with these settings."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [run for run in map(json.loads, lines) if run["settings"] == dict(settings)]


def main(argv: Sequence[str]) -> None:
    prepare_threads()
    given = dict(argument.split("=", 1) for argument in argv)
    arms = given.pop("arms", ",".join(ARMS)).split(",")
    seeds = [int(seed) for seed in given.pop("seeds", "0,1,2,3,4").split(",")]
    part, num_parts = (int(number) for number in given.pop("part", "0/1").split("/"))
    path = Path(given.pop("results", "runs/expert_iteration/results.jsonl"))
    settings = {"tokens": "60000", "problems": "500"} | given
    for arm in arms:
        if arm not in ARMS:
            raise ValueError(f"there is no arm {arm!r}; allowed: {', '.join(ARMS)}")
    wanted = [(arm, seed) for seed in seeds for arm in arms]
    done = {(run["arm"], run["seed"]) for run in read(path, settings)}
    path.parent.mkdir(parents=True, exist_ok=True)
    for arm, seed in wanted[part::num_parts]:
        if (arm, seed) in done:
            continue
        result = run_once(arm, seed, path.parent / f"{arm}-{seed}", settings)
        with path.open("a") as results:
            results.write(json.dumps(result) + "\n")
        shown = ("arm", "seed", "tokens", "steps", "minutes", "cpu_seconds")
        print({key: result[key] for key in shown}, f"{100 * gain(result):+.1f} points", flush=True)
    print(table(read(path, settings)))


if __name__ == "__main__":
    main(sys.argv[1:])
