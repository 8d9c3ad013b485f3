import pytest
from tiny_engine import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a small random model."""
    return make_model(tmp_path_factory.mktemp("qwen3"), "qwen3")
