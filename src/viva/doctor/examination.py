"""All probes of an engine, the quick ones that recipes ask at start, and the report with the features they allow."""

import asyncio
import platform
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TypeAlias

import tinker

from viva.doctor.bench import Bench, Finding, Probe, WrongAnswerError
from viva.doctor.sampling import SAMPLING
from viva.doctor.training import FORMULAS, LAST, TRAINING, direction_probe, value_probe
from viva.run.secrets import without_secrets
from viva.sdk import ServiceClient, TrainingClient

PROBES: Mapping[str, Probe] = {
    **{f"value of {loss_fn}": value_probe(loss_fn) for loss_fn in FORMULAS},
    **TRAINING,
    **{f"direction of {loss_fn}": direction_probe(loss_fn) for loss_fn in FORMULAS},
    **SAMPLING,
    **LAST,
}
"""Every question, in the order in which they are asked: samplers are looked at after the weights have moved."""

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
"""Errors of engines and SDKs that cannot do something."""

_LONGEST = 240
"""Characters of an error; servers send whole documents."""


async def examine(
    bench: Bench, probes: Mapping[str, Probe] = PROBES, *, timeout_s: float | None = None
) -> AsyncIterator[Finding]:
    """Ask an engine one question after another; the weights of the bench's client move."""
    for name, probe in probes.items():
        yield await put(name, probe, bench, timeout_s=timeout_s)


async def put(name: str, probe: Probe, bench: Bench, *, timeout_s: float | None = None) -> Finding:
    """Ask one question; what the engine raises becomes a ``no``."""
    try:
        async with asyncio.timeout(timeout_s):
            return Finding(name=name, answer="yes", detail=await probe(bench))
    except WrongAnswerError as error:
        return Finding(name=name, answer="wrong", detail=str(error))
    except TimeoutError:
        return Finding(name=name, answer="no", detail=f"no answer within {timeout_s} s")
    except _FAILURES as error:
        detail = without_secrets(f"{type(error).__name__}: {error}")
        return Finding(name=name, answer="no", detail=detail[:_LONGEST])


async def check_engine(
    service: ServiceClient,
    client: TrainingClient,
    *,
    loss_fn: str,
    loss_fn_config: Mapping[str, float] | None = None,
    temperature: float = 1.0,
    scores_prompts: bool = False,
) -> None:
    """Refuse an engine that cannot do what a run with this loss and temperature needs; nothing is changed in it.

    A run with a KL penalty needs one that ``scores_prompts``.

    Raises:
        ValueError: If the loss is not computed as defined, or samples or prompts have no logprobs, other ones than the
            trainer's, or ones that do not know the temperature.
    """
    names = ["samples", "sampler and trainer agree"]
    if temperature != 1.0:
        names.append("temperature in logprobs")
    if scores_prompts:
        names.append("last logprob of prompts")
    bench = Bench(service=service, client=client)
    probes = {f"value of {loss_fn}": value_probe(loss_fn, loss_fn_config or {})}
    findings = [finding async for finding in examine(bench, probes | {name: PROBES[name] for name in names})]
    bad = [finding for finding in findings if finding.answer != "yes"]
    if bad:
        lines = "".join(f"\n- {finding.name}: {finding.answer}: {finding.detail}" for finding in bad)
        raise ValueError(
            f"the engine cannot do what this run needs:{lines}\n"
            "Use another engine, or other options (loss_fn=importance_sampling without loss_fn_config, "
            "temperature=1.0, kl_penalty_coef=0). 'viva doctor' shows all that it can do."
        )


Needs: TypeAlias = tuple[tuple[str, ...], ...]
"""Names of probes: one of each tuple must have been answered with yes."""


def _loss(loss_fn: str) -> Needs:
    return (f"value of {loss_fn}",), (f"direction of {loss_fn}",)


_ALTERNATIVES = ("top-k of samples", "top-k of prompts", "last logprob of prompts")
_TRAINS = (("optimiser step",), ("mixed batches",), ("gradients add up",))
_SAMPLES = (("samples",), ("stop tokens", "stop strings"))
_LEARNS = (*_TRAINS, *_SAMPLES, ("sampler and trainer agree",), ("new samplers follow",))

