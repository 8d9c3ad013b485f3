"""Planted keys are in nothing that is written, said or logged; one in the data is data."""

import importlib.util
import json
import logging
import os
import subprocess
import sys
import unicodedata
import warnings
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
from bad_world import make_model, run_command
from hypothesis import given
from hypothesis import strategies as st
from view_runs import metrics_row, transcript, write_lines

from viva.recipes.common import say
from viva.run.log import RunLog
from viva.run.secrets import (
    guard_tracebacks,
    hidden_tokens,
    printable,
    redacted,
    split_address,
    without_secrets,
)
from viva.training.console import RunConsole
from viva.view.report import write_report

SCRIPT = Path(__file__).parents[1] / "helpers" / "secrets_run.py"
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
    "GITHUB_PAT": "canary-in-a-persona-8452",
}
IN_PROMPT = "ghp_canaryinaprompt0123456789abcdefghijk"
"""Told by its form alone."""
PROXY = "canary-proxy-password"
FILES = {
    ".env": "canary-dot-env-1234",
    ".git/config": "canary-git-remote-5678",
    "unsaved.py": "canary-git-diff-9012",
    "home/.netrc": "canary-netrc-3456",
    "home/.cache/huggingface/token": "hf_canarystored7890123456",
}
CANARIES = (*VARIABLES.values(), PROXY, IN_PROMPT, *FILES.values())
PROMPTS = "prompts.jsonl"


def spellings(canary):
    """How a key may stand in a file."""
    escaped = canary.replace("@", "%40")
    return {canary.encode(), escaped.encode(), canary.encode("utf-16-le")}


def found_in(folder, texts):
    """Where canaries are, in files (also packed ones) and texts; those that were planted are left out."""
    contents = {f"text {index}": text.encode() for index, text in enumerate(texts)}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in (*FILES, PROMPTS):
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
    (folder / PROMPTS).write_text(
        f'{{"query": "What is {IN_DATA}?", "answer": "4"}}\n{{"query": "Whose is {IN_PROMPT}?", "answer": "1"}}\n'
    )
    make_model(folder / "model", "qwen3")
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
    program = [sys.executable, str(SCRIPT), *arguments]
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
    transcripts = (folder / "run" / "transcripts.jsonl").read_text()
    assert IN_DATA in transcripts
    assert "Use ***." in transcripts
    assert "Whose is ***?" in transcripts
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


JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P"
KEYS = [
    "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "github_pat_11ABCDEFG0123456789_abcdefghijklmnop",
    "glpat-ab12cd34ef56gh78ij90",
    "hf_abcdefgh12345678IJKLMNOP",
    "tml-AbCdEfGhIjKlMnOp123456",
    "sk-ant-api03-abcdefghijklmnop",
    "sk-proj-abcdefghijk1mnopqrst",
    "AKIAIOSFODNN7EXAMPLE",
    "AIzaSyA-1234567890abcdefghijklmnopqrstu",
    "xoxb-123456789012-abcdefghij",
    "npm_abcdefghijklmnopqrstuvwxyz0123456789",
    JWT,
]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("around", ["{}", "key={} ", '"{}"', "a ({}), b", "x\n{}\ny"])
def test_a_key_is_known_by_its_form(key, around):
    assert without_secrets(around.format(key)) == around.format("***")


@pytest.mark.parametrize(
    "text",
    [
        "hf_dataset_name_config=main hf_train_split",
        "a task-based-approach-to-learning and sk-learn",
        "sk-some-long-name-without-a-number-in-it",
        "tml-none, tml-...",
        "eyJ is how {} begins; eyJhbGciOiJIUzI1NiJ9abcdefgh has no dots",
        "AKIA, GHP_, xoxo",
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "0123456789abcdef0123456789abcdef01234567",
    ],
)
def test_what_only_resembles_a_key_stays(text):
    assert without_secrets(text) == text


def test_private_keys_are_hidden_between_their_lines():
    head, foot = "-----BEGIN OPENSSH PRIVATE KEY-----", "-----END OPENSSH PRIVATE KEY-----"
    whole = f"a\n{head}\nb3BlbnNz\naC1rZXk=\n{foot}\nz"
    assert without_secrets(whole) == f"a\n{head}***{foot}\nz"
    assert without_secrets(f"{whole} {whole}").count("***") == 2
    assert without_secrets(f"{head}\nb3BlbnNz") == f"{head}***"
    public = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----"
    assert without_secrets(public) == public


@pytest.mark.parametrize("name", ["TINKER_API_KEY", "HF_TOKEN", "MY_PASSWORD", "X_SECRET"])
def test_values_of_variables_that_are_named_like_keys_are_hidden_in_every_spelling(monkeypatch, name):
    monkeypatch.setenv(name, 'tml-"quoted"/key+1')
    assert without_secrets('a tml-"quoted"/key+1 b') == "a *** b"
    assert without_secrets('{"a": "tml-\\"quoted\\"/key+1"}') == '{"a": "***"}'
    assert without_secrets("tml-%22quoted%22%2Fkey%2B1") == "***"
    monkeypatch.setenv(name, "short")
    assert without_secrets("a short text") == "a short text"


@pytest.mark.parametrize(
    "name", ["GITHUB_PAT", "github_pat", "DB_PASS", "OPENAI_API_KEY_2", "GHTOKEN", "AWS_CREDENTIALS_JSON"]
)
def test_a_variable_may_be_called_a_secret_anywhere_in_its_name(monkeypatch, name):
    monkeypatch.setenv(name, "value of a variable")
    assert without_secrets("the value of a variable!") == "the ***!"


