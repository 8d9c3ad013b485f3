"""Results and gradients of a policy, by trees and by rows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tinker
import torch

from viva.engine.losses import LOSSES
from viva.engine.packing import CostModel, make_examples
from viva.engine.policy import LossResult, Policy

DEAR_TOKENS = CostModel(token=1.0, entry=1e-9, tree_entry=2e-9, call=0.0)


def evaluate(
    policy: Policy, data: Sequence[tinker.Datum], loss: str, *, trees: bool
) -> tuple[LossResult, torch.Tensor]:
    """The result and the gradient of all weights in one row; the gradient is dropped."""
    policy.base = replace(policy.base, takes_trees=trees)
    examples = make_examples(data, LOSSES[loss], loss, policy.base.vocab_size, policy.base.context_length)
    work = policy.run(examples, LOSSES[loss], LOSSES[loss].settings(loss, None), backward=True)
    try:
        while True:
            next(work)
    except StopIteration as end:
        result = end.value
    gradients = [
        torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
        for p in policy._parameters.values()
    ]
    policy._clear_gradients()
    return result, torch.cat(gradients)


def assert_alike(ours: tuple[Any, torch.Tensor], theirs: tuple[Any, torch.Tensor], tolerance: float) -> None:
    for key in ("logprobs", "losses"):
        for mine, other in zip(getattr(ours[0], key), getattr(theirs[0], key), strict=True):
            np.testing.assert_allclose(mine, other, atol=tolerance, rtol=tolerance)
    assert (ours[1] - theirs[1]).norm() <= tolerance * theirs[1].norm()
