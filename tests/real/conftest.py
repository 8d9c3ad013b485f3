"""Fixtures of a model that others trained; `make models` fetches it."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch_models.py"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as the GGUF file that `make models` fetched."""
    path: Path = runpy.run_path(str(SCRIPT))["MODELS"][0].path
    if not path.is_file():
        pytest.skip(f"{path} is not there; `make models` fetches it")
    return path


@pytest.fixture(scope="session")
def folder(smollm2: Path) -> Path:
    """The file, unpacked."""
    from viva.engine.gguf import gguf_folder

    return gguf_folder(smollm2)
