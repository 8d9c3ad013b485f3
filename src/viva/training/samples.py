"""Samples of a batch of groups, seat by seat: sampled tokens behind the contexts they are trained in.

Two cases, one form:

- Search strategies (`viva.experts.strategy`) choose completions and swap contexts; an estimator weighs the samples.
  Turns of which nothing is trained are left out: whatever later turns need of them stands in those turns' own contexts.
- Plain self-play swaps nothing, and its groups give every token its advantage: what its spans earned, if the builder
  has `credit` (`viva.rewards.credit`), else the seat's reward minus the mean of the group.

Legend: ``_P`` groups of a batch, ``_G`` seats of a group, ``_N`` samples, ``_K`` turns of a seat, ``_T`` trained tokens
of a seat, ``_D`` its datums.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias

import numpy as np
import tinker
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.types import (
    Trajectory,
    TrajectoryGroup,
    Transition,
)

from viva.experts.samples import FloatArray
from viva.experts.strategy import Completion, StrategyInfo, completions_of, credit_of, strategy_of
from viva.rewards.credit import GroupCredit, group_advantages, stream_advantages
from viva.selfplay.group import speakers_of
from viva.training.data_processing import (
    Element,
    is_masked,
    model_input,
    observation_elements,
    training_context,
    trajectory_to_data,
    without_silent,
)
from viva.training.rollouts import GroupOutcome

Context: TypeAlias = tuple[Element, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedTurn:
    """The trained tokens of one turn."""

    sampled_in: Context
    """Everything that stood before the first token when it was sampled. Empty in plain self-play, as `trained_in`."""
    trained_in: Context
    """Everything that stands before it in training, masked tokens of the turn included."""
    turn: int
    """Index of the turn in its seat's trajectory."""
    places: Sequence[int]
    """Places in the turn of the tokens from the first trained one on; in plain self-play, of all its tokens."""
    tokens: tuple[int, ...]
    """The tokens at these places."""
    logprobs: tuple[float, ...]
    """Sampling logprobs of these tokens."""
    weights: tuple[float, ...]
    """Weights of these tokens, 0 where they are not trained."""

    @property
    def has_gap(self) -> bool:
        """Whether sampled tokens before the last one are left out: `Completion.with_end`."""
        return len(self.places) > 0 and self.places[-1] - self.places[0] >= len(self.places)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedSample:
    """The trained tokens of one seat."""

    outcome_index: int
    seat: int
    strategy: str
    prompt: Hashable
    """Samples with the same one answer the same question: the first training context of their group's first seat. In
    plain self-play, the group's place."""
    reward: float
    finished: bool
    turns_K: tuple[TrainedTurn, ...]
    data_D: tuple[tinker.Datum, ...]
    """The datums, with the weight of each token as its advantage."""
    advantages_T: FloatArray | None
    """Made by the strategy, by credit or in plain self-play by the group, instead of an estimator's reward minus
    baseline."""
    speakers_D: tuple[str | None, ...]
    """The policy that sampled each datum, of several; else ``None``."""

    @property
    def num_trained(self) -> int:
        """Trained tokens."""
        return sum(weight > 0 for turn in self.turns_K for weight in turn.weights)

    @property
    def is_swapped(self) -> bool:
        """Whether any token is trained behind something else than it was sampled behind."""
        return any(turn.has_gap or turn.sampled_in != turn.trained_in for turn in self.turns_K)


def context_key(context: Sequence[Element]) -> Hashable:
    """A context as something that can be compared and looked up."""
    return tuple(each if isinstance(each, int) else each.model_dump_json() for each in context)


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


def centred_rewards_of(outcome: GroupOutcome) -> dict[int, float]:
    """Reward minus mean reward of the group by seat, for the seats that have one. A void group has none."""
    paid = {seat: reward for seat, reward in enumerate(outcome.paid_rewards()) if reward is not None}
    return dict(zip(paid, group_advantages(list(paid.values())), strict=True))


def batch_samples(
    outcomes_P: Sequence[GroupOutcome], *, is_plain: bool = False, keeps_silent: bool = False
) -> list[TrainedSample]:
    """All samples of the groups that are not void, group by group and seat by seat.

    Failed seats have none, and neither have seats of which nothing is trained; in plain self-play (`is_plain`), these
    have samples without datums, unless `keeps_silent` has all of their tokens, with advantages of 0. With strategies,
    credited seats without a signal have samples with advantages of 0.

    Raises:
        ValueError: If completions or credit do not fit what was sampled.
    """
    samples_N: list[TrainedSample] = []
    for index, outcome in enumerate(outcomes_P):
        if outcome.group is None:
            continue
        plans_G = (
            _plain_plans(outcome, outcome.group, keeps_silent=keeps_silent)
            if is_plain
            else _plans(outcome, outcome.group)
        )
        prompt = index if is_plain else _prompt(outcome.group, strategy_of(outcome.builder))
        samples_N += [
            _sample(outcome, outcome.group, seat, plan, index=index, prompt=prompt, is_plain=is_plain)
            for seat, plan in enumerate(plans_G)
            if plan and seat not in outcome.failed_seats
        ]
    return samples_N


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A turn's part in training: a weight, and where it is known an advantage, for the tokens at its places."""

    turn: int
    places: Sequence[int]
    weights: tuple[float, ...]
    advantages: tuple[float, ...] | None


