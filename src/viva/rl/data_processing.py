"""Trajectories become datums: what was sampled, token for token, with one advantage per token.

Legend: ``_P`` groups, ``_G`` members of a group (seats), ``_T`` tokens, ``_D`` datums.

Turns are merged into one datum as long as each observation extends everything before it (observation and action);
when it does not, a new datum starts. Completion tokens and sampling logprobs are copied verbatim: never
re-tokenised, recomputed or reordered. Everything but action tokens has advantage and mask exactly 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import tinker
from tinker_cookbook.rl.types import PARSE_ERROR_MASKED_METRIC_KEY, Trajectory, TrajectoryGroup, Transition
from tinker_cookbook.supervised.common import create_rightshifted_model_input_and_leftshifted_targets

__all__ = ["Advantage", "DatumSource", "assemble_training_data", "trajectory_to_data"]

Advantage: TypeAlias = float | Sequence[float | Sequence[float]]
"""One number for the trajectory, or one entry per transition: a number, or one number per action token.

Where there is one number per token, tokens with exactly 0 are masked: they earned nothing, so no loss may see them."""

_Element: TypeAlias = int | tinker.ModelInputChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class DatumSource:
    """Where a datum came from: indices into the groups and members that were assembled."""

    group_index: int
    seat: int


@dataclass(slots=True)
class _Sequence:
    """A growing datum: flat elements, and per token logprob, advantage and mask."""

    elements: list[_Element] = field(default_factory=list[_Element])
    logprobs_T: list[float] = field(default_factory=list[float])
    advantages_T: list[float] = field(default_factory=list[float])
    mask_T: list[float] = field(default_factory=list[float])

    def is_extended_by(self, observation: Sequence[_Element]) -> bool:
        length = len(self.elements)
        return len(observation) >= length and observation[:length] == self.elements

    def add_context(self, elements: Sequence[_Element]) -> None:
        num_tokens = sum(1 if isinstance(element, int) else element.length for element in elements)
        self.elements.extend(elements)
        for values_T in (self.logprobs_T, self.advantages_T, self.mask_T):
            values_T.extend([0.0] * num_tokens)

    def add_action(self, transition: Transition, advantage: float | Sequence[float]) -> None:
        tokens_T, logprobs_T = transition.ac.tokens, transition.ac.logprobs
        by_token = not isinstance(advantage, (int, float))
        advantages_T = advantage if by_token else [float(advantage)] * len(tokens_T)
        if not len(tokens_T) == len(logprobs_T) == len(advantages_T):
            raise ValueError(
                f"an action of {len(tokens_T)} tokens needs as many logprobs and advantages; "
                f"got {len(logprobs_T)} logprobs and {len(advantages_T)} advantages"
            )
        is_masked = float(transition.metrics.get(PARSE_ERROR_MASKED_METRIC_KEY, 0.0)) >= 1.0
        self.elements.extend(tokens_T)
        self.logprobs_T.extend(logprobs_T)
        self.advantages_T.extend([0.0] * len(tokens_T) if is_masked else advantages_T)
        if is_masked or not by_token:
            self.mask_T.extend([0.0 if is_masked else 1.0] * len(tokens_T))
        else:
            self.mask_T.extend([float(value != 0.0) for value in advantages_T])

    def to_datum(self) -> tinker.Datum:
        inputs, targets_T = create_rightshifted_model_input_and_leftshifted_targets(_chunks(self.elements))
        return tinker.Datum(
            model_input=inputs,
            loss_fn_inputs={
                "target_tokens": tinker.TensorData(data=targets_T, dtype="int64", shape=[len(targets_T)]),
                "logprobs": _float_tensor(self.logprobs_T[1:]),
                "advantages": _float_tensor(self.advantages_T[1:]),
                "mask": _float_tensor(self.mask_T[1:]),
            },
        )


def _float_tensor(values_T: list[float]) -> tinker.TensorData:
    return tinker.TensorData(data=values_T, dtype="float32", shape=[len(values_T)])


def _flat(observation: tinker.ModelInput) -> list[_Element]:
    elements: list[_Element] = []
    for chunk in observation.chunks:
        if isinstance(chunk, tinker.EncodedTextChunk):
            elements.extend(chunk.tokens)
        else:
            elements.append(chunk)
    return elements


def _chunks(elements: Sequence[_Element]) -> list[tinker.ModelInputChunk]:
    chunks: list[tinker.ModelInputChunk] = []
    tokens: list[int] = []
    for element in elements:
        if isinstance(element, int):
            tokens.append(element)
            continue
        if tokens:
            chunks.append(tinker.EncodedTextChunk(tokens=tokens))
            tokens = []
        chunks.append(element)
    if tokens:
        chunks.append(tinker.EncodedTextChunk(tokens=tokens))
    return chunks


def trajectory_to_data(traj: Trajectory, advantage: Advantage) -> list[tinker.Datum]:
    """Datums of one trajectory, in order; equal to tinker-cookbook's where the advantage is one number.

    Takes time linear in the observations' total length. A trajectory without any token (an episode that ended
    before the first turn) gives no datum. Transitions that their environment marked as masked parse errors keep
    their place in the context with mask and advantage 0.

    Args:
        traj: One agent's episode.
        advantage: See `Advantage`.

    Raises:
        ValueError: If per-transition or per-token advantages do not match the trajectory.
    """
    if not isinstance(advantage, (int, float)) and len(advantage) != len(traj.transitions):
        raise ValueError(
            f"per-transition advantages must match the {len(traj.transitions)} transitions; got {len(advantage)}"
        )
    data_D: list[tinker.Datum] = []
    current = _Sequence()
    for index, transition in enumerate(traj.transitions):
        observation = _flat(transition.ob)
        if not current.is_extended_by(observation):
            data_D.append(current.to_datum())
            current = _Sequence()
        current.add_context(observation[len(current.elements) :])
        current.add_action(transition, advantage if isinstance(advantage, (int, float)) else advantage[index])
    if current.elements:
        data_D.append(current.to_datum())
    return data_D


def assemble_training_data(
    groups_P: Sequence[TrajectoryGroup], advantages_P_G: Sequence[Sequence[Advantage | None]]
) -> tuple[list[tinker.Datum], list[DatumSource]]:
    """Datums of a batch of groups, group by group and seat by seat, and where each came from.

    Args:
        groups_P: The groups.
        advantages_P_G: One `Advantage` per member; ``None`` leaves a member out (it failed, or carries no signal). With
            advantages by transition or token, datums in which every token is masked are left out.
    """
    data_D: list[tinker.Datum] = []
    sources_D: list[DatumSource] = []
    for group_index, (group, advantages_G) in enumerate(zip(groups_P, advantages_P_G, strict=True)):
        for seat, (traj, advantage) in enumerate(zip(group.trajectories_G, advantages_G, strict=True)):
            if advantage is None:
                continue
            new_D = trajectory_to_data(traj, advantage)
            if not isinstance(advantage, (int, float)):
                new_D = [datum for datum in new_D if any(datum.loss_fn_inputs["mask"].data)]
            data_D.extend(new_D)
            sources_D.extend([DatumSource(group_index=group_index, seat=seat)] * len(new_D))
    return data_D, sources_D
