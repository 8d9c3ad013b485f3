"""``viva doctor``: an engine's answers to all probes, and what they allow, as text."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import chz

from viva.doctor.bench import Bench, Finding
from viva.doctor.examination import FEATURES, PROBES, Report, barred, examine, versions
from viva.recipes.common import resolve_model
from viva.recipes.plan import at_least
from viva.run.files import write_atomic
from viva.sdk import settled
from viva.training.remote import server_name
from viva.training.service import EngineConfig, Engines, choose_engine

_WIDTH = max(map(len, (*PROBES, *FEATURES)))


@chz.chz
class DoctorOptions:
    """Options of ``viva doctor``."""

    model_name: str = chz.field(default="tiny", doc="hub name, model folder, or tiny (the built-in policy)")
    engine: Literal["local", "remote"] | None = chz.field(
        default=None,
        doc="default: remote with base_url, or with TINKER_API_KEY set and a model from the hub; else local",
    )
    base_url: str | None = None
    device: str | None = chz.field(default=None, doc="cpu or cuda; a GPU if there is one")
    precision: Literal["float32", "fast", "bfloat16"] = "float32"
    lora_rank: int = chz.field(default=8, doc="rank of the adapter that is trained; 0 trains all weights")
    tolerance: float = chz.field(
        default=0.1, doc="mean difference of logprobs that rounding may make; 0.001 suits float32"
    )
    timeout_s: float = chz.field(default=600.0, doc="longest time for one question")
    report: str | None = chz.field(
        default=None, doc="write the findings to REPORT.md, a page, and REPORT.json, for machines"
    )


async def examine_engine(options: DoctorOptions, say: Callable[[str], None]) -> bool:
    """Put every question to an engine, with an adapter of its own that is trained a few steps.

    Returns:
        Whether every answer was yes; `say` gets every line as soon as it is known.

    Raises:
        ValueError: An option that makes no sense, or a model that cannot be opened. A remote engine's own errors pass
            through.
        EngineLostError: If the server is gone for minutes.
        OSError: If the report cannot be written.
    """
    if not (options.tolerance > 0 and options.timeout_s > 0):
        raise ValueError(
            f"tolerance and timeout_s must be positive; got {options.tolerance} and {options.timeout_s}"
        )
    at_least(options, {"lora_rank": 0})
    model = resolve_model(options.model_name)
    engine = EngineConfig(
        engine=choose_engine(options.engine, base_url=options.base_url, model=model),
        base_url=options.base_url,
        device=options.device,
        precision=options.precision,
    )
    if options.report is not None and not Path(options.report).absolute().parent.is_dir():
        raise ValueError(f"report={options.report} must lie in a folder that there is; make it first")
    say(", ".join(f"{name} {found}" for name, found in versions().items()))
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory() as states:
        async with engine.watched(), Engines(Path(states)) as engines:
            service = engines.service(engine)
            client = await settled(service.create_lora_training_client(model, rank=options.lora_rank, seed=0))
            bench = Bench(service=service, client=client, tolerance=options.tolerance)
            async for finding in examine(bench, timeout_s=options.timeout_s):
                say(f"{finding.name:{_WIDTH}}  {finding.answer:5}  {finding.detail}")
                findings.append(finding)
    say("\nWhat this allows:")
    for name, needs in FEATURES.items():
        missing = barred(needs, findings)
        say(f"{name:{_WIDTH}}  " + (f"no     {'; '.join(missing)}" if missing else "yes"))
    report = Report(
        engine=engine.server or "local",
        server="" if engine.base_url is None else server_name(engine.base_url),
        model=options.model_name,
        settings={"lora_rank": options.lora_rank, "tolerance": options.tolerance},
        findings=findings,
    )
    if options.report is not None:
        write_atomic(Path(f"{options.report}.md"), report.page())
        write_atomic(Path(f"{options.report}.json"), json.dumps(report.record(), indent=1) + "\n")
        say(f"\n{options.report}.md and {options.report}.json have this, too")
    return report.is_conformant