def _whole_turn(turn: int, weights: tuple[float, ...], advantages: tuple[float, ...]) -> _Part:
    return _Part(turn=turn, places=range(len(weights)), weights=weights, advantages=advantages)


def _sample(
    outcome: GroupOutcome,
    group: TrajectoryGroup,
    seat: int,
    plan: Sequence[_Part],
    *,
    index: int,
    prompt: Hashable,
    is_plain: bool,
) -> TrainedSample:
    """A seat cut to its trained turns, behind its training contexts."""
    strategy, trajectory = strategy_of(outcome.builder), group.trajectories_G[seat]
    trained_K: list[Transition] = []
    turns_K: list[TrainedTurn] = []
    data_D: list[tinker.Datum] = []
    speakers_D: list[str | None] = []
    for part in plan:
        sampled = trajectory.transitions[part.turn]
        transition = _cut(sampled, part)
        transform = strategy.context_transform
        context = None if is_plain else training_context(transition.ob, part.turn, transform)
        if context is not None and transform is not None:
            transition = replace(transition, ob=model_input(context))
        trained_K.append(transition)
        turns_K.append(_turn(part, sampled, transition, context))
    names = speakers_of(outcome.builder, seat, trajectory)
    turns = zip(plan, trained_K, strict=True)
    # turns of two policies are never one datum
    for speaker, own in groupby(turns, lambda turn: None if names is None else names[turn[0].turn].name):
        weights, transitions = zip(*((part.weights, transition) for part, transition in own), strict=True)
        trained_D = trajectory_to_data(replace(trajectory, transitions=list(transitions)), weights)
        data_D += without_silent(trained_D)
        speakers_D += [speaker] * (len(data_D) - len(speakers_D))
    return TrainedSample(
        outcome_index=index,
        seat=seat,
        strategy=strategy.strategy_id,
        prompt=prompt,
        reward=group.get_total_rewards()[seat],
        finished=all(trajectory.transitions[part.turn].ac.stop_reason == "stop" for part in plan),
        turns_K=tuple(turns_K),
        data_D=tuple(data_D),
        advantages_T=_own_advantages(plan, strategy),
        speakers_D=tuple(speakers_D),
    )


def _turn(
    part: _Part, sampled: Transition, trained: Transition, context: Sequence[Element] | None
) -> TrainedTurn:
    """A turn as it was sampled and as it is trained; without a context, in plain self-play, from its first token on."""
    tokens, masked, sampled_in, trained_in = trained.ac.tokens, 0, (), ()
    if context is not None:
        masked = next(index for index, weight in enumerate(part.weights) if weight > 0)
        sampled_in = (*observation_elements(sampled.ob), *sampled.ac.tokens[: part.places[masked]])
        trained_in = (*context, *tokens[:masked])
    return TrainedTurn(
        sampled_in=sampled_in,
        trained_in=trained_in,
        turn=part.turn,
        places=part.places[masked:],
        tokens=tuple(tokens[masked:]),
        logprobs=tuple(trained.ac.logprobs[masked:]),
        weights=part.weights[masked:],
    )


def _prompt(group: TrajectoryGroup, strategy: StrategyInfo) -> Hashable:
    for trajectory in group.trajectories_G:
        if trajectory.transitions:
            first = trajectory.transitions[0].ob
            return context_key(training_context(first, 0, strategy.context_transform))
    return ()


def _plans(outcome: GroupOutcome, group: TrajectoryGroup) -> list[list[_Part]]:
    """Per seat, the turns to train in order."""
    credit, without = credit_of(outcome.builder), outcome.unpaid_seats
    if credit is not None:
        plans_G = zip(_credited_plans(credit, group), group.trajectories_G, strict=True)
        return [
            [part for part in plan if any(part.weights)]
            or ([] if seat in without else _silent_parts(credit, seat, trajectory))
            for seat, (plan, trajectory) in enumerate(plans_G)
        ]
    is_swapped = strategy_of(outcome.builder).context_transform is not None
    chosen_G = completions_of(outcome.builder, group)
    return [
        [] if seat in without else _chosen_parts(trajectory, chosen, is_swapped=is_swapped)
        for seat, (trajectory, chosen) in enumerate(zip(group.trajectories_G, chosen_G, strict=True))
    ]


