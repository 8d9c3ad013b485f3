"""The local engine keeps the contract that `viva doctor` asks every engine about, and the SDK's methods."""

import inspect
from pathlib import Path

import pytest
import tinker
from tinker.lib.public_interfaces.rest_client import RestClient

from viva.doctor.bench import Bench
from viva.doctor.examination import PROBES, examine
from viva.engine import LocalSamplingClient, LocalServiceClient, LocalTrainingClient
from viva.engine.service import LocalRestClient


@pytest.mark.parametrize(("family", "rank"), [("qwen3", 4), ("gemma3", 4), ("llama", 0)])
async def test_every_probe_is_answered_with_yes(model_dir, tmp_path: Path, family: str, rank: int) -> None:
    service = LocalServiceClient(device="cpu", state_dir=tmp_path)
    client = service.create_lora_training_client(model_dir(family), rank=rank, seed=0)
    bench = Bench(service=service, client=client, tolerance=1e-3)
    findings = [finding async for finding in examine(bench)]
    unheard = [] if hasattr(tinker.SampledSequence, "topk_logprobs") else ["top-k of samples"]  # older SDKs
    assert [finding.name for finding in findings if finding.answer != "yes"] == unheard, findings
    assert len(findings) == len(PROBES)


PAIRS = [
    (tinker.ServiceClient, LocalServiceClient),
    (tinker.TrainingClient, LocalTrainingClient),
    (tinker.SamplingClient, LocalSamplingClient),
    (RestClient, LocalRestClient),
]


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_every_public_method_of_the_sdk_is_there_or_says_in_a_sentence_that_it_is_not(
    theirs: type, ours: type
) -> None:
    names = [name for name, _ in inspect.getmembers(theirs, callable) if not name.startswith("_")]
    assert len(names) > 5
    refused = [name for name in names if isinstance(inspect.getattr_static(ours, name), staticmethod)]
    assert len(refused) < len(names)
    for name in refused:
        with pytest.raises(NotImplementedError, match=rf"^{name} is answered by Tinker's servers, .*\.$"):
            getattr(ours, name)("anything", more=1)
