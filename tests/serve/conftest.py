import gc
import warnings
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


@pytest.fixture(scope="module", autouse=True)
def connections_left_open() -> Iterator[None]:
    """The SDK keeps connections open as long as it pleases; other tests are not to hear of them."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for _ in range(5):
            gc.collect()
