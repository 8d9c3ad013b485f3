"""Fixtures: model folders, the same models as plain transformers runs them, services."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import make_model

from viva.engine import EngineLimits, LocalSamplingClient, LocalServiceClient
from viva.engine.attention import RaggedCache


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a tiny random model of a family, made on first use."""
    return functools.cache(lambda family: make_model(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="session")
def plain_model(model_dir: Callable[[str], str]) -> Callable[[str], Any]:
    """The same model as plain transformers runs it."""
    import transformers

    @functools.cache
    def load(family: str) -> Any:
        attention = "eager" if family == "gemma2" else "sdpa"
        return transformers.AutoModelForCausalLM.from_pretrained(
            model_dir(family), attn_implementation=attention
        ).eval()

    return load


@pytest.fixture(scope="session")
def service() -> LocalServiceClient:
    """A service without a state_dir, shared by tests that make their own clients."""
    return LocalServiceClient(device="cpu")


@pytest.fixture(scope="module")
def client(service: LocalServiceClient, model_dir: Callable[[str], str]) -> LocalSamplingClient:
    """A sampling client of a tiny model."""
    return service.create_sampling_client(base_model=model_dir("qwen3"))


@pytest.fixture
def saving_service(tmp_path: Path) -> LocalServiceClient:
    """A service with a state_dir of its own."""
    return LocalServiceClient(device="cpu", state_dir=tmp_path / "states")


@pytest.fixture
def cramped_service() -> LocalServiceClient:
    """A service whose limits split everything into several batches."""
    limits = EngineLimits(
        decode_rows=3,
        prefill_tokens=24,
        training_tokens=40,
        logits=520,
        prefix_cache_bytes=20_000,
        merged_models=1,
    )
    return LocalServiceClient(device="cpu", limits=limits)


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the tokens of every forward pass of a decoder."""
    found, forward = list[tuple[int, ...]](), RaggedCache.forward

    def counting(cache: RaggedCache, module: Any, tokens: Any, **where: Any) -> Any:
        found.append(tuple(tokens.shape))
        return forward(cache, module, tokens, **where)

    monkeypatch.setattr(RaggedCache, "forward", counting)
    return found