FEATURES: Mapping[str, Needs] = {
    "all recipes": (*_LEARNS, *_loss("importance_sampling")),
    **{
        f"loss_fn={loss_fn}": (*_LEARNS, *_loss(loss_fn))
        for loss_fn in FORMULAS
        if loss_fn not in ("cross_entropy", "importance_sampling")
    },
    "samplers that outlast a step": (("old samplers stay",),),
    "temperature other than 1": (("temperature in logprobs",),),
    "judge_mode=logprob, reward=rubric": (_ALTERNATIVES,),
    "kl_penalty_coef, reward=peer_prediction": (("last logprob of prompts",), ("old samplers stay",)),
    "judge_mode=verdict, judge_answers_first, eval_temperature=0": (*_SAMPLES, ("greedy samples",)),
    "checkpoints, behavior_if_exists=resume": (("checkpoints",),),
    "policies other than shared": (("two training clients",), ("checkpoints",)),
    "the same run twice": (("seeds",), ("mixed batches",)),
    "supervised training with tinker-cookbook": (*_TRAINS, *_loss("cross_entropy")),
    "preference training (DPO) with tinker-cookbook": (
        *_TRAINS,
        ("losses of one's own",),
        ("prompt logprobs",),
    ),
}
"""Everything that Viva does if an engine lets it, and what it needs."""


def barred(needs: Needs, findings: Sequence[Finding]) -> list[str]:
    """Needs of a feature that the engine does not meet; empty if the feature works."""
    answers: Mapping[str, str] = {finding.name: finding.answer for finding in findings}
    missing: list[str] = []
    for names in needs:
        if not any(answers.get(name) == "yes" for name in names):
            missing.append(" or ".join(f"{name}: {answers.get(name, 'not asked')}" for name in names))
    return missing


_PACKAGES = ("viva-rl", "tinker", "tinker-cookbook", "torch", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All findings about one engine, and what they were made with."""

    engine: str
    """``local``, ``Tinker``, or the server's name with its address."""
    server: str
    """The server's own name and version; empty where it says nothing, or there is none."""
    model: str
    settings: Mapping[str, str | float]
    findings: Sequence[Finding]

    @property
    def is_conformant(self) -> bool:
        """Whether every answer was yes."""
        return all(finding.answer == "yes" for finding in self.findings)

    def record(self) -> dict[str, object]:
        """The examination ready for JSON; ``format`` rises when a field changes its meaning."""
        return {
            "format": 1,
            "engine": self.engine,
            "server": self.server,
            "model": self.model,
            "settings": dict(self.settings),
            "versions": versions(),
            "conformant": self.is_conformant,
            "findings": [asdict(finding) for finding in self.findings],
            "features": [
                {"name": name, "missing": barred(needs, self.findings)} for name, needs in FEATURES.items()
            ],
        }

    def page(self) -> str:
        """The examination as Markdown."""
        count = sum(finding.answer == "yes" for finding in self.findings)
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        known = ", ".join(f"{name} {found}" for name, found in versions().items())
        lines = [
            f"# {_cell(self.engine)}: {count} of {len(self.findings)} answers are yes",
            "",
            f"Model {_cell(self.model)}; server: {_cell(self.server) or 'says nothing of itself'}; {_cell(settings)}; "
            f"{known}. What is asked: docs/doctor.md.",
            "",
            "| question | answer | what was seen |",
            "|---|---|---|",
            *(f"| {each.name} | {_mark(each.answer)} | {_cell(each.detail)} |" for each in self.findings),
            "",
            "| feature | works | what is missing |",
            "|---|---|---|",
        ]
        for name, needs in FEATURES.items():
            missing = barred(needs, self.findings)
            lines.append(f"| {name} | {'**no**' if missing else 'yes'} | {_cell('; '.join(missing))} |")
        return "\n".join(lines) + "\n"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that an examination depends on; those that are not there are left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _mark(answer: str) -> str:
    return answer if answer == "yes" else f"**{answer}**"


def _cell(text: str) -> str:
    """Text of a server in a cell: one line, and no markup."""
    for sign in "\\|`*_<>[]":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
