"""The local engine keeps the contract that `viva doctor` asks every engine about."""

from pathlib import Path

import pytest
import tinker

from viva.doctor.bench import Bench
from viva.doctor.examination import PROBES, examine
from viva.engine import LocalServiceClient


@pytest.mark.parametrize(("family", "rank"), [("qwen3", 4), ("gemma3", 4), ("llama", 0)])
async def test_every_probe_is_answered_with_yes(model_dir, tmp_path: Path, family: str, rank: int) -> None:
    service = LocalServiceClient(device="cpu", state_dir=tmp_path)
    client = service.create_lora_training_client(model_dir(family), rank=rank, seed=0)
    bench = Bench(service=service, client=client, tolerance=1e-3)
    findings = [finding async for finding in examine(bench)]
    unheard = [] if hasattr(tinker.SampledSequence, "topk_logprobs") else ["top-k of samples"]  # older SDKs
    assert [finding.name for finding in findings if finding.answer != "yes"] == unheard, findings
    assert len(findings) == len(PROBES)
