"""The command: what it refuses, and that it starts light and on this machine alone."""

import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from browser import served

from viva.cli import main
from viva.loopback import listen
from viva.view.app import kept_token, serve

MakeRun = Callable[..., Path]


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else known(name))
    assert main(["view", str(make_run())]) == 2
    assert "viva view needs uvicorn; install it: pip install 'viva-rl[view]'" in capsys.readouterr().err


def test_a_package_that_is_really_not_there_is_named_too(make_run: MakeRun) -> None:
    code = (
        "import sys; sys.modules['starlette'] = None; from viva.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "view", str(make_run())], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "viva view needs starlette; install it: pip install 'viva-rl[view]'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["a", "b", "c"], "one run or two, and any results of viva eval; got 3 runs"),
        (["nothing"], "is not there"),
        (["a", "--port", "70000"], "65535"),
    ],
)
def test_mistakes_are_told(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    assert main(["view", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_a_port_that_is_taken_is_told(make_run: MakeRun) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} cannot be used"):
            serve([make_run()], port=port, say=lambda _: None)


def test_a_port_can_be_served_again_at_once_and_takes_a_browser_before_the_server_runs() -> None:
    with listen(0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=10) as browser:
            accepted, _ = listener.accept()
            accepted.close()  # the side that closes first keeps the port waiting
            assert browser.recv(1) == b""
    with listen(port) as listener:
        assert listener.getsockname()[1] == port


def test_the_address_is_on_the_loopback_interface_and_has_a_token(make_run: MakeRun) -> None:
    with served(make_run()) as address:
        assert address.startswith("http://127.0.0.1:")
        assert len(address.partition("?token=")[2]) >= 30


def test_after_a_restart_on_the_same_port_the_same_cookie_is_let_in(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run()
    with served(run, state=tmp_path / "state") as address, httpx.Client() as browser:
        assert browser.get(address, follow_redirects=True).status_code == 200
        page, _, token = address.partition("/?token=")
        (cookie,) = browser.cookies.jar
        assert cookie.expires is not None
    with served(run, port=int(page.rpartition(":")[2]), state=tmp_path / "state") as again:
        assert again == address
        assert httpx.get(f"{page}/api/runs", cookies={cookie.name: token}).status_code == 200
        assert httpx.get(f"{page}/api/runs").status_code == 403


def test_the_token_is_kept_where_only_the_user_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    token = kept_token()
    path = tmp_path / "state" / "viva" / "view-token"
    assert (kept_token(), path.read_text()) == (token, token)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)  # others may have read it
    assert kept_token() != token
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("x")
    assert len({kept_token(), kept_token(), kept_token()}) == 2  # one for the start that finds it torn
    monkeypatch.setenv("XDG_STATE_HOME", str(path))  # a file: nothing can be kept
    assert len({kept_token(), kept_token()}) == 2


def test_the_server_loads_no_heavy_package() -> None:
    code = "import json, sys, viva.view.app; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "datasets", "tinker", "tinker_cookbook", "peft", "numpy"}
    assert not heavy & set(json.loads(done.stdout))
