"""Trajectories become datums: what was sampled, token for token, with one advantage per token.

Legend: ``_P`` groups, ``_G`` members of a group (seats), ``_T`` tokens, ``_D`` datums.

Turns are merged into one datum as long as each observation extends everything before it; else a new datum starts.
Completion tokens and sampling logprobs are copied verbatim. Everything but action tokens has advantage and mask 0.

A context transform is applied before anything is merged: every action token is trained behind exactly the transformed
observation of its own turn (and the tokens of its turn before it).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import tinker
from tinker_cookbook.rl.types import (
    PARSE_ERROR_MASKED_METRIC_KEY,
    Observation,
    Trajectory,
    TrajectoryGroup,
    Transition,
)

from viva.experts.samples import FloatArray
from viva.experts.strategy import ContextTransform

Advantage: TypeAlias = float | Sequence[float | Sequence[float]]
"""One number for the trajectory, or one entry per transition: a number, or one number per action token.

Where there is one number per token, tokens with exactly 0 are masked: they earned nothing, so no loss may see them."""

Element: TypeAlias = int | tinker.ModelInputChunk
"""One token, or an image."""

ScoredDatum: TypeAlias = tuple[tinker.Datum, tinker.TensorData]
"""A datum, and the trainer's logprobs of its targets."""


@dataclass(slots=True)
class _Sequence:
    """A growing datum: flat elements, and per token logprob, advantage and mask."""

    elements: list[Element] = field(default_factory=list[Element])
    logprobs_T: list[float] = field(default_factory=list[float])
    advantages_T: list[float] = field(default_factory=list[float])
    mask_T: list[float] = field(default_factory=list[float])

    def is_extended_by(self, observation: Sequence[Element]) -> bool:
        length = len(self.elements)
        return len(observation) >= length and observation[:length] == self.elements

    def add_context(self, elements: Sequence[Element]) -> None:
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
        masked = is_masked(transition)
        self.elements.extend(tokens_T)
        self.logprobs_T.extend(logprobs_T)
        self.advantages_T.extend([0.0] * len(tokens_T) if masked else advantages_T)
        if masked or not by_token:
            self.mask_T.extend([0.0 if masked else 1.0] * len(tokens_T))
        else:
            self.mask_T.extend([float(value != 0.0) for value in advantages_T])

    def to_datum(self) -> tinker.Datum:
        """Inputs are all elements but the last token, targets all tokens but the first; an image's targets are 0."""
        if not isinstance(self.elements[-1], int) or len(self.mask_T) < 2:
            raise ValueError(
                "a datum must end with a token that stands behind something; got a length of "
                f"{len(self.mask_T)}, with {self.elements[-1]!r:.80} last. A turn needs an observation and an action"
            )
        targets_T: list[int] = []
        for element in self.elements:
            targets_T += [element] if isinstance(element, int) else [0] * element.length
        del targets_T[0]
        return tinker.Datum(
            model_input=model_input(self.elements[:-1]),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData(data=targets_T, dtype="int64", shape=[len(targets_T)]),
                "logprobs": _float_tensor(self.logprobs_T[1:]),
                "advantages": _float_tensor(self.advantages_T[1:]),
                "mask": _float_tensor(self.mask_T[1:]),
            },
        )


def is_masked(transition: Transition) -> bool:
    """Whether the environment masks the turn as a parse error."""
    return float(transition.metrics.get(PARSE_ERROR_MASKED_METRIC_KEY, 0.0)) >= 1.0


def _float_tensor(values_T: list[float]) -> tinker.TensorData:
    return tinker.TensorData(data=values_T, dtype="float32", shape=[len(values_T)])


def trained_values(datum: tinker.Datum, values: tinker.TensorData) -> FloatArray:
    """Values of a datum's trained tokens (``mask > 0``), in order."""
    return values.to_numpy()[datum.loss_fn_inputs["mask"].to_numpy() > 0].astype(np.float64)


def action_values(datum: tinker.Datum, name: str) -> FloatArray:
    """An input of the loss at the trained tokens of a datum, in order."""
    return trained_values(datum, datum.loss_fn_inputs[name])


