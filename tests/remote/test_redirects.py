"""A key stays with the server that it was given for, wherever that one sends a request on to."""

import asyncio
import gc
import json
import time
from contextlib import ExitStack, contextmanager

import pytest
import tinker
import web_servers
from web_servers import QuietHandler

from viva.sdk import settled
from viva.training import remote
from viva.training.remote import check_address, explain
from viva.training.service import EngineConfig, make_service

KEY = "tml-canary-0123456789"
PASSWORD = "canary-password"


@contextmanager
def serving(answer):
    """A server; ``answer(path)`` gives status, headers and content. Yields its port, and the requests it got."""
    seen = []

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            length = int(self.headers.get("Content-Length", 0))
            seen.append((self.path, dict(self.headers), self.rfile.read(length)))
            status, headers, content = answer(self.path)
            self.answer(status, json.dumps(content).encode(), Content_Type="application/json", **headers)

        do_POST = do_GET

    with web_servers.serving(Handler) as port:
        yield port, seen


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """One look at a server; and connections are closed, which the SDK leaves open where it fails."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setattr(remote, "_FIRST_PAUSES_S", (0.0,))
    clients, send = {}, remote._HomeClient.send

    async def noted(client, request, **options):
        clients[client] = asyncio.get_running_loop()
        return await send(client, request, **options)

    monkeypatch.setattr(remote._HomeClient, "send", noted)
    yield
    for client, event_loop in clients.items():
        asyncio.run_coroutine_threadsafe(client.aclose(), event_loop).result(5)


def refusing(_path):
    return 400, {}, {"detail": "seen"}


def first_request(address, folder):
    """What the SDK raises when it is asked for a client."""

    async def ask():
        service = make_service(EngineConfig(engine="remote", base_url=address), state_dir=folder)
        await settled(service.create_lora_training_client("m", rank=1, seed=0))

    with pytest.raises(tinker.TinkerError) as caught:
        asyncio.run(ask())
    return caught.value


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("late", [False, True], ids=["first request", "behind its configuration"])
def test_the_sdk_sends_no_key_to_another_origin(status, host, late, tmp_path):
    with ExitStack() as stack:
        other, stolen = stack.enter_context(serving(refusing))

        def answer(path):
            if path.endswith("healthz") or (late and path.endswith("client/config")):
                return 200, {}, {}
            return status, {"Location": f"http://{host}:{other}{path}"}, {}

        own, seen = stack.enter_context(serving(answer))
        started = time.monotonic()
        error = first_request(f"http://user:{PASSWORD}@127.0.0.1:{own}", tmp_path)
        assert time.monotonic() - started < 5
        assert any(headers.get("X-API-Key") == KEY for _, headers, _ in seen)
        assert stolen == []
    told = explain(error, "the server")
    assert f"answered {status}: it sends requests on to http://{host}:{other}, another address" in told
    assert "give it as base_url" in told


def test_another_name_of_the_same_machine_is_another_origin(tmp_path):
    with serving(lambda path: answer(path)) as (own, seen):

        def answer(path):
            if path.endswith("healthz"):
                return 200, {}, {}
            return 307, {"Location": f"http://localhost:{own}{path}"}, {}

        first_request(f"http://127.0.0.1:{own}", tmp_path)
        assert {headers["Host"] for _, headers, _ in seen} == {f"127.0.0.1:{own}"}


def test_a_redirect_within_the_origin_is_followed_with_the_key(tmp_path):
    def answer(path):
        if path.startswith("/moved") or path.endswith("healthz"):
            return refusing(path) if path.startswith("/moved") else (200, {}, {})
        return 307, {"Location": f"/moved{path}"}, {}

    with serving(answer) as (own, seen):
        error = first_request(f"http://127.0.0.1:{own}", tmp_path)
        moved = [headers.get("X-API-Key") for path, headers, _ in seen if path.startswith("/moved/api")]
    assert moved
    assert set(moved) == {KEY}
    assert "answered 400" in explain(error, "the server")


def test_a_circle_of_redirects_ends(tmp_path):
    with serving(lambda path: (200 if path.endswith("healthz") else 307, {"Location": path}, {})) as (
        own,
        seen,
    ):
        assert "answered 307" in explain(first_request(f"http://127.0.0.1:{own}", tmp_path), "the server")
    assert len(seen) < 20


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_health_check_sends_no_password_to_another_origin(host):
    with serving(refusing) as (other, stolen):

        def answer(path):
            return 302, {"Location": f"http://{host}:{other}{path}"}, {}

        with serving(answer) as (own, seen):
            with pytest.raises(
                ValueError, match=f"sends requests on to http://{host}:{other}, another"
            ) as told:
                check_address(f"http://user:{PASSWORD}@127.0.0.1:{own}")
            assert any("Authorization" in headers for _, headers, _ in seen)
        assert stolen == []
    assert PASSWORD not in str(told.value)
    del told
    gc.collect()  # an answer that is left open is this test's failure, not that of a later one


def test_an_unknown_kind_of_sdk_is_refused_before_it_gets_a_key(monkeypatch, tmp_path):
    import tinker._base_client as sdk

    monkeypatch.delattr(sdk, "AsyncHttpxClientWrapper")
    with pytest.raises(remote.EngineError, match=r"nothing would keep your key .* pip install tinker=="):
        make_service(EngineConfig(engine="remote"), state_dir=tmp_path)
