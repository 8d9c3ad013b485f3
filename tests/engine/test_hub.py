"""Errors of the hub say what to do; the hub is simulated, nothing is sent."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import transformers
from huggingface_hub import constants, errors

from viva import hub
from viva.engine import LocalServiceClient
from viva.recipes.config import DataOptions
from viva.recipes.hub_data import load_hub
from viva.training.service import default_learning_rate

NAME = "someone/Model-8B"


@pytest.fixture(autouse=True)
def nothing_is_sent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "endpoint" not in request.fixturenames:
        monkeypatch.setattr(hub, "_is_reached", lambda _: True)


def answered(kind: type[Exception], status: int) -> Exception:
    response = httpx.Response(status, request=httpx.Request("GET", "https://hub"))
    return kind("the hub said no", response=response)  # type: ignore[call-arg]


CASES = [
    (answered(errors.GatedRepoError, 403), False, r"is gated: .* 'hf auth login' or set HF_TOKEN"),
    (
        answered(errors.RepositoryNotFoundError, 404),
        False,
        r"is not on the hub, or it is private\. Check the spelling",
    ),
    (answered(errors.RevisionNotFoundError, 404), False, r"has no such revision"),
    (
        errors.LocalEntryNotFoundError("no file"),
        True,
        r"is not in the local cache, and HF_HUB_OFFLINE forbids",
    ),
    (errors.OfflineModeIsEnabled("offline"), True, r"is not in the local cache, and HF_HUB_OFFLINE forbids"),
    (
        errors.LocalEntryNotFoundError("no file"),
        False,
        r"is not in the local cache, and the hub cannot be reached\. Check the network",
    ),
    (
        httpx.ConnectError("no route"),
        False,
        r"is not in the local cache, and the hub cannot be reached\. Check the network",
    ),
]


@pytest.mark.parametrize(("cause", "is_offline", "message"), CASES)
def test_what_the_hub_says_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, cause: Exception, is_offline: bool, message: str
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("transformers' own words") from cause

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fail)
    with pytest.raises(ValueError, match=rf"model_name={NAME} {message}"):
        LocalServiceClient(device="cpu").create_lora_training_client(NAME)

    def fetch(*args: object, **kwargs: object) -> None:
        raise cause

    if not isinstance(cause, OSError):  # the hub wraps what its HTTP client raises
        return
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    with pytest.raises(ValueError, match=rf"model_name={NAME} {message}"):
        default_learning_rate(NAME, may_fetch=True)


def test_offline_mode_itself_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="is not in the local cache, and HF_HUB_OFFLINE forbids"):
        LocalServiceClient(device="cpu").create_lora_training_client("nobody/nothing")


def test_errors_that_have_nothing_to_do_with_the_hub_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, "disk full")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        LocalServiceClient(device="cpu").create_lora_training_client(NAME)


@pytest.fixture(params=["nobody", "unknown name", "black hole"])
def endpoint(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[str]:
    """Where the hub is said to be, and is not; and an empty cache."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if request.param != "black hole":
            listener.close()
        host = "no-such-host.invalid" if request.param == "unknown name" else "127.0.0.1"
        address = f"http://{host}:{port}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "TELL_AFTER_S", 0.3)
        monkeypatch.setattr(hub, "_ANSWER_S", 0.6)
        yield address, request.param == "black hole"


ASKED = {
    "model": lambda: LocalServiceClient(device="cpu").create_lora_training_client(NAME),
    "rate": lambda: default_learning_rate(NAME, may_fetch=True),
    "data": lambda: load_hub(DataOptions(hf_dataset_name=NAME)),
}


@pytest.mark.parametrize("what", ASKED)
def test_a_hub_that_cannot_be_reached_is_told_within_seconds(
    endpoint: tuple[str, bool], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    address, is_silent = endpoint
    started = time.monotonic()
    with pytest.raises(
        ValueError, match=rf"the hub cannot be reached\. Check the network to {address}, or give"
    ):
        ASKED[what]()
    assert time.monotonic() - started < 5
    waits = {line for line in caplog.messages if line.startswith("still waiting")}
    told = f"still waiting for an answer of the hub at {address}, for 1 s at most"
    assert waits == ({told} if is_silent else set())
    assert not constants.HF_HUB_OFFLINE


def test_the_cache_is_read_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_is_reached", lambda _: False)
    with hub.hub_access(NAME):
        assert constants.is_offline_mode()
    assert not constants.is_offline_mode()
