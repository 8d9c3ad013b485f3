"""What a batch of groups has to train, seat by seat: sampled tokens behind the contexts they are trained in.

A strategy (`viva.experts.strategy`) chooses completions and swaps contexts; this turns both into datums whose
advantages hold the weight of every token, to be filled in once an estimator has spoken. Turns of which nothing is
trained are left out: whatever later turns need of them stands in those turns' own contexts.

Legend: ``_P`` groups of a batch, ``_G`` seats of a group, ``_K`` turns of a seat, ``_T`` trained tokens of a seat,
``_D`` its datums.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import tinker
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.types import PARSE_ERROR_MASKED_METRIC_KEY, Trajectory, TrajectoryGroup, Transition

from viva.experts.samples import FloatArray
from viva.experts.strategy import Completion, StrategyInfo, completions_of, strategy_of
from viva.rewards.streams import stream_advantages
from viva.training.advantages import credit_of
from viva.training.data_processing import Element, observation_elements, trajectory_to_data
from viva.training.rollouts import GroupOutcome

__all__ = [
    "Context",
    "ExpertSample",
    "TrainedTurn",
    "action_values",
    "context_key",
    "expert_samples",
    "with_values",
]

Context: TypeAlias = tuple[Element, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedTurn:
    """What is trained of one turn."""

    sampled_in: Context
    """Everything that stood before the first trained token when it was sampled."""
    trained_in: Context
    """What stands before it in training, what comes from the turn itself included."""
    turn: int
    """Index of the turn in its seat's trajectory."""
    first: int
    """Place of the first trained token in the turn."""
    tokens: tuple[int, ...]
    """From the first trained token on."""
    weights: tuple[float, ...]
    """Of these tokens."""
    has_gap: bool = False
    """Whether sampled tokens before the last one are left out: `Completion.with_end`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertSample:
    """What is trained of one seat."""

    outcome_index: int
    seat: int
    strategy: str
    prompt: Hashable
    """Samples with the same one answer the same question: the first training context of their group's first seat."""
    reward: float
    finished: bool
    turns_K: tuple[TrainedTurn, ...]
    data_D: tuple[tinker.Datum, ...]
    """With the weight of each token as its advantage."""
    advantages_T: FloatArray | None
    """Made by the strategy or by credit, instead of reward minus baseline."""

    @property
    def is_swapped(self) -> bool:
        """Whether any token is trained behind something else than it was sampled behind."""
        return any(turn.has_gap or turn.sampled_in != turn.trained_in for turn in self.turns_K)


def context_key(context: Sequence[Element]) -> Hashable:
    """A context as something that can be compared and looked up."""
    return tuple(each if isinstance(each, int) else each.model_dump_json() for each in context)


def action_values(datum: tinker.Datum, name: str) -> FloatArray:
    """An input of the loss at the trained tokens of a datum, in order."""
    inputs = datum.loss_fn_inputs
    return inputs[name].to_numpy()[inputs["mask"].to_numpy() > 0].astype(np.float64)


def with_values(
    data_D: Sequence[tinker.Datum], advantages_T: FloatArray, logprobs_T: FloatArray
) -> list[tinker.Datum]:
    """Datums with other advantages and logprobs at their trained tokens, given in order over all of them."""
    filled: list[tinker.Datum] = []
    start = 0
    for datum in data_D:
        is_trained = datum.loss_fn_inputs["mask"].to_numpy() > 0
        stop = start + int(is_trained.sum())
        inputs = dict(datum.loss_fn_inputs)
        for name, values_T in (("advantages", advantages_T), ("logprobs", logprobs_T)):
            values = np.zeros(len(is_trained), dtype=np.float32)
            values[is_trained] = values_T[start:stop]
            inputs[name] = tinker.TensorData.from_numpy(values)
        filled.append(tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs))
        start = stop
    return filled