def _credited_plans(credit: GroupCredit, group: TrajectoryGroup) -> list[list[_Part]]:
    """Per seat all turns, whose tokens weigh 1 where they earned something that counts."""
    num_tokens_G_K = [[len(turn.ac.tokens) for turn in traj.transitions] for traj in group.trajectories_G]
    plans_G: list[list[_Part]] = []
    for trajectory, own in zip(group.trajectories_G, stream_advantages(credit, num_tokens_G_K), strict=True):
        plan: list[_Part] = []
        for turn, transition in enumerate(trajectory.transitions):
            values_T = (
                [0.0] * len(transition.ac.tokens) if own is None or is_masked(transition) else own[turn]
            )
            weights = tuple(float(value != 0.0) for value in values_T)
            plan.append(_whole_turn(turn, weights, tuple(values_T)))
        plans_G.append(plan)
    return plans_G


def _silent_parts(credit: GroupCredit, seat: int, trajectory: Trajectory) -> list[_Part]:
    """The spans of a seat that earned nothing that counts, or its first turn if it has none, with advantages of 0.

    It is a sample all the same: a mixture's factors would else grow with the share of seats without a signal.
    """
    lengths_K = [len(transition.ac.tokens) for transition in trajectory.transitions]
    spans = [(span.transition, span.start, span.stop) for span in credit.spans if span.seat == seat]
    weights_K_T = [[0.0] * length for length in lengths_K]
    for turn, start, stop in spans or [(0, 0, length) for length in lengths_K[:1]]:
        weights_K_T[turn][start:stop] = [1.0] * (stop - start)
    return [
        _whole_turn(turn, tuple(weights_T), (0.0,) * len(weights_T))
        for turn, weights_T in enumerate(weights_K_T)
        if any(weights_T) and not is_masked(trajectory.transitions[turn])
    ]


def _plain_plans(outcome: GroupOutcome, group: TrajectoryGroup, *, keeps_silent: bool) -> list[list[_Part]]:
    """Per seat all turns. Turns of a policy that is not trained weigh nothing."""
    credit = credit_of(outcome.builder)
    plans_G = _centred_plans(outcome, group) if credit is None else _credited_plans(credit, group)
    if keeps_silent:
        plans_G = [
            [replace(part, weights=_trainable(trajectory.transitions[part.turn])) for part in plan]
            for plan, trajectory in zip(plans_G, group.trajectories_G, strict=True)
        ]
    for seat, plan in enumerate(plans_G):
        names = speakers_of(outcome.builder, seat, group.trajectories_G[seat])
        if names is not None:
            plans_G[seat] = [
                part if names[part.turn].is_trained else replace(part, weights=(0.0,) * len(part.weights))
                for part in plan
            ]
    return plans_G


def _trainable(transition: Transition) -> tuple[float, ...]:
    """1 for each token that can be trained: none of a masked turn, and not one that nothing stands before."""
    weights = [float(not is_masked(transition))] * len(transition.ac.tokens)
    if weights and not transition.ob.length:
        weights[0] = 0.0
    return tuple(weights)


def _centred_plans(outcome: GroupOutcome, group: TrajectoryGroup) -> list[list[_Part]]:
    """Per seat all turns. Nothing is trained of seats without a reward, nor where all rewards are equal."""
    advantages = centred_rewards_of(outcome)
    carries_signal = any(advantages.values())
    plans_G: list[list[_Part]] = []
    for seat, trajectory in enumerate(group.trajectories_G):
        advantage, plan = advantages.get(seat, 0.0), list[_Part]()
        for turn, transition in enumerate(trajectory.transitions):
            count = len(transition.ac.tokens)
            is_paid = carries_signal and seat in advantages
            weights = _trainable(transition) if is_paid else (0.0,) * count
            plan.append(_whole_turn(turn, weights, (advantage,) * count))
        plans_G.append(plan)
    return plans_G


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
        is_empty = stop == completion.start and not completion.with_end
        if is_masked(transition) or completion.weight == 0 or is_empty:
            continue
        trained = {*range(completion.start, stop), *([length - 1] if completion.with_end else [])}
        # with the context, the tokens that are not trained go as well; else they stay and are masked
        places = sorted(trained) if is_swapped else range(max(trained) + 1)
        weights = tuple(completion.weight if place in trained else 0.0 for place in places)
        advantages = None if completion.advantage is None else (completion.advantage,) * len(weights)
        parts.append(_Part(turn=completion.transition, places=places, weights=weights, advantages=advantages))
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


def _cut(transition: Transition, part: _Part) -> Transition:
    if len(part.places) == len(transition.ac.tokens):
        return transition
    tokens, logprobs = transition.ac.tokens, transition.ac.logprobs
    return replace(
        transition,
        ac=TokensWithLogprobs(
            tokens=[tokens[place] for place in part.places],
            maybe_logprobs=[logprobs[place] for place in part.places],
            stop_reason=transition.ac.stop_reason,
        ),
    )
