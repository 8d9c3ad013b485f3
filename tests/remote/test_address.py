"""Is somebody there, is somebody still there, and what do the answers mean?"""

import asyncio
import json
import re
import socket
import socketserver
import threading
import time
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import tinker
from web_servers import QuietHandler, running, serving

from viva import hub
from viva.training import remote
from viva.training.remote import (
    EngineLostError,
    check_address,
    check_version,
    explain,
    server_name,
    watched,
)
from viva.training.service import EngineConfig, make_service

KEY = "tml-abcdefgh"


@contextmanager
def answering(status, *, port=0, body=b""):
    """A server on this machine that answers everything with one status; yields its address."""

    class Handler(QuietHandler):
        def do_GET(self):
            self.answer(status, body)

    with serving(Handler, port=port) as own:
        yield f"http://127.0.0.1:{own}"


@pytest.fixture
def nobody():
    with answering(200) as address:
        pass
    return address


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(remote, "_FIRST_PAUSES_S", (0.0, 0.01))


@pytest.mark.parametrize("status", [200, 401, 404])
def test_whoever_answers_is_there(status):
    with answering(status) as address:
        check_address(address)


def test_an_address_without_a_server_is_told_within_seconds(nobody, impatient):
    with pytest.raises(ValueError, match=f"no server answers at base_url={nobody}: .*refused.* Start it"):
        check_address(nobody)


def test_a_server_that_is_only_starting_is_waited_for(nobody, monkeypatch):
    monkeypatch.setattr(remote, "_FIRST_PAUSES_S", (0.0, 1.0))
    port = int(nobody.rpartition(":")[2])
    started = threading.Event()

    def start():
        with answering(200, port=port):
            started.wait(10)

    late = threading.Timer(0.2, start)
    late.start()
    check_address(nobody)
    started.set()
    late.join()


def test_a_broken_gateway_is_no_server(impatient):
    with answering(502) as address, pytest.raises(ValueError, match="it answers 502"):
        check_address(address)


@pytest.mark.parametrize("address", ["localhost:8000", "file:///etc/passwd", ""])
def test_what_is_no_address_of_a_server_is_refused(address):
    with pytest.raises(ValueError, match="base_url must begin with http:// or https://"):
        check_address(address)


@pytest.mark.parametrize(
    ("address", "problem"),
    [("http://localhost:port", "nonnumeric port: 'port'"), ("http://a b", "control characters")],
)
def test_an_address_that_cannot_be_asked_is_told_what_is_wrong_with_it(address, problem, impatient):
    with pytest.raises(ValueError, match=f"no server answers at base_url={address}: .*{problem}"):
        check_address(address)


@contextmanager
def babbling():
    """Somebody at an address who does not speak HTTP."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            self.rfile.readline()
            self.wfile.write(b"SSH-2.0-OpenSSH\r\n")

    server = socketserver.TCPServer(("127.0.0.1", 0), Handler)
    with running(server):
        yield f"http://127.0.0.1:{server.server_address[1]}"


async def test_what_does_not_speak_http_is_no_server_and_one_that_is_gone(impatient):
    with babbling() as address:
        with pytest.raises(ValueError, match=r"no server answers at .*: SSH-2"):
            check_address(address)
        with pytest.raises(EngineLostError, match=r"out of reach for 0.1 s: SSH-2"):
            async with watched(address, limit_s=0.1, every_s=0.02):
                await asyncio.Event().wait()


@contextmanager
def black_hole():
    """Somebody who takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("is_hosted", "told"),
    [
        (False, r"no server answers at base_url=\S+: timed out\. Start it, or correct the address"),
        (True, r"Tinker does not answer at \S+: timed out\. Check the network, or use engine=local"),
    ],
)
def test_a_black_hole_is_told_about_and_left(is_hosted, told, monkeypatch, caplog):
    monkeypatch.setattr(hub, "TELL_AFTER_S", 0.1)
    monkeypatch.setattr(remote, "_ANSWER_S", 0.5)
    started = time.monotonic()
    with black_hole() as address, pytest.raises(ValueError, match=told):
        check_address(address, is_hosted=is_hosted)
    assert time.monotonic() - started < 2
    assert caplog.messages == [f"still waiting for an answer of the server at {address}, for 6 s at most"]


