"""What a client can take up, who may ask at all, and the command itself."""

import importlib.util
import os
import signal
import subprocess
import sys

import httpx
import openai
import pytest
from served_policies import TOKEN, Served, serving_policy, wait_for

from viva.cli import main
from viva.loopback import listen
from viva.serve.app import TOKEN_VARIABLE, choose_token

LONG = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 250, "n": 128, "seed": 0, "stream": True}
SHORT = {"model": "policy", "prompt": [1], "max_tokens": 1}
KEY = {"Authorization": f"Bearer {TOKEN}"}


def test_beyond_the_queue_a_request_is_told_to_come_back_and_who_goes_frees_a_place(model: str) -> None:
    with serving_policy(model, queue=1) as server, httpx.Client(headers=KEY, timeout=60) as client:
        address = f"{server.address}/v1/completions"
        with client.stream("POST", address, json=LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            with server.engine_at_rest():
                (request,) = {sequence.request for sequence in server.sequences()}
                refused = client.post(address, json=SHORT)
                assert refused.status_code == 429
                assert int(refused.headers["Retry-After"]) >= 1
                assert refused.json()["error"]["code"] == "rate_limit_exceeded"
                with pytest.raises(openai.RateLimitError, match="queue=1"):
                    server.client().completions.create(**SHORT)
        # the client has gone before its end: its samples leave the batch, and its place is free
        wait_for(request.future.done)
        assert request.future.cancelled()
        wait_for(lambda: not server.sequences())
        wait_for(lambda: client.post(address, json=SHORT).status_code == 200)


def test_an_answer_that_takes_too_long_is_given_up_and_its_place_is_free(model: str) -> None:
    with serving_policy(model, queue=1, timeout_s=1e-6) as server:
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="too long; ask for fewer tokens") as raised:
                server.client().completions.create(**SHORT)
            assert raised.value.status_code == 504
        wait_for(lambda: not server.sequences())


def test_a_body_beyond_the_limit_is_refused(model: str) -> None:
    with serving_policy(model, body_bytes=1000) as server:
        for body in (b"x" * 1001, iter([b"x" * 600] * 2)):  # of a length that is told, and that is not
            refused = httpx.post(f"{server.address}/v1/completions", content=body, headers=KEY)
            assert refused.status_code == 413
            assert "larger than 1000 bytes" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer x"}, 401),
        ({"Authorization": f"Basic {TOKEN}"}, 401),
        ({"Authorization": "Bearer é".encode().decode("latin-1")}, 401),
        (KEY, 200),
        ({"X-API-Key": TOKEN}, 200),
        (KEY | {"Host": "viva.example"}, 403),
        (KEY | {"Host": "localhost:1"}, 200),
        (KEY | {"Origin": "http://127.0.0.1"}, 403),
        (KEY | {"Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
def test_only_who_has_the_token_and_is_no_web_page_is_answered(
    server: Served, headers: dict[str, str], status: int
) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    assert httpx.get(f"{server.address}/v1/models", headers=encoded).status_code == status


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/completions", 400)],
)
def test_errors_have_the_form_of_openais_interface(
    server: Served, method: str, path: str, status: int
) -> None:
    answer = httpx.request(method, f"{server.address}{path}", headers=KEY)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_compressed_body_is_refused(server: Served) -> None:
    answer = httpx.post(
        f"{server.address}/v1/completions", content=b"x", headers=KEY | {"Content-Encoding": "zstd"}
    )
    assert answer.status_code == 415


def test_the_token_is_given_or_in_the_environment_or_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert choose_token(None) != choose_token(None)
    monkeypatch.setenv(TOKEN_VARIABLE, "from-the-environment")
    assert choose_token(None) == "from-the-environment"
    assert choose_token("given-on-the-command-line") == "given-on-the-command-line"
    with pytest.raises(ValueError, match=r"at least 16 characters.*got 5 characters"):
        choose_token("short")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["port=70000"], "port must be between 0 and 65535; got 70000"),
        (["address=here"], "address must be an IP address, like 127.0.0.1; got 'here'"),
        (["queue=0"], "queue must be at least 1"),
        (["timeout_s=0"], "timeout_s must be above 0"),
        (["token=short"], "token must have at least 16 characters"),
        (["checkpoint=base"], "checkpoint=base needs the folder of a run; tiny is none"),
    ],
)
def test_mistakes_of_the_command_are_told(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "tiny", *options]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gone", "complaint"),
    [("uvicorn", "install it: pip install 'viva-rl[view]'"), ("tinker.proto", "pip install tinker==0.38.0")],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    gone: str, complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == gone else known(name))
    assert main(["serve", "tiny"]) == 2
    assert complaint in capsys.readouterr().err


def test_a_port_that_is_taken_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with listen(0) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "tiny", f"port={port}"]) == 2
    assert f"port {port} cannot be used" in capsys.readouterr().err


def test_the_command_serves_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "viva.cli", "serve", "tiny", "port=0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {TOKEN_VARIABLE: TOKEN}
    ) as process:
        assert process.stdout is not None
        said = dict(process.stdout.readline().strip().partition("=")[::2] for _ in range(3))
        with openai.OpenAI(base_url=said["OPENAI_BASE_URL"], api_key=said["OPENAI_API_KEY"]) as client:
            answer = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "What is 2 + 3?"}], temperature=0
            )
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.content
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert said["OPENAI_API_KEY"] == TOKEN
