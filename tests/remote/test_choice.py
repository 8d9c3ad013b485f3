"""An address or a key selects the remote engine; nothing else has to be said, and nothing is sent by surprise."""

import pytest
import tinker

from viva.recipes.evaluation import EvalOptions
from viva.recipes.evaluation.plan import engine_of
from viva.recipes.evaluation.target import Target
from viva.training import service
from viva.training.service import EngineConfig, choose_engine, make_service

KEY = "tml-abcdefgh"


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("TINKER_API_KEY", raising=False)


@pytest.mark.parametrize(
    ("given", "base_url", "key", "from_hub", "chosen"),
    [
        (None, None, None, True, "local"),
        (None, "http://s", None, True, "remote"),
        (None, "http://s", None, False, "remote"),
        (None, None, KEY, True, "remote"),
        (None, None, KEY, False, "local"),
        ("local", None, KEY, True, "local"),
        ("remote", None, None, False, "remote"),
    ],
)
def test_the_engine_follows_from_address_key_and_model(
    given, base_url, key, from_hub, chosen, tmp_path, monkeypatch
):
    if key is not None:
        monkeypatch.setenv("TINKER_API_KEY", key)
    model = "Qwen/Qwen3-8B" if from_hub else str(tmp_path)
    assert choose_engine(given, base_url=base_url, model=model) == chosen


@pytest.mark.parametrize(
    ("options", "stored", "name", "chosen"),
    [
        ({}, {}, "Qwen/Qwen3-8B", EngineConfig(engine="remote")),
        ({}, {"engine": "local"}, "runs/x", EngineConfig()),
        ({"base_url": "http://s"}, {}, "runs/x", EngineConfig(engine="remote", base_url="http://s")),
        (
            {},
            {"engine": "remote", "base_url": "http://s"},
            "x",
            EngineConfig(engine="remote", base_url="http://s"),
        ),
        ({}, {}, "tinker://a/sampler_weights/b", EngineConfig(engine="remote")),
        ({"engine": "local"}, {}, "Qwen/Qwen3-8B", EngineConfig()),
    ],
)
def test_an_evaluation_asks_the_same_engine(options, stored, name, chosen, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    target = Target(name=name, kind="run" if stored else "model", model="Qwen/Qwen3-8B", config=stored)
    assert engine_of(target, EvalOptions(**options)) == chosen


def test_a_password_in_an_address_without_a_remote_engine_is_not_told():
    with pytest.raises(ValueError, match=r"base_url=http://\*\*\*@s needs engine=remote"):
        EngineConfig(engine="local", base_url="http://user:hunter22@s")


class Clients:
    """Stands for ``tinker.ServiceClient`` and keeps what it was made with."""

    def __init__(self, **options):
        self.options = options


@pytest.mark.parametrize(("key", "sent"), [(None, "tml-none"), (KEY, KEY)])
def test_a_server_of_ones_own_needs_no_key(key, sent, monkeypatch, tmp_path):
    if key is not None:
        monkeypatch.setenv("TINKER_API_KEY", key)
    monkeypatch.setattr(tinker, "ServiceClient", Clients)
    monkeypatch.setattr(service, "check_address", lambda _: None)
    monkeypatch.setattr(service, "check_version", lambda _: None)
    monkeypatch.setattr(service, "awaitable_service", lambda made: made)
    made = make_service(EngineConfig(engine="remote", base_url="http://s"), state_dir=tmp_path)
    assert made.options == {"base_url": "http://s", "api_key": sent}


def test_hosted_tinker_without_a_key_is_refused_with_the_name_of_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TINKER_CREDENTIAL_CMD", raising=False)
    with pytest.raises(tinker.TinkerError, match="TINKER_API_KEY"):
        make_service(EngineConfig(engine="remote"), state_dir=tmp_path).create_lora_training_client("m")
