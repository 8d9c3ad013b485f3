"""Probes of training: batches, accumulated gradients, checkpoints, losses of one's own, and every loss by its formula.

Some engines refuse losses, some silently ignore the name. Two questions for each loss. Its value: the engine's answer
on tokens whose ratios lie far outside every clipping range, against the formula. Its direction: one target is pushed
several times at once, with ratios and advantages for which the losses disagree whether its probability must rise or
fall, and an optimiser step shows which.

Legend: ``p`` the trainer's logprob, ``q`` the sampler's, ``a`` the advantage, ``r = exp(p - q)``, ``_T`` target tokens.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import tinker

from viva.doctor.bench import Array, Bench, Probe, WrongAnswerError, logprobs_of, policy_datum, total_loss
from viva.sdk import settled

_GROWTH = 4.0
_LARGEST_RATE = 0.2
_SMALLEST_MOVE = 1e-3
_FORGETTING = 0.2
"""Share of a step that a restored optimiser may differ by."""


@dataclass(frozen=True, slots=True)
class PushedTarget:
    """A target of the bench's sentence that steps push up or down."""

    bench: Bench
    p_T: Array
    """The trainer's logprobs of the sentence before it is pushed."""
    place: int

    def push(self, advantage: float, *, shift: float = 0.0, weighted: bool = False) -> tinker.Datum:
        """A datum with this advantage of it alone, whose logprob of the sampler lies `shift` below the trainer's."""
        q_T, advantages_T = self.p_T.copy(), np.zeros_like(self.p_T)
        q_T[self.place] -= shift
        advantages_T[self.place] = advantage
        return policy_datum(self.bench.tokens, q_T, advantages_T, weighted=weighted)

    async def change(self) -> float:
        """The change of its logprob since."""
        (after_T,) = await self.bench.score(self.bench.tokens)
        return float(after_T[self.place] - self.p_T[self.place])

    async def check_moved(self, expected: float, what: str) -> float:
        """The change; raises `WrongAnswerError` unless it is more than noise, and has the sign of what is expected."""
        change = await self.change()
        if np.sign(expected) * change <= self.bench.noise:
            must = "rise" if expected > 0 else "fall"
            raise WrongAnswerError(f"{what}: the target's logprob must {must}, it changed by {change:+.2g}")
        return change


async def aim(bench: Bench, place: int | None = None) -> PushedTarget:
    """A target of a calibrated bench: by default one neither certain nor hopeless, so that it can move both ways."""
    if math.isnan(bench.noise):
        await _calibrate(bench)
    return await _target(bench, place)


async def _target(bench: Bench, place: int | None = None) -> PushedTarget:
    (p_T,) = await bench.score(bench.tokens)
    return PushedTarget(bench, p_T, int(np.abs(p_T + 1.5).argmin()) if place is None else place)


async def _calibrate(bench: Bench) -> None:
    """Raise the bench's learning rate until one step moves a target visibly.

    Raises:
        WrongAnswerError: If no step moves the target up.
    """
    first, target = await _target(bench), await _target(bench)
    noise = 3 * float(np.abs(first.p_T - target.p_T).max())
    while bench.learning_rate <= _LARGEST_RATE:
        await bench.step([target.push(1.0)], "importance_sampling")
        change = await target.change()
        if change > _visible(noise):
            bench.noise = noise
            return
        if change < -_visible(noise):
            raise WrongAnswerError(
                f"a step makes a rewarded target less probable: its logprob changed by {change:+.2g}"
            )
        target = await _target(bench, target.place)
        bench.learning_rate *= _GROWTH
    raise WrongAnswerError(
        f"steps with learning rates up to {_LARGEST_RATE} do not make a rewarded target more probable"
    )


def _visible(noise: float) -> float:
    return max(10 * noise, _SMALLEST_MOVE)


async def _step(bench: Bench) -> str:
    await aim(bench)
    moved = _visible(bench.noise)
    return f"learning rate {bench.learning_rate:.2g} moves a logprob by more than {moved:.2g}"


async def _mixed(bench: Bench) -> str:
    sequences = [bench.tokens[: 3 + 2 * index] for index in (1, 0, 3, 2)]
    alone = [(await bench.score(sequence))[0] for sequence in sequences]
    together = await bench.score(*sequences)
    what = "beside sequences of other lengths the logprobs of one differ"
    worst = max(bench.check_gap(a, b, what) for a, b in zip(together, alone, strict=True))
    return f"lengths 3 to 9 together: logprobs differ by {worst:.2g}"