def test_hosted_tinker_without_a_network_is_told_at_once(nobody, monkeypatch, tmp_path):
    monkeypatch.setenv("TINKER_BASE_URL", nobody)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    started = time.monotonic()
    with pytest.raises(
        ValueError, match=rf"Tinker does not answer at {nobody}\S*: .*refused.* Check the network"
    ):
        make_service(EngineConfig(engine="remote"), state_dir=tmp_path)
    assert time.monotonic() - started < 5


def described(content):
    """What FastAPI's description says of a gradient's request; ``None``: nothing."""
    if content is None:
        return {"openapi": "3.1.0", "paths": {}}
    asked = {"requestBody": {"content": {kind: {"schema": {}} for kind in content}}}
    return {"openapi": "3.1.0", "paths": {"/api/v1/forward_backward": {"post": asked}}}


@pytest.mark.parametrize(
    ("version", "description", "is_refused"),
    [
        ("0.38.0", described(["application/json"]), True),
        ("0.23.0", described(["application/json"]), True),
        ("0.22.7", described(["application/json"]), False),
        ("0.38.0", described(["application/json", "application/x-protobuf"]), False),
        ("0.38.0", described(None), False),
        ("0.38.0", [], False),
        ("0.38.0", None, False),
    ],
)
def test_an_sdk_that_is_too_new_for_a_server_is_refused_with_the_one_to_install(
    version, description, is_refused, monkeypatch
):
    monkeypatch.setattr(tinker, "__version__", version)
    body = b"" if description is None else json.dumps(description).encode()
    with answering(404 if description is None else 200, body=body) as address:
        started = time.monotonic()
        if is_refused:
            with pytest.raises(
                ValueError, match=rf"tinker {version} .* too new .*pip install tinker==0\.22\.7"
            ):
                check_version(address)
        else:
            check_version(address)
        assert time.monotonic() - started < 2


def test_a_server_that_describes_itself_is_named():
    told = {"info": {"title": "SkyRL tx", "version": "0.3.0"}}
    for body, name in ((told, "SkyRL tx 0.3.0"), ({"info": {"title": 3}}, ""), ([], "")):
        with answering(200, body=json.dumps(body).encode()) as address:
            assert server_name(address) == name


def test_a_cookbook_that_viva_is_not_made_for_is_refused_with_the_one_to_install(monkeypatch):
    real = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "0.6.1" if name == "tinker-cookbook" else real(name)
    )
    with pytest.raises(
        ValueError, match=r"tinker-cookbook 0\.6\.1 is installed.*pip install 'tinker-cookbook<0\.6"
    ):
        make_service(EngineConfig(), state_dir=Path("states"))


def test_a_password_in_an_address_is_not_told(nobody, impatient):
    with pytest.raises(ValueError, match=r"base_url=http://\*\*\*@127") as told:
        check_address(nobody.replace("http://", "http://user:hunter22@"))
    assert "hunter22" not in str(told.value)


async def test_a_server_that_is_gone_ends_what_waits_for_it(nobody):
    started = time.monotonic()
    with pytest.raises(EngineLostError, match=r"has been out of reach for 0.2 s: .*refused"):
        async with watched(nobody, limit_s=0.2, every_s=0.02):
            await asyncio.Event().wait()
    assert 0.2 <= time.monotonic() - started < 5
    assert asyncio.current_task().cancelling() == 0


async def test_a_server_that_comes_back_in_time_ends_nothing(nobody, monkeypatch):
    """It is gone twice, and for longer than the limit in total. Every look is let through here and takes 4 s."""
    port, look = int(nobody.rpartition(":")[2]), remote._problem
    now, looks, permits = 0.0, 0, threading.Semaphore(0)

    def slow_look(address):
        nonlocal now, looks
        permits.acquire()
        found = look(address)
        now, looks = now + 4.0, looks + 1
        return found

    async def looked_at(times):
        wanted = looks + times
        permits.release(times)
        while looks < wanted:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(remote, "_problem", slow_look)
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: now))
    async with watched(nobody, limit_s=10.0, every_s=0.0):
        for _ in range(2):
            await looked_at(2)
            with answering(200, port=port):
                await looked_at(1)
    permits.release()


