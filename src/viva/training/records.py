"""Lines of a run's files: transcripts of all groups, and of a few every sampled token with all its numbers.

One line of ``tokens.jsonl`` is one group of a step::

    {"step", "group", "strategy", "turns": [{
        "seat", "turn",                     place in the group: which environment, which of its turns
        "ids", "pieces",                    sampled tokens, and the text of each
        "sampling", "training", "anchor",   logprobs: when sampled, in the update, and what the loss compares with
        "weights", "advantages", "mask",    weight of the estimator, advantage the loss saw, 1 if it was trained
        "spans": [{"start", "stop", "stream", "reward"}],
        "sampled_in", "trained_in"}]}       both contexts as text, if they differ

``anchor`` and ``weights`` are null where all of them are the sampling logprobs and 1. Inside a list, null stands for
what there is not: logprobs in training, anchors and weights of tokens that were not trained, and weights that the
estimator does not have. Tokens that are part of a credential have ``***`` for a text and the id -1. Numbers are
rounded to six digits. Which groups are kept depends on seed and step alone.

Legend: ``_P`` groups of a batch, ``_G`` seats of a group, ``_D`` datums, ``_T`` tokens.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import tinker

from viva.experts.samples import FloatArray
from viva.experts.strategy import credit_of, is_strategy, record_of, strategy_of
from viva.rewards.credit import GroupCredit
from viva.run.secrets import hidden_tokens
from viva.training.batch import Batch
from viva.training.data import derive_seed
from viva.training.data_processing import action_values, trained_values
from viva.training.rollouts import GroupOutcome
from viva.training.samples import Context, TrainedSample, TrainedTurn

TokenTexts = Callable[[Sequence[int]], list[str]]
"""Text of every token, see `viva.rewards.credit.token_texts`."""


def transcript_row(step: int, index: int, outcome: GroupOutcome) -> dict[str, object]:
    """One line of ``transcripts.jsonl``; rewards by seat, null where a seat failed or gave nothing to be paid."""
    return {
        "step": step,
        "group": index,
        "void": outcome.group is None,
        "void_reason": outcome.void_reason,
        "retries": outcome.retries,
        "failures": [asdict(failure) for failure in outcome.failures],
        "strategy": strategy_of(outcome.builder).strategy_id if is_strategy(outcome.builder) else None,
        "tags": list(outcome.builder.logging_tags()),
        "rewards": None if outcome.group is None else outcome.paid_rewards(),
        "record": record_of(outcome.builder),
    }


def chosen_groups(outcomes_P: Sequence[GroupOutcome], *, seed: int, step: int) -> list[int]:
    """One group of every strategy that was played, drawn by seed and step; in order."""
    by_strategy: dict[str, list[int]] = {}
    for index, outcome in enumerate(outcomes_P):
        if outcome.group is not None:
            by_strategy.setdefault(strategy_of(outcome.builder).strategy_id, []).append(index)
    draw = random.Random(derive_seed(seed, "tokens", step))
    return sorted(draw.choice(by_strategy[name]) for name in sorted(by_strategy))


def token_rows(
    outcomes_P: Sequence[GroupOutcome],
    chosen: Sequence[int],
    batch: Batch,
    logprobs_D: Sequence[tinker.TensorData],
    texts: TokenTexts | None,
) -> list[dict[str, object]]:
    """Records of the groups at the `chosen` places.

    Logprobs are those of the update. Without texts, only ids are kept, and contexts are not.
    """
    turns_P: dict[int, list[dict[str, object]]] = {index: [] for index in chosen}
    start = 0
    for sample, weights_T, count in zip(batch.samples_N, batch.weights_N, batch.num_data_N, strict=True):
        own, start = slice(start, start + count), start + count
        if sample.outcome_index in turns_P:
            credit = credit_of(outcomes_P[sample.outcome_index].builder)
            values = _sample_values(
                sample, weights_T, batch.data_D[own], logprobs_D[own], is_plain=batch.is_plain
            )
            turns_P[sample.outcome_index] += _sample_turns(sample, values, credit, texts)
    return [
        {
            "group": index,
            "strategy": strategy_of(outcomes_P[index].builder).strategy_id,
            "turns": [_without_secrets(turn) for turn in turns],
        }
        for index, turns in turns_P.items()
    ]


_Values = Mapping[str, Sequence[float | None] | None]
"""By name, one value for every trained token of a sample; ``None`` for what all of them lack."""


def _sample_values(
    sample: TrainedSample,
    weights_T: FloatArray | None,
    data_D: Sequence[tinker.Datum],
    logprobs_D: Sequence[tinker.TensorData],
    *,
    is_plain: bool,
) -> _Values:
    nothing: list[float | None] = [None] * sample.num_trained

    def trained(name: str) -> list[float]:
        return [float(value) for datum in data_D for value in action_values(datum, name)]

    training = [trained_values(datum, own) for datum, own in zip(data_D, logprobs_D, strict=True)]
    if weights_T is not None:
        weights_T = np.minimum(weights_T, np.finfo(np.float64).max)
    return {
        "training": [float(value) for values in training for value in values] if data_D else nothing,
        "anchor": None if is_plain else trained("logprobs") if data_D else nothing,
        "weights": None if is_plain else nothing if weights_T is None else weights_T.tolist(),
        "advantages": trained("advantages") if data_D else [0.0] * sample.num_trained,
    }


def _sample_turns(
    sample: TrainedSample, values: _Values, credit: GroupCredit | None, texts: TokenTexts | None
) -> Iterator[dict[str, object]]:
    start = 0
    for turn in sample.turns_K:
        is_trained = [weight > 0 for weight in turn.weights]
        stop = start + sum(is_trained)
        whole = [_span(0, len(turn.tokens), "reward", sample.reward)] if turn.tokens else []
        columns = {
            name: None if column is None else _rounded(_spread(column[start:stop], is_trained))
            for name, column in values.items()
        }
        start = stop
        yield {
            "seat": sample.seat,
            "turn": turn.turn,
            "ids": list(turn.tokens),
            "pieces": None if texts is None else texts(turn.tokens),
            "sampling": _rounded(turn.logprobs),
            **columns,
            "advantages": [value or 0.0 for value in columns["advantages"] or ()],
            "mask": [int(trained) for trained in is_trained],
            "spans": whole if credit is None else _spans(credit, sample.seat, turn),
            **_contexts(turn, texts),
        }


def _spread(values: Sequence[float | None], is_trained: Sequence[bool]) -> list[float | None]:
    left = iter(values)
    return [next(left) if trained else None for trained in is_trained]


def _contexts(turn: TrainedTurn, texts: TokenTexts | None) -> dict[str, str | None]:
    if texts is None or turn.sampled_in == turn.trained_in:
        return {"sampled_in": None, "trained_in": None}
    return {"sampled_in": _text(turn.sampled_in, texts), "trained_in": _text(turn.trained_in, texts)}


def _text(context: Context, texts: TokenTexts) -> str:
    return "".join(texts([element for element in context if isinstance(element, int)]))


def _without_secrets(turn: Mapping[str, Any]) -> dict[str, object]:
    if turn["pieces"] is None:
        return dict(turn)
    ids, pieces = hidden_tokens(turn["ids"], turn["pieces"])
    return {**turn, "ids": ids, "pieces": pieces}


def _spans(credit: GroupCredit, seat: int, turn: TrainedTurn) -> list[dict[str, object]]:
    """The spans of a turn, whose tokens are counted from its first trained one."""
    first = turn.places[0] if turn.places else 0
    return [
        _span(max(0, span.start - first), span.stop - first, span.stream, span.reward)
        for span in sorted(credit.spans, key=lambda span: span.start)
        if (span.seat, span.transition) == (seat, turn.turn) and span.stop > first
    ]


def _span(start: int, stop: int, stream: str, reward: float) -> dict[str, object]:
    return {"start": start, "stop": stop, "stream": stream, "reward": reward}


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.6g}") for value in values]
