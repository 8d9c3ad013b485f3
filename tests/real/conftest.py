"""Fixtures of models that others trained; `make models` fetches one of them."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch_models.py"


QWEN_BYTES = 18 * 10**9
"""Of weights, their decode copy and what lies between, with a margin for tests beside this one."""


def fetched(name: str) -> Path:
    """The file of a model; the test is skipped where it is not there."""
    path: Path = runpy.run_path(str(SCRIPT))["MODELS"][name].path
    if not path.is_file():
        pytest.skip(f"{path} is not there; python scripts/fetch_models.py {name} fetches it")
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as the GGUF file that `make models` fetched."""
    return fetched("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def folder(smollm2: Path) -> Path:
    """The file, unpacked."""
    from viva.engine.gguf import gguf_folder

    return gguf_folder(smollm2)


@pytest.fixture(scope="session")
def gemma() -> Path:
    """Gemma 3 270M, a base model, as the folder that its GGUF file was unpacked into."""
    from viva.engine.gguf import gguf_folder

    return gguf_folder(fetched("gemma-3-270m"))


@pytest.fixture(scope="session")
def qwen() -> Path:
    """Qwen2.5-Coder-1.5B-Instruct as the folder of its GGUF file; skipped where memory is short."""
    import torch

    from viva.engine.gguf import gguf_folder
    from viva.engine.policy import free_bytes

    file = fetched("qwen2.5-coder-1.5b-instruct")
    free = free_bytes(torch.device("cpu"))
    if free is not None and free < QWEN_BYTES:
        pytest.skip(f"{free / 1e9:.0f} GB of memory are free, {QWEN_BYTES / 1e9:.0f} are needed")
    return gguf_folder(file)