async def _accumulation(bench: Bench) -> str:
    for advantages, expected in (((3.0, -1.0), 1), ((1.0, -3.0), -1)):
        target = await aim(bench)
        for advantage in advantages:
            await bench.client.forward_backward([target.push(advantage)], "importance_sampling")
        # what is only computed forward must leave no gradient
        await bench.client.forward([target.push(-9.0 * expected)], "importance_sampling")
        await bench.optim_step()
        what = f"two calls of forward_backward with advantages {advantages}, then one of forward, then a step"
        await target.check_moved(expected, what)
    return "calls add up until the step; forward adds nothing"


async def _custom_loss(bench: Bench) -> str:
    for sign in (1.0, -1.0):
        target = await aim(bench)

        def loss(
            data: object, logprobs: Any, sign: float = sign, place: int = target.place
        ) -> tuple[Any, dict[str, float]]:
            return -sign * logprobs[0][place], {}

        bare = policy_datum(bench.tokens, target.p_T, np.ones_like(target.p_T), weighted=True)
        pending: Any = cast(Any, bench.client).forward_backward_custom([bare], loss)
        await settled(await settled(pending))  # older SDKs: a coroutine of a future
        await bench.optim_step()
        await target.check_moved(sign, f"a loss of {-sign:+.0f} times a target's logprob")
    return "targets move as the loss says"


async def _checkpoint(bench: Bench) -> str:
    start = await aim(bench)
    await bench.step([start.push(1.0)], "importance_sampling")
    path = (await bench.client.save_state("doctor")).path
    saved = await aim(bench, start.place)
    step = abs(float(saved.p_T[start.place] - start.p_T[start.place]))
    # the optimiser remembers the step up, so this one differs from that of a new optimiser
    down, memory = start.push(-1.0), {"beta1": 0.9, "beta2": 0.95}
    await bench.step([down], "importance_sampling", **memory)
    went_on = await saved.change()
    client = await settled(bench.service.create_training_client_from_state_with_optimizer(path))
    restored = await aim(replace(bench, client=client), start.place)
    gap = float(np.abs(restored.p_T - saved.p_T).mean())
    if gap > max(bench.noise, bench.tolerance * step):
        raise WrongAnswerError(
            f"the logprobs of restored weights differ from the saved ones by {gap:.2g} on average"
        )
    await restored.bench.step([down], "importance_sampling", **memory)
    change = await restored.change()
    if abs(change - went_on) > max(2 * bench.noise, _FORGETTING * step):
        raise WrongAnswerError(
            f"the next step changes a logprob by {went_on:+.2g}, after a restart from the checkpoint by {change:+.2g}: "
            "the optimiser's state is not restored"
        )
    return f"weights differ by {gap:.2g}, the next step by {abs(change - went_on):.2g}"


async def _two(bench: Bench) -> str:
    place = (await aim(bench)).place
    path = (await bench.client.save_state("doctor-second")).path
    second = replace(bench, client=await settled(bench.service.create_training_client_from_state(path)))
    for name, trained, other, advantage in (("first", bench, second, 1.0), ("second", second, bench, -1.0)):
        own, others = await aim(trained, place), await aim(other, place)
        # the other's gradient is not used up by this one's step
        await other.client.forward_backward([others.push(-advantage)], "importance_sampling")
        await trained.step([own.push(advantage)], "importance_sampling")
        await own.check_moved(advantage, f"a step of the {name} of two clients")
        if abs(change := await others.change()) > bench.noise:
            raise WrongAnswerError(
                f"a step of the {name} of two training clients changed a logprob of the other by {change:+.2g}"
            )
        await other.optim_step()
        await others.check_moved(-advantage, f"a step behind the {name} client's")
    return "each of two clients has weights and gradients of its own"


TRAINING: Mapping[str, Probe] = {
    "optimiser step": _step,
    "mixed batches": _mixed,
    "gradients add up": _accumulation,
    "two training clients": _two,
}
"""By name, in the order in which they are asked. All but mixed batches move the weights."""