def expert_samples(outcomes_P: Sequence[GroupOutcome]) -> list[ExpertSample]:
    """All samples of the groups that are not void, group by group and seat by seat.

    Failed seats have none, and neither have seats of which nothing is trained.

    Raises:
        ValueError: If completions do not fit what was sampled.
    """
    samples: list[ExpertSample] = []
    for index, outcome in enumerate(outcomes_P):
        if outcome.group is None:
            continue
        strategy = strategy_of(outcome.builder)
        prompt = _prompt(outcome.group, strategy)
        rewards_G = outcome.group.get_total_rewards()
        plans_G = _plans(outcome, outcome.group)
        for seat, (trajectory, plan) in enumerate(zip(outcome.group.trajectories_G, plans_G, strict=True)):
            if seat in outcome.failed_seats or not plan:
                continue
            turns_K, data_D = _data(trajectory, plan, strategy)
            samples.append(
                ExpertSample(
                    outcome_index=index,
                    seat=seat,
                    strategy=strategy.strategy_id,
                    prompt=prompt,
                    reward=rewards_G[seat],
                    finished=all(trajectory.transitions[part.turn].ac.stop_reason == "stop" for part in plan),
                    turns_K=turns_K,
                    data_D=data_D,
                    advantages_T=_own_advantages(plan, strategy),
                )
            )
    return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What to train of one turn: a weight, and where it is known an advantage, for every token from `start` on.

    With `has_gap` the last of them is the turn's last token, whatever lies before it.
    """

    turn: int
    start: int
    weights: tuple[float, ...]
    advantages: tuple[float, ...] | None
    has_gap: bool = False


def _prompt(group: TrajectoryGroup, strategy: StrategyInfo) -> Hashable:
    for trajectory in group.trajectories_G:
        if trajectory.transitions:
            first = trajectory.transitions[0].ob
            if strategy.context_transform is not None:
                first = strategy.context_transform(first, 0)
            return context_key(observation_elements(first))
    return ()


def _plans(outcome: GroupOutcome, group: TrajectoryGroup) -> list[list[_Part]]:
    """Per seat, the turns to train in order."""
    credit = credit_of(outcome.builder)
    if credit is None:
        is_swapped = strategy_of(outcome.builder).context_transform is not None
        chosen_G = completions_of(outcome.builder, group)
        return [
            _chosen_parts(trajectory, chosen, is_swapped=is_swapped)
            for trajectory, chosen in zip(group.trajectories_G, chosen_G, strict=True)
        ]
    num_tokens_G_K = [[len(turn.ac.tokens) for turn in traj.transitions] for traj in group.trajectories_G]
    return [
        [
            _Part(
                turn=turn,
                start=0,
                weights=tuple(float(value != 0.0) for value in values_T),
                advantages=tuple(values_T),
            )
            for turn, values_T in enumerate(advantages_K_T or [])
            if any(values_T)
        ]
        for advantages_K_T in stream_advantages(credit, num_tokens_G_K)
    ]


def _chosen_parts(
    trajectory: Trajectory, completions: Sequence[Completion], *, is_swapped: bool
) -> list[_Part]:
    turns = [completion.transition for completion in completions]
    if len(set(turns)) < len(turns) or any(turn >= len(trajectory.transitions) for turn in turns):
        raise ValueError(
            f"a seat has at most one completion in each of its {len(trajectory.transitions)} turns; got turns {turns}"
        )
    parts: list[_Part] = []
    for completion in sorted(completions, key=lambda each: each.transition):
        transition = trajectory.transitions[completion.transition]
        length = len(transition.ac.tokens)
        stop = length if completion.stop is None else completion.stop
        if stop > length:
            raise ValueError(f"{completion} reaches beyond the {length} tokens of its turn")
        if completion.with_end and (stop == length or transition.ac.stop_reason != "stop"):
            raise ValueError(f"{completion} has no stop token behind it in a turn of {length} tokens")
        is_masked = float(transition.metrics.get(PARSE_ERROR_MASKED_METRIC_KEY, 0.0)) >= 1.0
        is_empty = stop == completion.start and not completion.with_end
        if is_masked or completion.weight == 0 or is_empty:
            continue
        # with the context, the tokens before the completion go as well; else they stay and are masked
        start = completion.start if is_swapped else 0
        weights = (0.0,) * (completion.start - start) + (completion.weight,) * (stop - completion.start)
        if completion.with_end:
            between = 0 if is_swapped else length - 1 - stop
            weights += (0.0,) * between + (completion.weight,)
        advantages = None if completion.advantage is None else (completion.advantage,) * len(weights)
        parts.append(
            _Part(
                turn=completion.transition,
                start=start,
                weights=weights,
                advantages=advantages,
                has_gap=completion.with_end and is_swapped and stop < length - 1,
            )
        )
    return parts


def _own_advantages(plan: Sequence[_Part], strategy: StrategyInfo) -> FloatArray | None:
    given = [part.advantages for part in plan if part.advantages is not None]
    if not given:
        return None
    if len(given) < len(plan):
        raise ValueError(
            f"strategy {strategy.strategy_id!r} gives an advantage to some completions of a seat and not to others; "
            "give all or none"
        )
    values = [value for advantages in given for value in advantages]
    weights = [weight for part in plan for weight in part.weights]
    return np.array([value for value, weight in zip(values, weights, strict=True) if weight > 0])


def _data(
    trajectory: Trajectory, plan: Sequence[_Part], strategy: StrategyInfo
) -> tuple[tuple[TrainedTurn, ...], tuple[tinker.Datum, ...]]:
    transform = strategy.context_transform
    cut = [_cut(trajectory.transitions[part.turn], part) for part in plan]
    turns_K: list[TrainedTurn] = []
    for part, transition in zip(plan, cut, strict=True):
        swapped = transition.ob if transform is None else transform(transition.ob, part.turn)
        masked = next(place for place, weight in enumerate(part.weights) if weight > 0)
        tokens = transition.ac.tokens
        before = trajectory.transitions[part.turn].ac.tokens[: part.start + masked]
        turns_K.append(
            TrainedTurn(
                sampled_in=(*observation_elements(transition.ob), *before),
                trained_in=(*observation_elements(swapped), *tokens[:masked]),
                turn=part.turn,
                first=part.start + masked,
                tokens=tuple(tokens[masked:]),
                weights=part.weights[masked:],
                has_gap=part.has_gap,
            )
        )
    data_D = trajectory_to_data(
        replace(trajectory, transitions=cut),
        [part.weights for part in plan],
        None if transform is None else lambda observation, place: transform(observation, plan[place].turn),
    )
    return tuple(turns_K), tuple(data_D)


def _cut(transition: Transition, part: _Part) -> Transition:
    stop = part.start + len(part.weights) - part.has_gap
    if part.start == 0 and stop == len(transition.ac.tokens):
        return transition
    tokens, logprobs = list(transition.ac.tokens), list(transition.ac.logprobs)
    end = [-1] if part.has_gap else []
    places = [*range(part.start, stop), *end]
    return replace(
        transition,
        ac=TokensWithLogprobs(
            tokens=[tokens[place] for place in places],
            maybe_logprobs=[logprobs[place] for place in places],
            stop_reason=transition.ac.stop_reason,
        ),
    )