async def test_work_that_ends_first_is_left_alone(nobody):
    async with watched(nobody, limit_s=0.0, every_s=60.0):
        done = True
    async with EngineConfig(engine="remote").watched(), EngineConfig().watched():
        await asyncio.sleep(0.05)  # nobody to watch: hosted Tinker, and this process
    assert done


@pytest.fixture
def is_gone(monkeypatch):
    """The watch ends as soon as this is set."""
    event = asyncio.Event()

    async def until_gone(*_):
        await event.wait()
        return "gone"

    monkeypatch.setattr(remote, "_until_gone", until_gone)
    return event


async def test_work_that_ends_with_the_watch_is_left_alone(is_gone):
    async with watched("http://s"):
        await asyncio.sleep(0)
        is_gone.set()
        await asyncio.sleep(0)  # the watch ends now, and this right after it
    for _ in range(3):
        await asyncio.sleep(0)
    assert asyncio.current_task().cancelling() == 0


@pytest.mark.parametrize("num_turns", [0, 1, 2])
async def test_an_interrupt_beside_the_end_of_a_server_stays_an_interrupt(is_gone, num_turns):
    async def work():
        async with watched("http://s"):
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    is_gone.set()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_interrupt_stays_an_interrupt(nobody):
    async def work():
        async with watched(nobody, limit_s=60.0, every_s=0.01):
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


REQUEST = httpx.Request("POST", "http://server/api/v1/forward", headers={"X-Api-Key": KEY})


def answer(status, detail="no"):
    return tinker.APIStatusError(
        f"Error code: {status} - {detail}", response=httpx.Response(status, request=REQUEST), body=None
    )


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (answer(401), "the server at http://s answered 401: .* set TINKER_API_KEY to a valid one"),
        (answer(402), "see its billing page"),
        (answer(403), "may not do this: use one that may"),
        (answer(404, "Model not found"), "answered 404: .*Model not found.* check model_name and the path"),
        (answer(422), "answered 422: .*viva doctor"),
        (answer(503), "answered 503: .*down or restarting"),
        (tinker.APIConnectionError(request=REQUEST), "cannot be reached: Connection error"),
        (tinker.TinkerError("Request failed: Model m not loaded"), "failed: Request failed: Model m not"),
        (EngineLostError("gone"), "^gone$"),
    ],
)
def test_an_error_says_what_to_do(error, told):
    assert re.search(told, explain(error, "the server at http://s"))


def test_no_message_holds_the_key(monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    told = explain(answer(401, f"key {KEY} is unknown"), f"the server at http://user:{KEY}@s")
    assert KEY not in told
    assert "key *** is unknown" in told


def test_a_request_that_a_server_sends_back_is_cut():
    assert len(explain(answer(422, "x" * 10_000), "Tinker")) < 700


def test_errors_of_the_program_itself_are_none_of_the_engine():
    def raised(error, cause=None):
        try:
            raise error from cause
        except type(error) as caught:
            return caught

    assert explain(raised(ValueError("mine")), "Tinker") is None
    assert explain(raised(ValueError("no loss_fn=dro"), answer(422)), "Tinker") is None
    assert explain(answer(422), None) is None


def test_an_answer_is_found_behind_what_the_sdk_makes_of_it():
    from tinker.lib import api_future_impl

    code = "def fail(answer):\n    raise ValueError('Error retrieving result') from answer"
    sdk = {"__name__": api_future_impl.__name__}
    exec(code, sdk)
    with pytest.raises(ValueError, match="retrieving") as caught:
        sdk["fail"](answer(404, "Future not found"))
    assert "answered 404: Error code: 404 - Future not found" in explain(caught.value, "Tinker")
