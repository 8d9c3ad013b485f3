"""All probes of an engine, and the quick ones that recipes ask at start."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

import tinker

from viva.doctor.bench import Bench
from viva.doctor.finding import Finding, WrongAnswerError
from viva.doctor.losses import FORMULAS, direction_probe, value_probe
from viva.doctor.probe import Probe
from viva.doctor.sampling import SAMPLING
from viva.doctor.training import TRAINING
from viva.run.clients import ServiceClient, TrainingClient
from viva.run.secrets import without_secrets

__all__ = ["PROBES", "check_engine", "examine", "put"]

PROBES: tuple[Probe, ...] = (
    *(value_probe(loss_fn) for loss_fn in FORMULAS),
    *TRAINING[:-2],
    *(direction_probe(loss_fn) for loss_fn in FORMULAS),
    *SAMPLING,
    *TRAINING[-2:],
)
"""Every question, in the order in which they are asked: samplers are looked at after the weights have moved, losses of
one's own come last, since SDKs let a client do nothing more after one of these has failed."""

_BY_NAME: Mapping[str, Probe] = {probe.name: probe for probe in PROBES}

_FAILURES = (
    tinker.TinkerError,
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What engines and SDKs raise where they cannot do something."""

_LONGEST = 240
"""Characters of an error; servers send whole documents."""


async def examine(
    bench: Bench, probes: Sequence[Probe] = PROBES, *, timeout_s: float | None = None
) -> AsyncIterator[Finding]:
    """Ask an engine one question after another; the weights of the bench's client move.

    Args:
        bench: Clients that nobody else needs.
        probes: What to ask.
        timeout_s: Longest time for one question.
    """
    for probe in probes:
        yield await put(probe, bench, timeout_s=timeout_s)


async def put(probe: Probe, bench: Bench, *, timeout_s: float | None = None) -> Finding:
    """Ask one question; what the engine raises becomes a ``no``."""
    try:
        async with asyncio.timeout(timeout_s):
            return Finding(name=probe.name, answer="yes", detail=await probe.ask(bench))
    except WrongAnswerError as error:
        return Finding(name=probe.name, answer="wrong", detail=str(error))
    except TimeoutError:
        return Finding(name=probe.name, answer="no", detail=f"no answer within {timeout_s} s")
    except _FAILURES as error:
        detail = without_secrets(f"{type(error).__name__}: {error}")
        return Finding(name=probe.name, answer="no", detail=detail[:_LONGEST])


async def check_engine(
    service: ServiceClient,
    client: TrainingClient,
    *,
    loss_fn: str,
    loss_fn_config: Mapping[str, float] | None = None,
    temperature: float = 1.0,
) -> None:
    """Refuse an engine that cannot do what a run needs; nothing is changed in it.

    Args:
        service: Of the engine.
        client: To be trained.
        loss_fn: Of the run.
        loss_fn_config: Of the run.
        temperature: Of the run's samples.

    Raises:
        ValueError: If the loss is not computed as defined, or samples have no logprobs, other ones than the trainer's,
            or ones that do not know the temperature.
    """
    names = ["samples", "sampler and trainer agree"]
    if temperature != 1.0:
        names.append("temperature in logprobs")
    bench = Bench(service=service, client=client)
    probes = [value_probe(loss_fn, loss_fn_config or {}), *(_BY_NAME[name] for name in names)]
    findings = [finding async for finding in examine(bench, probes)]
    bad = [finding for finding in findings if finding.answer != "yes"]
    if bad:
        lines = "".join(f"\n- {finding.name}: {finding.answer}: {finding.detail}" for finding in bad)
        raise ValueError(
            f"the engine cannot do what this run needs:{lines}\n"
            "Use another engine, or other options (loss_fn=importance_sampling, temperature=1.0). "
            "'viva doctor' shows all that it can do."
        )
