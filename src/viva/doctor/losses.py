"""Does the engine compute the loss it was asked for? Some refuse losses, some silently ignore the name.

Two questions for each loss. Its value: the engine's answer on tokens whose ratios lie far outside every clipping range,
against the formula. Its direction: one target is pushed several times at once, with ratios and advantages for which
the losses disagree whether its probability must rise or fall, and an optimiser step shows which.

Legend: ``p`` the trainer's logprob, ``q`` the sampler's, ``a`` the advantage, ``r = exp(p - q)``, ``_T`` target tokens.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from viva.doctor.bench import Array, Bench, logprobs_of, policy_datum, total_loss
from viva.doctor.finding import WrongAnswerError
from viva.doctor.probe import Probe
from viva.doctor.training import calibrate, check_move, moved, quietest

__all__ = ["FORMULAS", "Formula", "direction_probe", "value_probe"]

Config = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """The definition of a loss, per token."""

    value: Callable[[Array, Array, Array, Config], Array]
    slope: Callable[[Array, Array, Array, Config], Array]
    """Derivative with respect to ``p``."""
    config: Config
    """Its defaults."""
    other_config: Config = field(default_factory=dict[str, float])
    """Settings that must make a difference."""


def _clipped(p: Array, q: Array, config: Config) -> Array:
    return np.exp(p - q).clip(config["clip_low_threshold"], config["clip_high_threshold"])


def _ppo(p: Array, q: Array, a: Array, config: Config) -> Array:
    return -np.minimum(np.exp(p - q) * a, _clipped(p, q, config) * a)


def _ppo_slope(p: Array, q: Array, a: Array, config: Config) -> Array:
    ratio = np.exp(p - q)
    return np.where(ratio * a <= _clipped(p, q, config) * a, -ratio * a, 0.0)


FORMULAS: Mapping[str, Formula] = MappingProxyType(
    {
        "cross_entropy": Formula(
            value=lambda p, q, a, config: -a * p, slope=lambda p, q, a, config: -a, config={}
        ),
        "importance_sampling": Formula(
            value=lambda p, q, a, config: -np.exp(p - q) * a,
            slope=lambda p, q, a, config: -np.exp(p - q) * a,
            config={},
        ),
        "ppo": Formula(
            value=_ppo,
            slope=_ppo_slope,
            config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
            other_config={"clip_low_threshold": 0.5, "clip_high_threshold": 3.0},
        ),
        "cispo": Formula(
            value=lambda p, q, a, config: -_clipped(p, q, config) * a * p,
            slope=lambda p, q, a, config: -_clipped(p, q, config) * a,
            config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
            other_config={"clip_low_threshold": 0.5, "clip_high_threshold": 3.0},
        ),
        "dro": Formula(
            value=lambda p, q, a, config: -(p * a - 0.5 * config["beta"] * (p - q) ** 2),
            slope=lambda p, q, a, config: -(a - config["beta"] * (p - q)),
            config={"beta": 0.05},
            other_config={"beta": 0.5},
        ),
    }
)
"""As the API documents them (https://tinker-docs.thinkingmachines.ai/losses); ``a`` is the weight of cross entropy."""

_SHIFTS_T = np.array([2.0, -2.0, 0.1, 2.0, -2.0, -0.1, 1.0, -1.0])
_ADVANTAGES_T = np.array([1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.5, 2.0])
_VALUE_TOLERANCE = 1e-3

_PUSHES = (
    ((0.0, 1.0), (0.0, 0.0)),
    ((2.0, 1.0), (0.0, -5.0)),
    ((2.0, -1.0), (0.0, 5.0)),
    ((2.0, 0.0), (0.0, 0.05)),
)
"""Pairs of ``(p - q, a)`` on one target. What must happen to it differs: importance sampling ``++-+``, PPO ``+--+``,
CISPO and cross entropy ``+-++``, DRO ``+-+-``."""


def value_probe(loss_fn: str, config: Config | None = None) -> Probe:
    """Whether the engine's value of a loss is right; nothing is changed in the engine.

    Args:
        loss_fn: Key of `FORMULAS`.
        config: The settings to ask with; by default without any, and then with others.

    Raises:
        ValueError: An unknown loss.
    """
    if loss_fn not in FORMULAS:
        raise ValueError(f"loss_fn must be one of {', '.join(FORMULAS)}; got {loss_fn!r}")
    given = (
        ([{}, FORMULAS[loss_fn].other_config] if FORMULAS[loss_fn].other_config else [{}])
        if config is None
        else [config]
    )

    async def ask(bench: Bench) -> str:
        told = [await _value(bench, loss_fn, settings) for settings in given]
        return "; ".join(told)

    return Probe(name=f"value of {loss_fn}", ask=ask)


async def _value(bench: Bench, loss_fn: str, given: Config) -> str:
    formula = FORMULAS[loss_fn]
    (trained_T,) = await bench.score(bench.tokens)
    q_T = trained_T - _SHIFTS_T
    weighted = loss_fn == "cross_entropy"
    data = [policy_datum(bench.tokens, q_T, sign * _ADVANTAGES_T, weighted=weighted) for sign in (1.0, -0.5)]
    output = await bench.client.forward(data, loss_fn, dict(given) or None)
    value, (p_T, again_T) = total_loss(output), logprobs_of(output, data)
    if max(np.abs(p_T - trained_T).mean(), np.abs(again_T - trained_T).mean()) > bench.tolerance:
        raise WrongAnswerError("the logprobs of the targets change with the loss or the advantages")
    config = {**formula.config, **given}
    expected = math.fsum(
        formula.value(p, q_T, sign * _ADVANTAGES_T, config).sum() for p, sign in ((p_T, 1.0), (again_T, -0.5))
    )
    asked = f"loss_fn={loss_fn}" + (f" with {dict(given)}" if given else "")
    if value is None:
        raise WrongAnswerError(
            f"asked for {asked}, the engine does not tell its value; {expected:.4f} is right"
        )
    if not math.isclose(value, expected, rel_tol=_VALUE_TOLERANCE, abs_tol=_VALUE_TOLERANCE):
        raise WrongAnswerError(
            f"asked for {asked}, the engine answered {value:.4f} where {expected:.4f} is right: "
            "it computes something else"
        )
    return f"{value:.4f}"


def direction_probe(loss_fn: str) -> Probe:
    """Whether steps along a loss go where its formula says; moves the weights.

    Args:
        loss_fn: Key of `FORMULAS`.
    """

    async def ask(bench: Bench) -> str:
        noise = await calibrate(bench)
        signs = ""
        for pushes in _PUSHES:
            expected, seen = await _push(bench, loss_fn, pushes)
            signs += "+" if seen > 0 else "-"
            check_move(seen, expected, noise, f"pushes of (log-ratio, advantage) {pushes}")
        return f"targets move as they must: {signs}"

    return Probe(name=f"direction of {loss_fn}", ask=ask)


async def _push(bench: Bench, loss_fn: str, pushes: tuple[tuple[float, float], ...]) -> tuple[float, float]:
    """Minus the slope of the formula, and how the logprob of the target changed in a step."""
    formula = FORMULAS[loss_fn]
    (p_T,) = await bench.score(bench.tokens)
    place = quietest(p_T)
    data, expected = [], 0.0
    for shift, advantage in pushes:
        q_T, advantages_T = p_T.copy(), np.zeros_like(p_T)
        q_T[place] -= shift
        advantages_T[place] = advantage
        data.append(policy_datum(bench.tokens, q_T, advantages_T, weighted=loss_fn == "cross_entropy"))
        expected -= float(formula.slope(p_T, q_T, advantages_T, formula.config)[place])
    await bench.step(data, loss_fn)
    return expected, await moved(bench, p_T, place)