@pytest.mark.parametrize(
    "name", ["PATHS", "OLDPWD", "HF_TOKEN_PATH", "MAX_TOKENS", "TOKENIZERS_PARALLELISM", "COMPASS"]
)
def test_other_variables_are_no_secrets(monkeypatch, name):
    monkeypatch.setenv(name, "value of a variable")
    assert without_secrets("the value of a variable!") == "the value of a variable!"


@given(st.data())
def test_a_key_is_hidden_in_whatever_pieces_it_was_sampled(data):
    before, after = (data.draw(st.text("a (.\u00e9\n", max_size=12)) for _ in range(2))
    key = data.draw(st.sampled_from(KEYS))
    text = f"{before} {key} {after}"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:stop] for start, stop in pairwise([0, *cuts, len(text)])]
    ids, told = hidden_tokens(range(7, 7 + len(pieces)), pieces)
    stop = 0
    for place, piece in enumerate(pieces):
        start, stop = stop, stop + len(piece)
        is_part = start < len(before) + 1 + len(key) and stop > len(before) + 1 and bool(piece)
        assert (ids[place], told[place] != piece) == (-1 if is_part else 7 + place, is_part)
    shown = "".join(told)
    assert shown.startswith(f"{before} *")
    assert shown.endswith(f"* {after}")
    assert not any(key[at : at + 4] in shown for at in range(len(key) - 3))


def test_every_log_of_a_run_hides_keys_and_stays_json(tmp_path):
    row = {
        "text": f'say "authorization: abcdefgh\\" then {KEYS[0]}',
        "ids": [1, 2.5, None],
        KEYS[1]: [{"a": JWT}],
    }
    RunLog(tmp_path).write_step(0, {"reward/mean": 0.5}, [row], [row], [row])
    for name in ("transcripts.jsonl", "samples.jsonl", "tokens.jsonl"):
        stored = json.loads((tmp_path / name).read_text())
        assert stored == redacted(row)
        assert stored["ids"] == [1, 2.5, None]
        assert not any(key in json.dumps(stored) for key in KEYS)


def test_a_report_hides_what_an_older_version_logged(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    write_lines(run / "metrics.jsonl", [metrics_row(0)])
    write_lines(run / "transcripts.jsonl", [transcript(0, 0)])
    path = run / "transcripts.jsonl"
    path.write_text(path.read_text().replace("How many", f"How of {KEYS[0]} and {JWT} many"))
    assert KEYS[0] in path.read_text()
    told = write_report(run).read_text()
    assert "How of *** and *** many" in told
    assert KEYS[0] not in told
    assert JWT not in told


HOSTILE = "a\x1b[2J\x1b]0;title\x07b\x9b31mc\u202ed\u2066e\r\x08f\x7f"


def steers(text):
    return sorted(
        {char for char in text if unicodedata.category(char) in ("Cc", "Cf", "Cs") and char not in "\n\t"}
    )


@given(st.text())
def test_no_line_steers_a_terminal(text):
    assert not {*steers(printable(text))} & {
        *map(chr, (*range(32), *range(127, 160), 0x202E, 0x2066, 0xD800))
    }


def test_every_way_to_the_terminal_shows_signs_in_place_of_escapes(capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    factory = logging.getLogRecordFactory()
    try:
        guard_tracebacks()
        say(HOSTILE)
        say(HOSTILE, is_error=True)
        console = RunConsole(num_steps=1)
        console.message(HOSTILE)
        console.warn_once("a", HOSTILE)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            monkeypatch.setattr(
                warnings, "showwarning", lambda *a: sys.stderr.write(warnings.formatwarning(*a[:4]))
            )
            warnings.warn(HOSTILE, stacklevel=1)
        handler = logging.StreamHandler(sys.stderr)
        handler.handle(logging.getLogRecordFactory()("a", 30, "a", 1, "of %s", (HOSTILE,), None))
        sys.excepthook(ValueError, ValueError(HOSTILE), None)
    finally:
        logging.setLogRecordFactory(factory)
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert text.count("a\u241b[2J\u241b]0;title\u2407b\\x9b31mc\\u202ed\\u2066e\u240d\u2408f\u2421") == 7
    assert steers(text) == []


@pytest.mark.parametrize("kind", ["column", "key", "value", "split", "config", "path"])
def test_hostile_names_in_files_reach_the_terminal_as_signs(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = f"{HOSTILE}.jsonl" if kind == "path" else "data.jsonl"
    name = f"{HOSTILE}\nforged"
    row = {"column": {name: "a"}, "key": {name: "a"}, "value": {"query": {name: "\x1b[2J"}}}.get(kind)
    Path(path).write_text(json.dumps(row or {"query": "a", "answer": [name]}, ensure_ascii=False) + "\n")
    source = {"column": f"hf_dataset_name={path}", "split": f"hf_dataset_name={path}"}.get(
        kind, f"train_prompts_path={path}"
    )
    more = {"split": [f"hf_train_split={HOSTILE}"], "config": [f"renderer_name={HOSTILE}"]}.get(kind, [])
    arguments = ["train", "conversation_preference_rl", "log_path=run", source, *more]
    assert run_command(arguments) == 2
    shown = capsys.readouterr()
    assert "\u241b[2J" in shown.err or "\\x1b[2J" in shown.err
    assert (
        steers((shown.out + shown.err).replace("\r", "")) == []
    )  # bars of `datasets` return to the line's begin
    assert "\nforged" not in shown.err


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
