from collections.abc import Iterator
from pathlib import Path

import pytest
from served_policies import Served, serving_policy
from tiny_engine import make_model


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model whose samples are bytes of all kinds."""
    folder: Path = tmp_path_factory.mktemp("served") / "qwen3"
    return make_model(folder, "qwen3")


@pytest.fixture(scope="package")
def server(model: str) -> Iterator[Served]:
    with serving_policy(model) as served:
        yield served