LAST: Mapping[str, Probe] = {"checkpoints": _checkpoint, "losses of one's own": _custom_loss}
"""The same, for the end: SDKs let a client do nothing more after a loss of one's own has failed."""


Config = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """The definition of a loss, per token."""

    value: Callable[[Array, Array, Array, Config], Array]
    slope: Callable[[Array, Array, Array, Config], Array]
    """Derivative with respect to ``p``."""
    config: Config
    """Its defaults."""
    given: tuple[Config, ...] = ({},)
    """Settings to ask with; those behind the empty ones must make a difference."""


def _clipped(p: Array, q: Array, config: Config) -> Array:
    return np.exp(p - q).clip(config["clip_low_threshold"], config["clip_high_threshold"])


def _ppo_slope(p: Array, q: Array, a: Array, config: Config) -> Array:
    ratio = np.exp(p - q)
    return np.where(ratio * a <= _clipped(p, q, config) * a, -ratio * a, 0.0)


FORMULAS: Mapping[str, Formula] = {
    "cross_entropy": Formula(
        value=lambda p, q, a, config: -a * p, slope=lambda p, q, a, config: -a, config={}
    ),
    "importance_sampling": Formula(
        value=lambda p, q, a, config: -np.exp(p - q) * a,
        slope=lambda p, q, a, config: -np.exp(p - q) * a,
        config={},
    ),
    "ppo": Formula(
        value=lambda p, q, a, config: -np.minimum(np.exp(p - q) * a, _clipped(p, q, config) * a),
        slope=_ppo_slope,
        config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        given=({}, {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}),
    ),
    "cispo": Formula(
        value=lambda p, q, a, config: -_clipped(p, q, config) * a * p,
        slope=lambda p, q, a, config: -_clipped(p, q, config) * a,
        config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        given=({}, {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}),
    ),
    "dro": Formula(
        value=lambda p, q, a, config: -(p * a - 0.5 * config["beta"] * (p - q) ** 2),
        slope=lambda p, q, a, config: -(a - config["beta"] * (p - q)),
        config={"beta": 0.05},
        given=({}, {"beta": 0.5}),
    ),
}
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
    """Whether the engine's value of a loss is right, by default without settings and then with others."""
    if loss_fn not in FORMULAS:
        raise ValueError(f"loss_fn must be one of {', '.join(FORMULAS)}; got {loss_fn!r}")
    given = FORMULAS[loss_fn].given if config is None else (config,)

    async def ask(bench: Bench) -> str:
        return "; ".join([await _value(bench, loss_fn, settings) for settings in given])

    return ask


async def _value(bench: Bench, loss_fn: str, given: Config) -> str:
    formula = FORMULAS[loss_fn]
    temperature = given.get("temperature", 1.0)
    if temperature != 1.0:
        await _check_tempered(bench, temperature)
    (trained_T,) = await bench.score(bench.tokens, temperature=temperature)
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


async def _check_tempered(bench: Bench, temperature: float) -> None:
    """Refuse a trainer whose losses do not divide its logits as they were asked to."""
    tokens = [[token] for token in dict.fromkeys(bench.tokens)]
    plain, found = await asyncio.gather(
        *(bench.score_completions(*tokens, temperature=each) for each in (1.0, temperature))
    )
    try:
        bench.check_tempered(np.concatenate(found), np.concatenate(plain), temperature)
    except WrongAnswerError as error:
        raise WrongAnswerError(
            f"the trainer does as if loss_fn_config had no temperature: {error}"
        ) from error


def direction_probe(loss_fn: str) -> Probe:
    """Whether steps along a loss of `FORMULAS` go where its formula says; moves the weights."""
    formula = FORMULAS[loss_fn]

    async def ask(bench: Bench) -> str:
        signs = ""
        for pushes in _PUSHES:
            target = await aim(bench)
            data, slope = [], 0.0
            for shift, advantage in pushes:
                data.append(target.push(advantage, shift=shift, weighted=loss_fn == "cross_entropy"))
                p_1 = target.p_T[[target.place]]
                slope += float(formula.slope(p_1, p_1 - shift, np.array([advantage]), formula.config)[0])
            await bench.step(data, loss_fn)
            change = await target.check_moved(-slope, f"pushes of (log-ratio, advantage) {pushes}")
            signs += "+" if change > 0 else "-"
        return f"targets move as they must: {signs}"

    return ask
