"""One cell of the bench: a policy trained by an arm on a bed with a seed, and what it can do then."""

import asyncio
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

import viva
from evidence.arms import ARMS, COMMON, CRITIQUE, PREFERENCE, TIMES_LONGER
from evidence.beds import Bed, RealBed, WarmBed
from viva.eval.direct import DirectSampler, ask_all
from viva.eval.estimates import plurality
from viva.eval.records import Asked, is_lenient
from viva.recipes.evaluation.target import OpenPolicy, find_target, open_policy
from viva.training.data import PromptItem
from viva.training.sampling import Sampling

NUM_SAMPLES = 8
NUM_CONVERSATIONS = 130
"""On as many test problems, one each. They take as long as the training."""
TALKING_SEEDS = (10, 11, 12)
"""Those of which test conversations are played."""
KINDS = {"critique_self_play": "critique", "conversation_preference_rl": "conversation"}
"""Conversations of ``viva eval`` by recipe."""
UNTRAINED_TALK = {
    kind: {
        name: (COMMON | sizes)[name]
        for name in ("num_agents", "max_rounds", "max_tokens")
        if name in COMMON | sizes
    }
    for kind, sizes in (("critique", CRITIQUE), ("conversation", PREFERENCE))
}
"""Sizes of the conversations of an untrained policy: those of the arms."""
_PROBE_STEPS = 2
CURVE = (
    "correct",
    "correct/first",
    "correct/final",
    "judge/accuracy",
    "judge/verdict/accuracy",
    "judge/position_bias",
)
"""Metrics of every step that are kept of a prolonged run, where it has them."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """An arm's learning rate and number of steps on a bed."""

    learning_rate: float
    steps: int


def measure(policy: str, problems: list[PromptItem], *, max_tokens: int) -> dict[str, list[int]]:
    """Per cent right by problem: greedily, of eight answers at temperature 1, and of their majority.

    ``..._lenient`` are those whose reply names the known answer, finished or not, marked or not.

    Args:
        policy: A model, or a run's adapter.
        problems: With known answers.
        max_tokens: Of a reply; one that does not end is wrong.
    """
    return asyncio.run(_measure(policy, problems, max_tokens))


async def open_sampler(policy: str) -> OpenPolicy:
    """Client and renderer of a model, or of a run's policy."""
    from viva.training.service import EngineConfig, Engines

    engine = EngineConfig()
    service = Engines().service(engine)
    return await open_policy(find_target(policy), engine, renderer_name=None, service=service)


async def _measure(policy: str, problems: list[PromptItem], max_tokens: int) -> dict[str, list[int]]:
    opened = await open_sampler(policy)
    asked = {}
    for temperature, count in ((0.0, 1), (1.0, NUM_SAMPLES)):
        direct = DirectSampler(
            renderer=opened.renderer,
            sampling=Sampling(seed=0, max_tokens=max_tokens, temperature=temperature),
        )
        asked[temperature] = await ask_all(opened.client, direct, problems, count)
    votes = [[(answer.vote, answer.right) for answer in each.answers] for each in asked[1.0]]
    return {
        "greedy": [100 * each.answers[0].right for each in asked[0.0]],
        "sampled": [round(100 * sum(right for _, right in each) / NUM_SAMPLES) for each in votes],
        "majority": [round(100 * plurality(each)) for each in votes],
        "greedy_lenient": [_lenient(each) for each in asked[0.0]],
        "sampled_lenient": [_lenient(each) for each in asked[1.0]],
    }


def _lenient(asked: Asked) -> int:
    return round(100 * np.mean([is_lenient(answer, asked.answer) for answer in asked.answers]))


def converse(
    policy: str, kind: str, problems: Sequence[PromptItem], output: Path, **options: object
) -> dict[str, list[int]]:
    """Per cent of agents whose first and whose final solution is right, by problem; a void conversation has none.

    Args:
        policy: A model, or a run, which talks as it did in training.
        kind: Of conversation, as in ``viva eval``.
        problems: With known answers.
        output: File for all answers.
        **options: Those of ``viva eval``.
    """
    rows = [{"query": each.question, "answer": each.answer} for each in problems]
    options |= {"kinds": [kind], "max_test_samples": len(rows), "num_test_conversations": len(rows)}
    played = viva.evaluate(policy, rows, equal_tokens=False, output=str(output), **options).played[kind]
    return {
        name: [round(100 * np.mean([getattr(agent, name).right for agent in each.agents])) for each in played]
        for name in ("first", "final")
    }


def items_of(bed: Bed, *, validation: bool = False) -> list[PromptItem]:
    """The problems that policies are measured on."""
    problems = bed.validation() if validation else bed.problems("test")
    return [PromptItem(question=each.question, answer=str(each.answer)) for each in problems]


