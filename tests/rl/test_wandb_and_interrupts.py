import asyncio
import os
import signal
import sys
import threading
from types import SimpleNamespace

import pytest

from viva.rl.interrupts import Interrupts
from viva.rl.wandb_sink import check_wandb, open_wandb


def test_metrics_go_to_one_run_that_a_resumed_run_goes_on_with(tmp_path, monkeypatch):
    started, logged = [], []

    def init(**options):
        started.append(options)
        return SimpleNamespace(log=lambda metrics, step: logged.append((step, metrics)))

    fake = SimpleNamespace(init=init, Settings=lambda **settings: settings)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for step in range(2):
        sink = open_wandb(project="p", name="n", config={"seed": 1}, folder=tmp_path)
        sink(step, {"reward/mean": 0.5})
    assert logged == [(0, {"reward/mean": 0.5}), (1, {"reward/mean": 0.5})]
    assert started[0] == started[1]
    assert (started[0]["project"], started[0]["name"], started[0]["config"]) == ("p", "n", {"seed": 1})
    assert started[0]["settings"] == {"disable_code": True, "disable_git": True, "save_code": False}


def test_the_missing_package_is_told_with_the_command(monkeypatch):
    monkeypatch.setattr("viva.rl.wandb_sink.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not installed: pip install 'viva\[wandb\]'"):
        check_wandb()


async def test_a_signal_cancels_the_listening_task_and_is_remembered():
    interrupts = Interrupts()

    async def work():
        with interrupts.listening():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(5)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(work())
    assert interrupts.received is signal.SIGTERM


async def test_a_protected_part_ends_first():
    interrupts = Interrupts()
    with interrupts.listening(), interrupts.protected():
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.01)
    assert interrupts.received is signal.SIGINT


async def test_the_second_signal_does_what_it_always_does():
    seen = []
    previous = signal.signal(signal.SIGTERM, lambda *_: seen.append("as always"))
    try:
        interrupts = Interrupts()
        interrupts.request(signal.SIGTERM)
        assert seen == []
        interrupts.request(signal.SIGTERM)
        await asyncio.sleep(0.01)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert seen == ["as always"]


def test_a_run_in_another_thread_does_not_listen():
    seen = []

    async def work():
        with Interrupts().listening():
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    thread.join()
    assert seen == [before]
