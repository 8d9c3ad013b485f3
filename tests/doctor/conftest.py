import pytest
from tiny_engine import make_config, make_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a small random model."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("qwen3")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        transformers.AutoModelForCausalLM.from_config(make_config("qwen3")).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)
