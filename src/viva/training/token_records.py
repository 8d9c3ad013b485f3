"""Credit on tokens, for people to look at: of a few conversations of a step, every sampled token with all its numbers.

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
from typing import Any

import numpy as np
from tinker_cookbook.rl.types import PARSE_ERROR_MASKED_METRIC_KEY, TrajectoryGroup, Transition

from viva.experts.estimation import Estimate
from viva.experts.samples import FloatArray
from viva.experts.strategy import strategy_of
from viva.rewards.streams import GroupCredit
from viva.run.secrets import hidden_tokens
from viva.training.advantages import BatchAdvantages, credit_of
from viva.training.data_processing import Advantage, DatumSource
from viva.training.expert_samples import Context, ExpertSample, TrainedTurn, action_values
from viva.training.rollouts import GroupOutcome
from viva.training.seeds import derive_seed
from viva.training.update import Updated

__all__ = ["TokenTexts", "chosen_groups", "expert_tokens", "reward_tokens"]

TokenTexts = Callable[[Sequence[int]], list[str]]
"""Text of every token, see `viva.rewards.spans.token_texts`."""


def chosen_groups(outcomes_P: Sequence[GroupOutcome], *, seed: int, step: int) -> list[int]:
    """One group of every strategy that was played, drawn by seed and step; in order."""
    by_strategy: dict[str, list[int]] = {}
    for index, outcome in enumerate(outcomes_P):
        if outcome.group is not None:
            by_strategy.setdefault(strategy_of(outcome.builder).strategy_id, []).append(index)
    draw = random.Random(derive_seed(seed, "tokens", step))
    return sorted(draw.choice(by_strategy[name]) for name in sorted(by_strategy))


def reward_tokens(
    outcomes_P: Sequence[GroupOutcome],
    chosen: Sequence[int],
    advantages: BatchAdvantages,
    sources_D: Sequence[DatumSource],
    updated: Updated,
    texts: TokenTexts | None,
) -> list[dict[str, Any]]:
    """Records of groups that were trained by their rewards or by credit.

    Args:
        outcomes_P: All groups of the batch.
        chosen: Places of those to keep.
        advantages: Of the groups that are not void.
        sources_D: Where every datum came from, groups counted among those that are not void.
        updated: The update on these datums.
        texts: Texts of tokens; without it, only ids are kept.
    """
    places = [index for index, outcome in enumerate(outcomes_P) if outcome.group is not None]
    rows: list[dict[str, Any]] = []
    for index in chosen:
        outcome, place = outcomes_P[index], places.index(index)
        if outcome.group is None:
            continue
        turns: list[dict[str, Any]] = []
        for seat, advantage in enumerate(advantages.advantages_P_G[place]):
            own_D = [
                datum
                for datum, source in enumerate(sources_D)
                if (source.group_index, source.seat) == (place, seat)
            ]
            turns += _seat_turns(outcome, outcome.group, seat, advantage, _trained(updated, own_D), texts)
        rows.append(_row(index, outcome, turns))
    return rows


def _seat_turns(
    outcome: GroupOutcome,
    group: TrajectoryGroup,
    seat: int,
    advantage: Advantage | None,
    trained: Sequence[float],
    texts: TokenTexts | None,
) -> Iterator[dict[str, Any]]:
    transitions = group.trajectories_G[seat].transitions
    values_K_T = [_token_values(transition, advantage, turn) for turn, transition in enumerate(transitions)]
    # a token that nothing stands before cannot be trained; then the tokens cannot be told apart
    is_known = len(trained) == sum(is_trained for values_T in values_K_T for _, is_trained in values_T)
    left = iter(trained)
    credit = credit_of(outcome.builder)
    for turn, (transition, values_T) in enumerate(zip(transitions, values_K_T, strict=True)):
        tokens = list(transition.ac.tokens)
        training = [next(left) if is_trained and is_known else None for _, is_trained in values_T]
        whole = [_span(0, len(tokens), "reward", group.get_total_rewards()[seat])] if tokens else []
        yield {
            "seat": seat,
            "turn": turn,
            "ids": tokens,
            "pieces": None if texts is None else texts(tokens),
            "sampling": _rounded(transition.ac.logprobs),
            "training": _rounded(training),
            "anchor": None,
            "weights": None,
            "advantages": _rounded([value for value, _ in values_T]),
            "mask": [int(is_trained) for _, is_trained in values_T],
            "spans": whole if credit is None else _spans(credit, seat, turn, 0),
            "sampled_in": None,
            "trained_in": None,
        }


def _token_values(transition: Transition, advantage: Advantage | None, turn: int) -> list[tuple[float, bool]]:
    """Advantage of every token of a turn, and whether it was trained; as `viva.training.data_processing` has it."""
    count = len(transition.ac.tokens)
    is_masked = float(transition.metrics.get(PARSE_ERROR_MASKED_METRIC_KEY, 0.0)) >= 1.0
    if advantage is None or is_masked:
        return [(0.0, False)] * count
    own = advantage if isinstance(advantage, (int, float)) else advantage[turn]
    if isinstance(own, (int, float)):
        return [(float(own), True)] * count
    return [(float(value), value != 0.0) for value in own]


def expert_tokens(
    outcomes_P: Sequence[GroupOutcome],
    chosen: Sequence[int],
    experts_N: Sequence[ExpertSample],
    estimates_N: Sequence[Estimate],
    updated: Updated,
    texts: TokenTexts | None,
) -> list[dict[str, Any]]:
    """Records of groups whose samples an estimator weighed.

    Args:
        outcomes_P: All groups of the batch.
        chosen: Places of those to keep.
        experts_N: All samples of the batch.
        estimates_N: What the estimator made of each; samples without a signal have no datums in the update.
        updated: The update on the datums of all samples, in order.
        texts: Texts of tokens; without it, only ids are kept, and contexts are not.
    """
    turns_P: dict[int, list[dict[str, Any]]] = {index: [] for index in chosen}
    start = 0
    for sample, made in zip(experts_N, estimates_N, strict=True):
        stop = start + (len(sample.data_D) if made.advantages_T.any() else 0)
        if sample.outcome_index in turns_P:
            credit = credit_of(outcomes_P[sample.outcome_index].builder)
            values = _sample_values(sample, made, updated, range(start, stop))
            turns_P[sample.outcome_index] += _sample_turns(sample, values, credit, texts)
        start = stop
    return [_row(index, outcomes_P[index], turns) for index, turns in turns_P.items()]


_Values = Mapping[str, Sequence[float | None]]
"""By name, one value for every trained token of a sample."""


def _sample_values(sample: ExpertSample, made: Estimate, updated: Updated, places: Sequence[int]) -> _Values:
    sampling = [float(value) for datum in sample.data_D for value in action_values(datum, "logprobs")]
    nothing: list[float | None] = [None] * len(sampling)
    return {
        "sampling": sampling,
        "training": _trained(updated, places) if places else nothing,
        "anchor": _inputs(updated, places, "logprobs") if places else nothing,
        "advantages": _inputs(updated, places, "advantages") if places else [0.0] * len(sampling),
        "weights": nothing if made.weights_T is None else _floats(made.weights_T),
    }


def _floats(values_T: FloatArray) -> list[float]:
    return [float(value) for value in np.minimum(values_T, np.finfo(np.float64).max)]


def _sample_turns(
    sample: ExpertSample, values: _Values, credit: GroupCredit | None, texts: TokenTexts | None
) -> Iterator[dict[str, Any]]:
    start = 0
    for turn in sample.turns_K:
        is_trained = [weight > 0 for weight in turn.weights]
        stop = start + sum(is_trained)
        whole = [_span(0, len(turn.tokens), "reward", sample.reward)] if turn.tokens else []
        columns = {name: _rounded(_spread(column[start:stop], is_trained)) for name, column in values.items()}
        start = stop
        yield {
            "seat": sample.seat,
            "turn": turn.turn,
            "ids": list(turn.tokens),
            "pieces": None if texts is None else texts(turn.tokens),
            **columns,
            "advantages": [value or 0.0 for value in columns["advantages"]],
            "mask": [int(trained) for trained in is_trained],
            "spans": whole if credit is None else _spans(credit, sample.seat, turn.turn, turn.first),
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


def _row(index: int, outcome: GroupOutcome, turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    told = [_without_secrets(turn) for turn in turns]
    return {"group": index, "strategy": strategy_of(outcome.builder).strategy_id, "turns": told}


def _without_secrets(turn: Mapping[str, Any]) -> dict[str, Any]:
    if turn["pieces"] is None:
        return dict(turn)
    ids, pieces = hidden_tokens(turn["ids"], turn["pieces"])
    return {**turn, "ids": ids, "pieces": pieces}


def _spans(credit: GroupCredit, seat: int, turn: int, first: int) -> list[dict[str, Any]]:
    """The spans of a turn, whose tokens are counted from its first trained one."""
    return [
        _span(max(0, span.start - first), span.stop - first, span.stream, span.reward)
        for span in sorted(credit.spans, key=lambda span: span.start)
        if (span.seat, span.transition) == (seat, turn) and span.stop > first
    ]


def _span(start: int, stop: int, stream: str, reward: float) -> dict[str, Any]:
    return {"start": start, "stop": stop, "stream": stream, "reward": reward}


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.6g}") for value in values]


def _trained(updated: Updated, places: Sequence[int]) -> list[float]:
    """Logprobs of the trained tokens of some datums, in order."""
    return [
        float(value)
        for place in places
        for value in updated.logprobs_D[place].to_numpy()[
            updated.data_D[place].loss_fn_inputs["mask"].to_numpy() > 0
        ]
    ]


def _inputs(updated: Updated, places: Sequence[int], name: str) -> list[float]:
    """An input of the loss at the trained tokens of some datums, in order."""
    return [float(value) for place in places for value in action_values(updated.data_D[place], name)]
