"""Training data as the losses need it: checked, flattened, and grouped into micro-batches.

Shapes: ``N`` tokens of one datum (inputs and targets correspond one to one), ``K`` candidates per target.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tinker

from viva.engine.losses import Loss

__all__ = ["Example", "make_examples", "micro_batches"]

_MASK = "mask"
"""Loss input of any loss that may be left out: not 0 where a target's logprob and loss are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One datum."""

    tokens: np.ndarray
    """``[N]`` int64 model input."""
    targets: np.ndarray
    """``[N]`` or ``[N, K]`` int64."""
    inputs: Mapping[str, np.ndarray]
    """What the loss reads, float32, each of the targets' shape."""
    active: np.ndarray
    """Targets whose loss can have a gradient, booleans of the targets' shape."""
    wanted: np.ndarray
    """Targets whose logprob is computed, all active ones among them; booleans of the targets' shape."""


def make_examples(
    data: Sequence[tinker.Datum], loss: Loss, name: str, vocab_size: int, context_length: int
) -> list[Example]:
    """Check the data of one ``forward_backward``.

    Raises:
        ValueError: Which datum is wrong, in what, and what is allowed.
    """
    if not data:
        raise ValueError("No data were given; forward and forward_backward need at least one datum.")
    return [
        _make_example(index, datum, loss, name, vocab_size, context_length)
        for index, datum in enumerate(data)
    ]


def _make_example(
    index: int, datum: tinker.Datum, loss: Loss, name: str, vocab_size: int, context_length: int
) -> Example:
    tokens = np.asarray(datum.model_input.to_ints(), dtype=np.int64)
    given = datum.loss_fn_inputs
    allowed = {"target_tokens", *loss.inputs, _MASK}
    optional = {*loss.optional, _MASK}
    unknown, missing = sorted(set(given) - allowed), sorted(allowed - optional - set(given))
    if unknown or missing:
        raise ValueError(
            f"Datum {index}: loss {name!r} takes the inputs {sorted(allowed)}; missing {missing}, unknown {unknown}."
        )
    arrays = {key: given[key].to_numpy() for key in given}
    targets = arrays.pop("target_tokens").astype(np.int64)
    shape = targets.shape
    if not 1 <= targets.ndim <= 1 + loss.dense or len(targets) != len(tokens) or len(tokens) == 0:
        wanted = "[N] or [N, K]" if loss.dense else "[N]"
        raise ValueError(
            f"Datum {index}: target_tokens must have shape {wanted} with N = {len(tokens)}, the length of model_input "
            f"(at least 1), not {list(shape)}."
        )
    if len(tokens) > context_length:
        raise ValueError(f"Datum {index} has {len(tokens)} tokens; the model holds {context_length}.")
    for key, ids in (("model_input", tokens), ("target_tokens", targets)):
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError(
                f"Datum {index}: {key} has ids from {ids.min()} to {ids.max()}; the model's are 0 to {vocab_size - 1}."
            )
    inputs: dict[str, np.ndarray] = {}
    for key in (*loss.inputs, _MASK):
        value = np.asarray(arrays.get(key, np.ones(shape)), dtype=np.float32)
        if value.shape != shape or not np.isfinite(value).all():
            raise ValueError(
                f"Datum {index}: {key} must be finite numbers of shape {list(shape)} like target_tokens; it has shape "
                f"{list(value.shape)} and {int((~np.isfinite(value)).sum())} values that are not finite."
            )
        inputs[key] = value
    wanted = inputs.pop(_MASK) != 0
    active = loss.active(inputs) & wanted
    return Example(tokens=tokens, targets=targets, inputs=inputs, active=active, wanted=wanted)


def micro_batches(examples: Sequence[Example], max_tokens: int) -> list[list[int]]:
    """Indices of examples computed together: of similar length, within a budget of padded tokens.

    Examples without any gradient are apart. The longest come first, so that what does not fit in memory fails at once.
    """

    def idle(example: Example) -> bool:
        return not example.active.any()

    order = sorted(
        range(len(examples)), key=lambda index: (idle(examples[index]), -len(examples[index].tokens))
    )
    batches: list[list[int]] = []
    for index in order:
        head = examples[batches[-1][0]] if batches else None
        if (
            head is not None
            and idle(head) == idle(examples[index])
            and (len(batches[-1]) + 1) * len(head.tokens) <= max_tokens
        ):
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
