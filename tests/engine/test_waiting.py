"""Threads spin for a moment where they wait, but not while other processes use the processors."""

import gc
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from viva import threads
from viva.threads import SPINS, Waiting

pytestmark = pytest.mark.skipif(not threads._STAT.exists(), reason="needs /proc/stat")


@pytest.fixture
def spins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", SPINS)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")


def watched(uses: list[float | None]) -> tuple[Waiting, list[bool]]:
    """What it decides, looking once a second, from the processors that others use in each of them."""
    total, now = 0.0, 0.0
    known = True

    def others() -> float | None:
        return total if known else None

    found = Waiting(others=others, clock=lambda: now)
    found.look()
    decisions: list[bool] = []
    for each in uses:
        now += 1
        known, total = each is not None, total + (each or 0)
        found.pause()
        found.look()
        decisions.append(found._end is not None)
    return found, decisions


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "viva-waiting"]


def wait_for(count: int) -> None:
    deadline = time.monotonic() + 10
    while len(helpers()) != count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(helpers()) == count


def test_threads_sleep_while_others_are_busy_and_spin_again_afterwards(spins: None) -> None:
    before = len(helpers())
    _, decisions = watched([0.0, 0.2, 1.5, 1.5, 0.2, 0.05, 0.2])
    assert decisions == [False, False, True, True, True, False, False]
    wait_for(before)  # one was started, and has ended


def test_what_others_did_while_the_engine_had_no_work_counts_for_nothing(spins: None) -> None:
    before = len(helpers())
    times, used = iter([0.0, 0.0, 1.0, 60.0, 61.0, 61.0]), iter([0.0, 120.0, 122.0])
    found = Waiting(others=used.__next__, clock=times.__next__)
    found.look()
    found.pause()  # at 1 s
    found.look()  # at 60 s
    assert found._end is None
    found.pause()
    found.look()  # at 61 s, after a second of work
    assert found._end is not None
    del found
    wait_for(before)  # its thread has ended


def test_no_thread_outlives_the_engine_that_started_it(spins: None) -> None:
    before = len(helpers())
    found, _ = watched([0.0, 1.5])
    wait_for(before + 1)
    del found
    gc.collect()
    wait_for(before)


def test_what_nobody_can_tell_changes_nothing(spins: None) -> None:
    assert watched([None, None, 0.0])[1] == [False, False, False]


@pytest.mark.parametrize("text", [None, "cpu0 1 2 3\n", "cpu0 a b c d e f g h\n"])
def test_a_container_that_hides_what_others_use_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "stat").write_text(text * len(os.sched_getaffinity(0)))
    monkeypatch.setattr(threads, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: {0})
    assert threads._used_by_others() is None


def test_it_looks_only_now_and_then(spins: None) -> None:
    looks: list[float] = []
    now = 0.0
    found = Waiting(others=lambda: looks.append(now) or 0.0, clock=lambda: now)
    for step in range(1000):
        now = step / 1000
        found.look()
    assert len(looks) == 4


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "0"), ("OMP_NUM_THREADS", "1")])
def test_where_nothing_spins_nothing_is_looked_at(
    spins: None, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert watched([2.0, 2.0])[1] == [False, False]


def test_what_others_use_is_counted_and_ours_is_not() -> None:
    start, ours, first = time.monotonic(), time.process_time(), threads._used_by_others()
    burn = "import time\nwhile time.process_time() < 0.6: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    second = threads._used_by_others()
    assert first is not None
    assert second is not None
    assert second - first > 0.4
    while time.process_time() < ours + 0.6:
        pass
    third = threads._used_by_others()
    assert third is not None
    cores = len(os.sched_getaffinity(0))
    assert third - first < cores * (time.monotonic() - start) - 0.5 + 0.2


SLEEPS = """
import json, resource, time
import torch
from viva import threads
ones = torch.ones(2**18)
def switches():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(2000):
        ones.sum()
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
switches()
spinning = switches()
found = threads.Waiting(others=iter([0.0, 10.0]).__next__, clock=iter([0.0, 0.0, 1.0, 1.0]).__next__)
found.look(), found.pause(), found.look()
time.sleep(1)
print(json.dumps([spinning, switches(), found._end is not None]))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_a_team_more_makes_threads_sleep() -> None:
    """The one thing taken from GCC's manual: with more threads than processors libgomp does not spin."""
    threads = str(len(os.sched_getaffinity(0)))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    environment |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": SPINS}
    for _ in range(5):  # until the machine leaves it in peace: a thread that is interrupted sleeps, too
        done = subprocess.run(
            [sys.executable, "-c", SLEEPS], env=environment, check=True, capture_output=True, text=True
        )
        spinning, sleeping, is_decided = json.loads(done.stdout)
        assert is_decided
        if sleeping > max(2 * spinning, 500):
            break
    assert sleeping > max(2 * spinning, 500)
