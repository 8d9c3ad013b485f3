"""What an engine's findings allow: which of Viva's features, and what bars the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from viva.doctor.finding import Finding
from viva.doctor.losses import FORMULAS

__all__ = ["FEATURES", "Feature", "barred"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Something that Viva does if an engine lets it."""

    name: str
    needs: tuple[tuple[str, ...], ...]
    """Names of probes: one of each tuple must have been answered with yes."""


def _loss(loss_fn: str) -> tuple[tuple[str, ...], ...]:
    return (f"value of {loss_fn}",), (f"direction of {loss_fn}",)


_ALTERNATIVES = ("top-k of samples", "top-k of prompts", "last logprob of prompts")
_TRAINS = (("optimiser step",), ("mixed batches",), ("gradients add up",))
_SAMPLES = (("samples",), ("stop tokens", "stop strings"))
_LEARNS = (*_TRAINS, *_SAMPLES, ("sampler and trainer agree",), ("new samplers follow",))

FEATURES: tuple[Feature, ...] = (
    Feature(name="all recipes", needs=(*_LEARNS, *_loss("importance_sampling"))),
    *(
        Feature(name=f"loss_fn={loss_fn}", needs=(*_LEARNS, *_loss(loss_fn)))
        for loss_fn in FORMULAS
        if loss_fn not in ("cross_entropy", "importance_sampling")
    ),
    Feature(name="samplers that outlast a step", needs=(("old samplers stay",),)),
    Feature(name="temperature other than 1", needs=(("temperature in logprobs",),)),
    Feature(name="judge_mode=logprob", needs=(_ALTERNATIVES,)),
    Feature(name="judge_mode=verdict, eval_temperature=0", needs=(*_SAMPLES, ("greedy samples",))),
    Feature(name="checkpoints, behavior_if_exists=resume", needs=(("checkpoints",),)),
    Feature(name="the same run twice", needs=(("seeds",), ("mixed batches",))),
    Feature(name="supervised training with tinker-cookbook", needs=(*_TRAINS, *_loss("cross_entropy"))),
    Feature(
        name="preference training (DPO) with tinker-cookbook",
        needs=(*_TRAINS, ("losses of one's own",), ("prompt logprobs",)),
    ),
)
"""Every feature that depends on the engine."""


def barred(feature: Feature, findings: Sequence[Finding]) -> list[str]:
    """Needs of a feature that the engine does not meet; empty if the feature works."""
    answers: Mapping[str, str] = {finding.name: finding.answer for finding in findings}
    missing: list[str] = []
    for names in feature.needs:
        if not any(answers.get(name) == "yes" for name in names):
            missing.append(" or ".join(f"{name}: {answers.get(name, 'not asked')}" for name in names))
    return missing
