"""Planted keys are in nothing that is written, said or logged; one in the data is data."""

import importlib.util
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bad_world import make_model

from viva.rl.secrets import guard_tracebacks, split_address, without_secrets

HERE = Path(__file__).parent
IN_DATA = "canary-in-data-5f1c"
VARIABLES = {
    "TINKER_API_KEY": "tml-canary-tinker-91ab42",
    "HF_TOKEN": "hf_canaryhub1234567890",
    "WANDB_API_KEY": "canary0wandb0" + "a1" * 14,
    "AWS_SECRET_ACCESS_KEY": "canary/cloud+secret=77",
    "DATABASE_PASSWORD": "canary-database-0042",
    "LOCAL_TOKEN": "canary-in-a-frame-3377",
    "SERVER_SECRET": "canary-told-by-a-server-61",
    "ADDRESS_PASSWORD": "canary-address-p@ss",
}
PROXY = "canary-proxy-password"
FILES = {
    ".env": "canary-dot-env-1234",
    ".git/config": "canary-git-remote-5678",
    "unsaved.py": "canary-git-diff-9012",
    "home/.netrc": "canary-netrc-3456",
    "home/.cache/huggingface/token": "hf_canarystored7890123456",
}
CANARIES = (*VARIABLES.values(), PROXY, *FILES.values())


def spellings(canary):
    """How a key may stand in a file."""
    escaped = canary.replace("@", "%40")
    return {canary.encode(), escaped.encode(), canary.encode("utf-16-le")}


def found_in(folder, texts):
    """Where canaries are, in files (also packed ones) and texts; those that were planted are left out."""
    contents = {f"text {index}": text.encode() for index, text in enumerate(texts)}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in FILES:
            contents[name] = path.read_bytes()
    hits = [
        f"{canary} in {name}"
        for name, content in contents.items()
        for canary in CANARIES
        if any(spelling in part for spelling in spellings(canary) for part in (content, unpacked(content)))
    ]
    return hits, len(contents)


def unpacked(content):
    try:
        return zlib.decompress(content)
    except zlib.error:
        return b""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with keys in it, and the environment of a process that works there."""
    folder = tmp_path_factory.mktemp("workplace")
    for name, canary in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"https://me:{canary}@secrets.invalid\n{canary}\n")
    (folder / "prompts.jsonl").write_text(
        f'{{"query": "What is {IN_DATA}?", "answer": "4"}}\n{{"query": "Is 1 < 2?", "answer": "1"}}\n'
    )
    make_model(folder / "model", "qwen3", names_labels=False)
    has_wandb = importlib.util.find_spec("wandb") is not None
    environment = {
        **os.environ,
        **VARIABLES,
        "HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "home" / ".cache" / "huggingface"),
        "HTTPS_PROXY": f"http://me:{PROXY}@127.0.0.1:9",
        "WANDB_MODE": "offline",
        "TRACKERS": "console,tensorboard" + (",wandb" if has_wandb else ""),
        "PYTHONFAULTHANDLER": "1",
    }
    return folder, environment


def works(workplace, *arguments):
    folder, environment = workplace
    program = [sys.executable, str(HERE / "secrets_run.py"), *arguments]
    return subprocess.run(
        program, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def test_planted_keys_are_in_nothing_that_is_written_said_or_logged(workplace, trials, ledger):
    folder, _ = workplace
    done = works(workplace, trials(short="short", full="full"))
    crashed = works(workplace, "crash")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "WRONG" not in done.stdout, done.stdout[-3000:]
    assert crashed.returncode == 1
    assert "Traceback" in crashed.stderr
    assert "KeyError" in crashed.stderr
    for name in (
        "run/metrics.jsonl",
        "run/report.html",
        "run/tensorboard",
        "out/model",
        "result.json",
        "debug.log",
    ):
        assert (folder / name).exists()
    assert (folder / "debug.log").stat().st_size > 0
    hits, num_searched = found_in(folder, [done.stdout, done.stderr, crashed.stdout, crashed.stderr])
    assert not hits, "\n".join(hits)
    assert IN_DATA in (folder / "run" / "transcripts.jsonl").read_text()
    num_steps = done.stdout.count("ended ")
    ledger(
        "9 secrets",
        "planted keys are in no file, output, log or error of training, resuming, evaluating, exporting, reporting, "
        "examining, refusing and crashing; one in the data is kept",
        trials=len(CANARIES),
        figures=f"{num_steps + 1} commands, {num_searched} files and outputs searched",
    )


def test_the_search_finds_a_key_in_every_kind_of_file(tmp_path):
    planted = VARIABLES["ADDRESS_PASSWORD"]
    (tmp_path / "a.bin").write_bytes(b"\0\1" + planted.encode("utf-16-le"))
    (tmp_path / "b.json").write_text('{"url": "http://x:canary-address-p%40ss@h"}')
    (tmp_path / "c.z").write_bytes(zlib.compress(planted.encode()))
    hits, num_searched = found_in(tmp_path, [f"... {PROXY}"])
    assert num_searched == 4
    assert [hit.rpartition(" in ")[2] for hit in hits] == ["text 0", "a.bin", "b.json", "c.z"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("http://me:pw@host/a", "http://***@host/a"),
        ("http://me:p@ss@host/a?b=c@d", "http://***@host/a?b=c@d"),
        ('{"a": "http://me:pw@host", "b": "x@y"}', '{"a": "http://***@host", "b": "x@y"}'),
        ("http://host/a?api_key=abc&x=1", "http://host/a?api_key=***&x=1"),
        ("{'x-api-key': 'tml-0123456789'}", "{'x-api-key': '***'}"),
        ("Authorization: Bearer abcdefghij", "Authorization: Bearer ***"),
        ("mail me@host about 3@4", "mail me@host about 3@4"),
    ],
)
def test_what_looks_like_a_secret_is_hidden_and_nothing_else(text, told):
    assert without_secrets(text) == told


@pytest.mark.parametrize("name", ["TINKER_API_KEY", "HF_TOKEN", "MY_PASSWORD", "X_SECRET"])
def test_values_of_variables_that_are_named_like_keys_are_hidden_in_every_spelling(monkeypatch, name):
    monkeypatch.setenv(name, 'tml-"quoted"/key+1')
    assert without_secrets('a tml-"quoted"/key+1 b') == "a *** b"
    assert without_secrets('{"a": "tml-\\"quoted\\"/key+1"}') == '{"a": "***"}'
    assert without_secrets("tml-%22quoted%22%2Fkey%2B1") == "***"
    monkeypatch.setenv(name, "short")
    assert without_secrets("a short text") == "a short text"


def test_an_address_gives_its_password_to_a_header():
    assert split_address("http://me:p%40s@h:1/x") == ("http://h:1/x", {"Authorization": "Basic bWU6cEBz"})
    assert split_address("http://h:1/x@y") == ("http://h:1/x@y", {})


def test_a_guarded_traceback_tells_no_key(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("TINKER_API_KEY", "tml-0123456789")
    guard_tracebacks()
    error = ValueError("tml-0123456789 of http://a:b@c")
    sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == "ValueError: *** of http://***@c\n"
