"""Everything the engine does, on a GPU that is only pretended: tensors have a device and a shape, but no numbers.

It shows that nothing mixes what is on the GPU with what is on the CPU, without a GPU. Results are not looked at.
"""

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import tinker
import torch
import transformers
from tiny_engine import FAMILIES, make_config, make_tokenizer, train
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from viva.engine import LocalServiceClient, replay
from viva.engine.model import BaseModel, register_attention

GPU = torch.device("meta")


class Ones(TorchDispatchMode):
    """Every number that leaves the GPU is one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default):
            return 1
        if func is torch.ops.aten.is_nonzero.default:
            return True
        return func(*args, **(kwargs or {}))


def as_numpy(tensor: torch.Tensor, **kwargs: Any) -> np.ndarray:
    assert tensor.device.type == "cpu"
    return np.ones(tensor.shape, dtype=str(tensor.dtype).removeprefix("torch."))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    make = torch.tensor
    monkeypatch.setattr(
        torch, "tensor", lambda data, device=None, **more: make(data, **more).to(device or "cpu")
    )
    monkeypatch.setattr(torch.Tensor, "numpy", as_numpy)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: np.ones(self.shape).tolist())
    with FakeTensorMode(allow_non_fake_inputs=True), Ones():
        yield


def move_to_gpu(module: Any) -> None:
    """What ``Module.to`` does, which does not know pretended tensors."""
    moved: dict[int, Any] = {}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=GPU)
        for name, weight in part._parameters.items():
            if weight is not None:
                new = torch.nn.Parameter(torch.empty_like(weight, device=GPU), requires_grad=False)
                part._parameters[name] = moved.setdefault(id(weight), new)


def service_with(family: str) -> LocalServiceClient:
    register_attention()
    service = LocalServiceClient(device="cpu")
    module: Any = transformers.AutoModelForCausalLM.from_config(make_config(family))
    move_to_gpu(module)
    base = BaseModel(
        name=family,
        module=module.eval().requires_grad_(False),
        tokenizer=make_tokenizer(),
        eos_ids=(256,),
        context_length=256,
        vocab_size=260,
        takes_trees=True,
    )
    service._core.device = GPU
    service._core._models[family] = base
    return service


class Again:
    """Computes anew what it should replay."""

    is_usable = True

    def record(self, run: replay.Run) -> tuple[torch.Tensor, replay.Run]:
        return run(), run

    def give_up(self, reason: str) -> None:
        raise AssertionError(reason)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recorder", [None, Again()])
def test_samples(family: str, recorder: replay.Recorder | None) -> None:
    sampler: Any = service_with(family).create_sampling_client(base_model=family)
    sampler._source.result().decoder._steps = replay.DecodeSteps(recorder)
    params = tinker.SamplingParams(max_tokens=9, seed=1, stop=[259])
    few = tinker.SamplingParams(max_tokens=2, top_k=3, top_p=0.5, temperature=0.3)
    futures = [
        sampler.sample(tinker.ModelInput.from_ints([7] * 100), 14, params),
        sampler.sample(tinker.ModelInput.from_ints([3] * 5), 2, params, include_prompt_logprobs=True),
        sampler.sample(tinker.ModelInput.from_ints([3] * 50), 1, few),
    ]
    assert [len(each.result().sequences) for each in futures] == [14, 2, 1]


@pytest.mark.usefixtures("gpu")
def test_what_is_left_on_the_cpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make = torch.arange
    monkeypatch.setattr(torch, "arange", lambda *args, **kwargs: make(*args))
    sampler: Any = service_with("llama").create_sampling_client(base_model="llama")
    params = tinker.SamplingParams(max_tokens=2, stop=[259])
    with pytest.raises(RuntimeError, match="at least two devices, meta and cpu"):
        sampler.sample(tinker.ModelInput.from_ints([7] * 9), 1, params).result()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [0, 2])
def test_trains(family: str, rank: int) -> None:
    service = service_with(family)
    trainer: Any = service.create_lora_training_client(family, rank=rank, seed=1)
    for begin in (0, 40):  # sequences that share nothing, and those that share their beginning
        train(trainer, [[7] * begin + [index] * 9 for index in range(4)], steps=1)
    sampler: Any = trainer.save_weights_and_get_sampling_client()
    params = tinker.SamplingParams(max_tokens=3, stop=[259])
    response = sampler.sample(tinker.ModelInput.from_ints([7] * 100), 2, params).result()
    assert [len(sequence.tokens) for sequence in response.sequences] == [3, 3]
