"""What does it cost to train several strategies in one batch? A mixed batch against the sum of its parts, in one run.

    python benchmarks/expert_cost.py [strategies=iid,prompt_augmentation,feedback] [problems=8] [repeats=5]
        [key=value ...]

A part is one strategy's groups of the same batch, played, scored and trained by themselves with the very seeds and
weights of the mixed batch, so that both sample the same tokens. Parts and whole are taken in turns; every figure is a
median over the repeats, and so is the ratio. Also counted: the tokens that the engine computes in the scoring pass and
in the update, beside those in the datums it was given (what they share is computed once, padding is computed too).
Any option of the recipe may be given, such as ``estimator=balance``.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from viva.threads import prepare_threads

PHASES = ("rollouts", "scoring", "rest of the estimate", "update")
OPTIONS = {"max_tokens": "72", "lora_rank": "16", "learning_rate": "1e-9", "group_size": "4"}


@dataclass
class Watch:
    """A training client that takes the time of its forward passes."""

    client: object
    seconds: float = 0.0
    tokens: int = 0
    """In the datums that were scored."""

    def forward(self, data, *arguments):
        async def timed():
            started = time.perf_counter()
            output = await self.client.forward(data, *arguments)
            self.seconds += time.perf_counter() - started
            return output

        self.tokens += sum(datum.model_input.length for datum in data)
        return timed()


@dataclass(frozen=True)
class Placed:
    """Seats with the seeds that their groups have in the whole batch."""

    policy: object
    places: Sequence[int]

    def seat(self, *, group: int, attempt: int, seat: int):
        return self.policy.seat(group=self.places[group], attempt=attempt, seat=seat)


@dataclass
class Tokens:
    """Tokens that a model computed."""

    computed: int = 0


@contextmanager
def tokens_counted(vocab_size: int):
    """Count what passes through token embeddings, however the engine packs its batches."""
    import torch

    tokens, forward = Tokens(), torch.nn.Embedding.forward

    def counting(module, ids):
        tokens.computed += ids.numel() if module.num_embeddings >= vocab_size else 0
        return forward(module, ids)

    torch.nn.Embedding.forward = counting
    try:
        yield tokens
    finally:
        torch.nn.Embedding.forward = forward


@dataclass
class Measured:
    """One batch."""

    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


async def measure(training, strategies: set[str], vocab_size: int) -> Measured:
    """Play, score and train the groups of these strategies of the first batch."""
    from viva.experts.strategy import strategy_of
    from viva.sdk import settled
    from viva.training.batch import make_batch
    from viva.training.rollouts import run_groups
    from viva.training.sampling import Sampling, SeatSampler
    from viva.training.update import update_policy

    config, found = training.config, Measured()
    sampler = await settled(training.client.save_weights_and_get_sampling_client())
    for follower in training.followers:
        await follower.reach(0)
        follower.follow(sampler, 0)
    batch = list(enumerate(training.dataset.get_batch(0)))
    chosen = [(place, each) for place, each in batch if strategy_of(each).strategy_id in strategies]
    policy = SeatSampler(sampler=sampler, sampling=Sampling(seed=config.seed, max_tokens=config.max_tokens))
    started = time.perf_counter()
    placed = Placed(policy, [place for place, _ in chosen])
    outcomes = await run_groups([builder for _, builder in chosen], placed)
    found.seconds["rollouts"] = time.perf_counter() - started

    watch, started = Watch(training.client), time.perf_counter()
    with tokens_counted(vocab_size) as scored:
        made = await make_batch(watch, outcomes, config.experts)
    found.seconds["scoring"] = watch.seconds
    found.seconds["rest of the estimate"] = time.perf_counter() - started - watch.seconds

    started = time.perf_counter()
    with tokens_counted(vocab_size) as trained:
        await update_policy(
            training.client, made.data_D, config.update, foreign_D=made.foreign_D, check=made.check
        )
    found.seconds["update"] = time.perf_counter() - started
    found.tokens = {
        "sampled": sum(
            len(turn.ac.tokens)
            for outcome in outcomes
            if outcome.group is not None
            for trajectory in outcome.group.trajectories_G
            for turn in trajectory.transitions
        ),
        "scored": watch.tokens,
        "computed in scoring": scored.computed,
        "trained": sum(datum.model_input.length for datum in made.data_D),
        "computed in the update": trained.computed,
    }
    return found


async def repeat(options: dict[str, str], strategies: Sequence[str], repeats: int) -> list[list[Measured]]:
    """Per repeat, the parts in the order of the strategies, and the whole."""
    import chz

    from viva.recipes.common import open_run
    from viva.recipes.math_efficiency import Config

    plan = chz.entrypoint(Config, argv=[f"{name}={value}" for name, value in options.items()]).make_plan()
    opened = await open_run(plan)
    training = await plan.config.build_training(plan, opened)
    vocab_size = len(opened.client.get_tokenizer())
    batches = [*({name} for name in strategies), set(strategies)]
    rows = []
    for turn in range(repeats + 1):
        places = [(place + turn) % len(batches) for place in range(len(batches))]
        found = {place: await measure(training, batches[place], vocab_size) for place in places}
        if turn:  # the first one warms up
            rows.append([found[place] for place in range(len(batches))])
    return rows


def show(rows: Sequence[Sequence[Measured]], strategies: Sequence[str]) -> str:
    names = [*strategies, "sum of the parts", "together"]

    def cells(values_of) -> list[str]:
        """Medians of a figure of every part, of their sum, and of the whole."""
        columns = [[values_of(measured) for measured in row] for row in rows]
        table = [[*column[:-1], sum(column[:-1]), column[-1]] for column in columns]
        return [f"{statistics.median(values):,.2f}" for values in zip(*table, strict=True)]

    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for phase in PHASES:
        lines.append(f"| {phase}, s | {' | '.join(cells(lambda each, p=phase: each.seconds[p]))} |")
    lines.append(f"| in all, s | {' | '.join(cells(lambda each: each.total))} |")
    for name in rows[0][0].tokens:
        values = [cell.removesuffix(".00") for cell in cells(lambda each, n=name: each.tokens[n])]
        lines.append(f"| tokens {name} | {' | '.join(values)} |")
    ratios = [row[-1].total / sum(part.total for part in row[:-1]) for row in rows]
    shares = [row[-1].seconds["scoring"] / row[-1].total for row in rows]
    listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    lines += [
        "",
        f"together / sum of the parts: {statistics.median(ratios):.2f} (median of {listed})",
        f"scoring pass: {100 * statistics.median(shares):.0f} % of the whole",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    prepare_threads()
    from viva.recipes.demo import problem_options
    from viva.tiny.tasks import CAREFUL

    given = dict(argument.split("=", 1) for argument in argv)
    strategies = given.pop("strategies", "iid,prompt_augmentation,feedback").split(",")
    problems, repeats = int(given.pop("problems", "8")), int(given.pop("repeats", "5"))
    with tempfile.TemporaryDirectory() as folder:
        hint = {"hint": CAREFUL} if "prompt_augmentation" in strategies else {}
        options = problem_options(Path(folder)) | OPTIONS | hint | given
        agents = int(options.get("num_agents", "3"))
        samples = [agents if name == "conversation" else int(options["group_size"]) for name in strategies]
        options |= {"strategies": ",".join(strategies), "batch_size": str(sum(samples) * problems)}
        rows = asyncio.run(repeat(options, strategies, repeats))
    print(show(rows, strategies))


if __name__ == "__main__":
    main(sys.argv[1:])
