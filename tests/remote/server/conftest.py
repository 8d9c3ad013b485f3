import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "recipes")]


@pytest.fixture(scope="session")
def environment():
    return Path(os.environ["VIVA_SKYRL"]).absolute()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    from random_models import make_model

    return make_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="session")
def server(environment, model, tmp_path_factory):
    """One server for all tests; those that kill it start it again."""
    from skyrl_server import SkyrlServer

    server = SkyrlServer(environment, model, tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(f'{{"query": "What is {n} + 1?", "answer": "{n + 1}"}}\n' for n in range(5)))
    return path
