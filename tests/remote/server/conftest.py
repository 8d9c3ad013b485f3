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


CHANCES = {"A": 0.3, "B": 0.25, "<|eot_id|>": 0.45}


@pytest.fixture(scope="session")
def environment():
    return Path(os.environ["VIVA_SKYRL"]).absolute()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A model with random weights but for one direction of them: it says A or B or ends, and hesitates as a judge."""
    import torch
    from random_models import make_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = make_model(tmp_path_factory.mktemp("model"), "llama", names_labels=False)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        model.model.embed_tokens.weight[:, 0] = 1.0  # dwarfs the rest, so it reaches the last layer as it is
        length = model.config.hidden_size**0.5
        rows = model.lm_head.weight
        rows[:, 0] = 0.0
        for text, chance in CHANCES.items():
            row = rows[tokenizer.convert_tokens_to_ids(text)]
            row[1:] = 0.5 * torch.randn(row.numel() - 1)
            row[0] = (12 + torch.tensor(chance).log()) / length
    model.save_pretrained(folder)
    return folder


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
