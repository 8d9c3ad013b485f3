import importlib.util
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

_spec = importlib.util.spec_from_file_location("ledger", HERE.parents[1] / "reliability" / "conftest.py")
_ledger = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _ledger  # its dataclass looks there
_spec.loader.exec_module(_ledger)
trials, ledger = _ledger.trials, _ledger.ledger
pytest_terminal_summary, pytest_sessionfinish = _ledger.pytest_terminal_summary, _ledger.pytest_sessionfinish

# the SDK keeps its connections open as long as it pleases, and tests after the one that had it hear of them
_LEFT_OPEN = "ignore:Exception ignored in.*(socket|Transport):pytest.PytestUnraisableExceptionWarning"


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.filterwarnings(_LEFT_OPEN))


@pytest.fixture(scope="session")
def environment():
    return Path(os.environ["VIVA_SKYRL"]).absolute()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """See `make_hesitating_model`."""
    from random_models import make_hesitating_model

    return make_hesitating_model(tmp_path_factory.mktemp("model"))


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
    path.write_text("".join(f'{{"query": "Which letter is {n}?", "answer": "A"}}\n' for n in range(5)))
    return path