def measure_untrained(bed: Bed, folder: Path) -> dict[str, object]:
    """Figures of a bed's policy before training: those of a cell, and both kinds of conversation on most beds."""
    problems = items_of(bed)
    measured: dict[str, object] = {"problems": measure(bed.untrained, problems, max_tokens=bed.max_tokens)}
    if bed.level is None and not isinstance(bed, RealBed):
        measured["conversations"] = {
            kind: converse(
                bed.model, kind, problems[:NUM_CONVERSATIONS], folder / f"{bed.name}-{kind}.json", **sizes
            )
            for kind, sizes in UNTRAINED_TALK.items()
        }
    return measured


def tokens_of(run: viva.Run) -> dict[str, int]:
    """All tokens that a run sampled, and all that passed through a model."""
    names = {
        "sampled": ["rollout/sampled_tokens"],
        "total": ["rollout/total_tokens", "optim/reference_tokens"],
    }
    return {
        name: sum(int(run.metrics[metric].sum()) for metric in metrics if metric in run.metrics)
        for name, metrics in names.items()
    }


def tokens_to_signal(run: viva.Run) -> int | None:
    """All tokens up to the first step with a reward above 0; ``None`` if there was none."""
    return _tokens_until(run, run.metrics["reward/max"] > 0)


def tokens_to_half(run: viva.Run) -> int | None:
    """All tokens up to the first step whose plain samples are right in half of cases; ``None`` if there was none."""
    return _tokens_until(run, run.metrics["experts/iid/reward_mean"] >= 0.5)


def _tokens_until(run: viva.Run, has_come: pd.Series) -> int | None:
    spent = run.metrics["rollout/total_tokens"].cumsum()
    return int(spent[has_come].iloc[0]) if has_come.any() else None


def train(bed: Bed, arm: str, seed: int, settings: Settings, folder: Path) -> viva.Run:
    """One run of an arm."""
    shutil.rmtree(folder, ignore_errors=True)
    files = bed.write(folder, seed)
    given = bed.arm(arm)
    return viva.train(
        given.recipe,
        model=files["model_name"],
        prompts=files["train_prompts_path"],
        steps=settings.steps,
        seed=seed,
        learning_rate=settings.learning_rate,
        log_path=str(folder / "run"),
        config=given.options,
    )


def steps_within(bed: Bed, arm: str, folder: Path, *, seed: int) -> int:
    """Steps of an arm that take about as many tokens as the bed allows, from two steps of it."""
    if ARMS[arm].prolongs is not None:
        return TIMES_LONGER * steps_within(bed, ARMS[arm].prolongs, folder, seed=seed)
    arm = ARMS[arm].steps_of or arm
    run = train(bed, arm, seed, Settings(learning_rate=1e-5, steps=_PROBE_STEPS), folder)
    return max(1, round(bed.total_tokens * _PROBE_STEPS / tokens_of(run)["total"]))


def cell(
    bed: Bed, arm: str, seed: int, settings: Settings, folder: Path, *, validation: bool = False
) -> dict[str, object]:
    """The ledger's line of one cell; the run's folder is removed but for transcripts after a warm-up."""
    began = time.monotonic()
    run = train(bed, arm, seed, settings, folder)
    seconds = time.monotonic() - began
    last = run.metrics.iloc[-max(1, settings.steps // 5) :].mean(numeric_only=True)
    watched = ("reward/mean", "reward/std", "reward_truth_gap", "judge/accuracy", "judge/verdict/accuracy")
    line = {
        "bed": bed.name,
        "arm": arm,
        "seed": seed,
        "learning_rate": settings.learning_rate,
        "steps": settings.steps,
        "seconds": round(seconds, 1),
        "tokens": tokens_of(run),
        "tokens_to_signal": tokens_to_signal(run),
        "last": {name: round(float(last[name]), 4) for name in watched if name in last.index},
        "problems": measure(str(run.path), items_of(bed, validation=validation), max_tokens=bed.max_tokens),
    }
    if ARMS[arm].prolongs is not None:
        line["curve"] = {
            name: [None if value != value else round(float(value), 3) for value in run.metrics[name]]
            for name in CURVE
            if name in run.metrics
        }
    if bed.level is not None:
        line["tokens_to_half"] = tokens_to_half(run)
    if seed in TALKING_SEEDS and (kind := KINDS.get(ARMS[arm].recipe)) is not None:
        talked_about = items_of(bed)[:NUM_CONVERSATIONS]
        file = folder / "conversations.json"
        line["conversations"] = {kind: converse(str(run.path), kind, talked_about, file)}
    if isinstance(bed, WarmBed):
        (run.path / "transcripts.jsonl").replace(folder.with_name(f"{folder.name}.transcripts.jsonl"))
    shutil.rmtree(folder)
    return line
