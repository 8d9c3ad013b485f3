"""Does training do what was asked: batches, accumulated gradients, losses of one's own, checkpoints?

Legend: ``_T`` target tokens.
"""

from typing import Any, cast

import numpy as np
import tinker

from viva.doctor.bench import Array, Bench, policy_datum
from viva.doctor.finding import WrongAnswerError
from viva.doctor.probe import Probe
from viva.run.clients import settled

__all__ = ["TRAINING", "calibrate", "check_move", "moved", "quietest"]

_GROWTH = 4.0
_LARGEST_RATE = 0.2
_SMALLEST_MOVE = 1e-3
_FORGETTING = 0.2
"""Share of a step that a restored optimiser may differ by."""


def quietest(p_T: Array) -> int:
    """The target that is neither certain nor hopeless, so that it can move both ways."""
    return int(np.abs(p_T + 1.5).argmin())


async def moved(bench: Bench, before_T: Array, place: int) -> float:
    """How much the logprob of a target changed."""
    (after_T,) = await bench.score(bench.tokens)
    return float(after_T[place] - before_T[place])


async def calibrate(bench: Bench) -> float:
    """Raise the bench's learning rate until one step moves a target visibly; done once.

    Returns:
        Changes of a logprob up to which nothing has moved.

    Raises:
        WrongAnswerError: If no step moves the target up.
    """
    if bench.noise is not None:
        return bench.noise
    (first_T,) = await bench.score(bench.tokens)
    (second_T,) = await bench.score(bench.tokens)
    place = quietest(first_T)
    noise = 3 * float(np.abs(first_T - second_T).max())
    while bench.learning_rate <= _LARGEST_RATE:
        await bench.step([_push(bench, second_T, place, 1.0)], "importance_sampling")
        change = await moved(bench, second_T, place)
        if change > max(10 * noise, _SMALLEST_MOVE):
            bench.noise = noise
            return noise
        if change < -max(10 * noise, _SMALLEST_MOVE):
            raise WrongAnswerError(
                f"a step makes a rewarded target less probable: its logprob changed by {change:+.2g}"
            )
        (second_T,) = await bench.score(bench.tokens)
        bench.learning_rate *= _GROWTH
    raise WrongAnswerError(
        f"steps with learning rates up to {_LARGEST_RATE} do not make a rewarded target more probable"
    )


def _push(bench: Bench, p_T: Array, place: int, advantage: float) -> tinker.Datum:
    advantages_T = np.zeros_like(p_T)
    advantages_T[place] = advantage
    return policy_datum(bench.tokens, p_T, advantages_T)


def check_move(change: float, expected: float, noise: float, what: str) -> None:
    """A logprob must have moved by more than noise, in the direction of the sign of what is expected.

    Raises:
        WrongAnswerError: It has not.
    """
    if np.sign(expected) * change <= noise:
        raise WrongAnswerError(
            f"{what}: the target's logprob must {'rise' if expected > 0 else 'fall'}, it changed by {change:+.2g}"
        )


async def _step(bench: Bench) -> str:
    noise = await calibrate(bench)
    return f"learning rate {bench.learning_rate:.2g} moves a logprob by more than {max(10 * noise, _SMALLEST_MOVE):.2g}"


async def _mixed(bench: Bench) -> str:
    sequences = [bench.tokens[: 3 + 2 * index] for index in (1, 0, 3, 2)]
    alone = [(await bench.score(sequence))[0] for sequence in sequences]
    together = await bench.score(*sequences)
    worst = max(float(np.abs(a - b).mean()) for a, b in zip(alone, together, strict=True))
    if worst > bench.tolerance:
        raise WrongAnswerError(
            f"beside sequences of other lengths the logprobs of one differ by {worst:.2g} on average"
        )
    return f"lengths 3 to 9 together: logprobs differ by {worst:.2g}"


async def _accumulation(bench: Bench) -> str:
    noise = await calibrate(bench)
    for advantages, expected in (((3.0, -1.0), 1), ((1.0, -3.0), -1)):
        (p_T,) = await bench.score(bench.tokens)
        place = quietest(p_T)
        for advantage in advantages:
            await bench.client.forward_backward([_push(bench, p_T, place, advantage)], "importance_sampling")
        # what is only computed forward must leave no gradient
        await bench.client.forward([_push(bench, p_T, place, -9.0 * expected)], "importance_sampling")
        await bench.optim_step()
        what = f"two calls of forward_backward with advantages {advantages}, then one of forward, then a step"
        check_move(await moved(bench, p_T, place), expected, noise, what)
    return "calls add up until the step; forward adds nothing"


async def _custom_loss(bench: Bench) -> str:
    noise = await calibrate(bench)
    for sign in (1.0, -1.0):
        (p_T,) = await bench.score(bench.tokens)
        place = quietest(p_T)

        def loss(
            data: Any, logprobs: Any, sign: float = sign, place: int = place
        ) -> tuple[Any, dict[str, float]]:
            return -sign * logprobs[0][place], {}

        bare = policy_datum(bench.tokens, p_T, np.ones_like(p_T), weighted=True)
        pending: Any = cast(Any, bench.client).forward_backward_custom([bare], loss)
        await settled(await settled(pending))  # older SDKs: a coroutine of a future
        await bench.optim_step()
        what = f"a loss of {-sign:+.0f} times a target's logprob"
        check_move(await moved(bench, p_T, place), sign, noise, what)
    return "targets move as the loss says"


async def _checkpoint(bench: Bench) -> str:
    noise = await calibrate(bench)
    (p_T,) = await bench.score(bench.tokens)
    place = quietest(p_T)
    up, down = (_push(bench, p_T, place, advantage) for advantage in (1.0, -1.0))
    await bench.step([up], "importance_sampling")
    saved = (await bench.client.save_state("doctor")).path
    (saved_T,) = await bench.score(bench.tokens)
    # the optimiser remembers the step up, so this one differs from that of a new optimiser
    memory = {"beta1": 0.9, "beta2": 0.95}
    await bench.step([down], "importance_sampling", **memory)
    went_on = await moved(bench, saved_T, place)
    restored = Bench(
        service=bench.service,
        client=await settled(bench.service.create_training_client_from_state_with_optimizer(saved)),
        learning_rate=bench.learning_rate,
    )
    (restored_T,) = await restored.score(bench.tokens)
    gap = float(np.abs(restored_T - saved_T).mean())
    if gap > max(noise, bench.tolerance * abs(float(saved_T[place] - p_T[place]))):
        raise WrongAnswerError(
            f"the logprobs of restored weights differ from the saved ones by {gap:.2g} on average"
        )
    await restored.step([down], "importance_sampling", **memory)
    change = await moved(restored, restored_T, place)
    step = abs(float(saved_T[place] - p_T[place]))
    if abs(change - went_on) > max(2 * noise, _FORGETTING * step):
        raise WrongAnswerError(
            f"the next step changes a logprob by {went_on:+.2g}, after a restart from the checkpoint by {change:+.2g}: "
            "the optimiser's state is not restored"
        )
    return f"weights differ by {gap:.2g}, the next step by {abs(change - went_on):.2g}"


TRAINING: tuple[Probe, ...] = (
    Probe(name="optimiser step", ask=_step),
    Probe(name="mixed batches", ask=_mixed),
    Probe(name="gradients add up", ask=_accumulation),
    Probe(name="checkpoints", ask=_checkpoint),
    Probe(name="losses of one's own", ask=_custom_loss),
)
"""In the order in which they are asked. All but mixed batches move the weights."""
