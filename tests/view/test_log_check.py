"""Damaged logs: every command says so, or tells what it tells of sound ones; none fails or changes in silence."""

import asyncio
import contextlib
import io
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.types import ASGIApp
from view_runs import answers_of

import viva.cli
from viva.experts.samples import Sample, sample_record
from viva.run.checkpoints import Checkpoints
from viva.run.files import write_json
from viva.run.log import RunLog
from viva.view.app import cookie_name, make_app
from viva.view.log_check import LogCheck

MakeLine = Callable[..., dict[str, Any]]

LOGS = (
    "metrics.jsonl",
    "transcripts.jsonl",
    "tokens.jsonl",
    "samples.jsonl",
    "checkpoints.jsonl",
    "config.json",
)
MUTATIONS = 28
"""Of every log, four of each kind."""
PROBLEM = ("damaged", "torn", "cannot be read", "nested too deeply")


class Engine:
    async def save_state(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(path=f"tinker://run/weights/{name}")


async def write_run(
    folder: Path, critique_transcript: MakeLine, *, steps: int = 3, is_over: bool = True
) -> Path:
    """A run as training leaves it, with a checkpoint after its second and its last step."""
    folder.mkdir()
    write_json(folder / "config.json", {"model_name": "tiny", "estimator": "shaped", "recipe": "some"})
    log, checkpoints, noise = RunLog(folder), Checkpoints(folder), np.random.default_rng(0)
    for step in range(steps):
        turn = {"seat": 0, "turn": 0, "ids": [5, 6], "pieces": ["a ", "b"], "sampling": [-0.5, -0.25]}
        turn |= {"training": [-0.5, -0.5], "mask": [1, 1], "advantages": [0.5, -0.25]}
        turn |= {"spans": [{"start": 0, "stop": 2, "stream": "r_sol", "reward": 0.75}]}
        log.write_step(
            step,
            {"reward/mean": 0.1 * step, "test/direct_accuracy": 0.5 + 0.1 * step},
            [critique_transcript(step, group) for group in range(2)],
            [
                sample_row(noise, step, prompt, strategy)
                for prompt in range(2)
                for strategy in ("iid", "hint")
            ],
            [{"step": step, "group": 0, "strategy": "iid", "turns": [turn]}],
        )
        is_end = is_over and step == steps - 1
        if step == 1 or is_end:
            await checkpoints.save(Engine(), next_step=step + 1, log_sizes=log.sizes(), final=is_end)
    return folder


def sample_row(noise: np.random.Generator, step: int, prompt: int, strategy: str) -> dict[str, Any]:
    sampling_T = noise.uniform(-2, -1, 3)
    is_swapped = strategy == "hint"
    sample = Sample(
        strategy=strategy,
        prompt=prompt,
        reward=float(noise.integers(0, 2)),
        sampling_logprobs_T=sampling_T,
        old_logprobs_T=sampling_T - 0.1 if is_swapped else None,
        on_policy=not is_swapped,
        context_logprobs={} if is_swapped else {"hint": sampling_T - 0.1},
    )
    return {"step": step, "group": 0, "seat": 0, **sample_record(sample, prompt=prompt)}


def command(*arguments: str) -> tuple[int, str]:
    """Exit status of a command, and what it said."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = viva.cli.main(list(arguments))
    return status, out.getvalue() + err.getvalue()


def reported(folder: Path) -> str:
    """All that the report holds."""
    status, told = command("report", str(folder))
    if status:
        return told
    inside = answers_of((folder / "report.html").read_text(encoding="utf-8"))
    (run,), (summary,) = inside["runs"]["runs"], inside["summary"]
    damaged = [f"{count} damaged lines in {name}" for name, count in run.pop("damaged").items()]
    torn = [f"{name} is torn" for name in summary.pop("torn")]
    return "\n".join([*damaged, *torn, json.dumps(inside)])


def rescored(folder: Path) -> str:
    return command("rescore", str(folder))[1]


def estimated(folder: Path) -> str:
    return command("estimate", str(folder))[1]


def viewed(folder: Path) -> str:
    """All that the page gets."""
    try:
        app = make_app([folder], token="t")
    except ValueError as error:
        return str(error)
    run, rest = asyncio.run(answers(app))
    damaged = [f"{count} damaged lines in {name}" for name, count in run.pop("damaged").items()]
    return "\n".join([*damaged, json.dumps(run), *rest])


async def answers(app: ASGIApp) -> tuple[dict[str, Any], list[str]]:
    """What is said of the run, and of all else that the page asks for."""
    transport, base = httpx.ASGITransport(app=app), "http://127.0.0.1:4321"
    headers = {"Cookie": f"{cookie_name('t')}=t"}
    async with httpx.AsyncClient(transport=transport, base_url=base, headers=headers) as client:
        while True:
            run = (await client.get("/api/runs")).json()["runs"][0]
            if run["is_complete"]:
                break
        for name in ("version", "progress"):
            del run[name]
        places = [f"conversation?step={step}&group={group}" for step in range(3) for group in range(2)]
        names = [
            "curves",
            "conversations",
            "judge",
            "series?key=reward/mean&key=test/direct_accuracy",
            *places,
        ]
        return run, [(await client.get(f"/api/{name}")).text for name in names]


COMMANDS: dict[str, Callable[[Path], str]] = {
    "report": reported,
    "rescore": rescored,
    "estimate": estimated,
    "view": viewed,
}


def mutations(content: bytes, count: int, draw: random.Random) -> Iterator[tuple[str, bytes]]:
    """Damages of a file, by what was done to it."""
    lines = content.splitlines(keepends=True)
    kinds = ("cut", "flip", "drop", "double", "utf8", "nest", "swap")
    for number in range(count):
        kind, place, line = (
            kinds[number % len(kinds)],
            draw.randrange(len(content)),
            draw.randrange(len(lines)),
        )
        if kind == "cut":
            made = content[:place]
        elif kind == "flip":
            made = content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :]
        elif kind == "drop":
            made = b"".join(lines[:line] + lines[line + 1 :])
        elif kind == "double":
            made = b"".join(lines[: line + 1] + lines[line:])
        elif kind == "utf8":
            made = content[:place] + b"\xff\xfe" + content[place:]
        elif kind == "nest":
            made = b"".join([*lines[:line], b'{"step": ' + b"[" * 100_000 + b"\n", *lines[line + 1 :]])
        else:
            other = draw.randrange(len(lines))
            lines_made = list(lines)
            lines_made[line], lines_made[other] = lines[other], lines[line]
            made = b"".join(lines_made)
        if made != content:
            yield f"{kind} {number}", made


@pytest.fixture
async def run(tmp_path: Path, critique_transcript: MakeLine) -> Path:
    return await write_run(tmp_path / "run", critique_transcript)


@pytest.mark.slow
@pytest.mark.parametrize("log", LOGS)
def test_no_damage_to_a_log_changes_what_a_command_tells_in_silence(
    run: Path, tmp_path: Path, log: str
) -> None:
    sound = {name: tell(run) for name, tell in COMMANDS.items()}
    assert not [name for name, told in sound.items() if any(word in told for word in PROBLEM)]
    (run / "report.html").unlink()
    silent: list[str] = []
    tried = 0
    for what, content in mutations((run / log).read_bytes(), MUTATIONS, random.Random(log)):
        folder = tmp_path / "damaged" / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(run, folder)
        (folder / log).write_bytes(content)
        for name, tell in COMMANDS.items():
            told = tell(folder)
            if told != sound[name] and not any(word in told for word in PROBLEM):
                silent.append(f"{name}: {what} of {log}")
        tried += 1
    assert not silent
    assert tried > MUTATIONS * 0.8


@pytest.mark.slow
@pytest.mark.parametrize("log", LOGS[:4])
def test_a_run_without_checkpoints_is_read_without_a_traceback_whatever_its_logs_hold(
    run: Path, tmp_path: Path, log: str
) -> None:
    (run / "checkpoints.jsonl").unlink()
    folder = tmp_path / "damaged"
    for _, content in mutations((run / log).read_bytes(), MUTATIONS, random.Random(log)):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(run, folder)
        (folder / log).write_bytes(content)
        for tell in COMMANDS.values():
            assert tell(folder)


def test_a_transcript_cut_to_a_quarter_is_refused_with_file_line_and_remedy(run: Path) -> None:
    path = run / "transcripts.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 4])
    status, told = command("rescore", str(run))
    assert status == 2
    assert "transcripts.jsonl is damaged or was changed" in told
    assert "line 2 cannot be read" in told
    assert "Put it back from a copy" in told


def test_report_and_view_show_a_banner_that_names_the_file_and_the_line(run: Path) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1].replace("0.1", "0.7") + lines[2])
    found = "metrics.jsonl is damaged or was changed since step 2: one of the lines 1 to 2 is not as it was written"
    assert found in reported(run)
    assert found in viewed(run)


async def test_what_a_live_run_wrote_behind_its_last_checkpoint_is_no_damage(
    tmp_path: Path, critique_transcript: MakeLine
) -> None:
    run = await write_run(tmp_path / "live", critique_transcript, is_over=False)
    check = LogCheck(run)
    list(check.advance())
    assert check.problems == {}
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    assert "damaged" not in reported(run)
    assert "is torn" in reported(run)


async def test_a_check_goes_on_with_a_run_and_reads_no_byte_twice(
    tmp_path: Path, critique_transcript: MakeLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await write_run(tmp_path / "live", critique_transcript, is_over=False)
    check, log, checkpoints = LogCheck(run, ("metrics.jsonl",)), RunLog(run), Checkpoints(run)
    hashed: list[int] = []
    known = LogCheck._reach
    monkeypatch.setattr(
        LogCheck, "_reach", lambda self, *given: hashed.append(given[2].size) or known(self, *given)
    )
    list(check.advance())
    list(check.advance())
    assert len(hashed) == 1
    log.write_step(3, {"reward/mean": 0.5})
    await checkpoints.save(Engine(), next_step=4, log_sizes=log.sizes())
    list(check.advance())
    assert len(hashed) == 2
    assert check.problems == {}
    # the run is resumed from its first checkpoint, and writes something else
    checkpoints.discard_after(checkpoints.all()[0])
    log.cut_back(checkpoints.all()[0].log_sizes)
    log.write_step(2, {"reward/mean": 0.75})
    await checkpoints.save(Engine(), next_step=3, log_sizes=log.sizes())
    list(check.advance())
    assert check.problems == {}


async def test_a_complete_run_may_go_on_for_more_steps_and_no_other_way(run: Path) -> None:
    RunLog(run).write_step(3, {"reward/mean": 0.5})
    check = LogCheck(run)
    list(check.advance())
    assert check.problems == {}
    RunLog(run).cut_back(Checkpoints(run).all()[-1].log_sizes)
    RunLog(run).write_step(1, {"reward/mean": 0.5})
    check = LogCheck(run)
    list(check.advance())
    assert list(check.problems) == ["metrics.jsonl"]