def observation_elements(observation: Observation) -> list[Element]:
    """An observation's tokens and images, in order."""
    elements: list[Element] = []
    for chunk in observation.chunks:
        if isinstance(chunk, tinker.EncodedTextChunk):
            elements.extend(chunk.tokens)
        else:
            elements.append(chunk)
    return elements


def model_input(elements: Sequence[Element]) -> tinker.ModelInput:
    """The opposite of `observation_elements`."""
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
    return tinker.ModelInput(chunks=chunks)


def trajectory_to_data(
    traj: Trajectory, advantage: Advantage, context_transform: ContextTransform | None = None
) -> list[tinker.Datum]:
    """Datums of one trajectory, in order; equal to tinker-cookbook's where the advantage is one number.

    Takes time linear in the observations' total length. A trajectory without any token (an episode that ended
    before the first turn) gives no datum. Transitions that their environment marked as masked parse errors keep
    their place in the context with mask and advantage 0.

    Raises:
        ValueError: If per-transition or per-token advantages do not match the trajectory, or a transformed context is
            empty (the first token could not be predicted from anything).
    """
    if not isinstance(advantage, (int, float)) and len(advantage) != len(traj.transitions):
        raise ValueError(
            f"per-transition advantages must match the {len(traj.transitions)} transitions; got {len(advantage)}"
        )
    data_D: list[tinker.Datum] = []
    current = _Sequence()
    for index, transition in enumerate(traj.transitions):
        observation = training_context(transition.ob, index, context_transform)
        if not current.is_extended_by(observation):
            data_D.append(current.to_datum())
            current = _Sequence()
        current.add_context(observation[len(current.elements) :])
        current.add_action(transition, advantage if isinstance(advantage, (int, float)) else advantage[index])
    if current.elements:
        data_D.append(current.to_datum())
    return data_D


def training_context(
    observation: Observation, index: int, context_transform: ContextTransform | None
) -> list[Element]:
    """Tokens and images that a turn is trained behind.

    Raises:
        ValueError: If the transform leaves none.
    """
    if context_transform is None:
        return observation_elements(observation)
    elements = observation_elements(context_transform(observation, index))
    if not elements:
        raise ValueError(
            f"the training context of turn {index} is empty; a context_transform must return at least one token"
        )
    return elements


def without_silent(data_D: Sequence[tinker.Datum]) -> list[tinker.Datum]:
    """The datums of which any token is trained."""
    return [datum for datum in data_D if any(datum.loss_fn_inputs["mask"].data)]


def assemble_training_data(
    groups_P: Sequence[TrajectoryGroup],
    advantages_P_G: Sequence[Sequence[Advantage | None]],
    context_transforms_P: Sequence[ContextTransform | None] | None = None,
) -> tuple[list[tinker.Datum], list[tuple[int, int]]]:
    """Datums of a batch of groups, group by group and seat by seat, and the group and the seat of each.

    Args:
        groups_P: The groups.
        advantages_P_G: One `Advantage` per member; ``None`` leaves a member out (it failed, or carries no signal). With
            advantages by transition or token, datums in which every token is masked are left out.
        context_transforms_P: Training contexts, group by group; ``None`` trains everything as it was sampled.
    """
    transforms_P = [None] * len(groups_P) if context_transforms_P is None else context_transforms_P
    data_D: list[tinker.Datum] = []
    sources_D: list[tuple[int, int]] = []
    members_P = zip(groups_P, advantages_P_G, transforms_P, strict=True)
    for group_index, (group, advantages_G, transform) in enumerate(members_P):
        for seat, (traj, advantage) in enumerate(zip(group.trajectories_G, advantages_G, strict=True)):
            if advantage is None:
                continue
            new_D = trajectory_to_data(traj, advantage, transform)
            if not isinstance(advantage, (int, float)):
                new_D = without_silent(new_D)
            data_D.extend(new_D)
            sources_D.extend([(group_index, seat)] * len(new_D))
    return data_D, sources_D
