import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from viva.run import interrupts as module
from viva.run.interrupts import Interrupts


async def test_a_signal_cancels_the_listening_task_and_is_remembered():
    interrupts = Interrupts()

    async def work():
        with interrupts.listening():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(5)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(work())
    assert interrupts.received is signal.SIGTERM
    assert not interrupts.cut_short


async def test_a_protected_part_ends_first():
    interrupts = Interrupts()
    with interrupts.listening(), interrupts.protected():
        os.kill(os.getpid(), signal.SIGINT)
        while interrupts.received is None:  # the listener is a thread of its own
            await asyncio.sleep(0.01)
    assert interrupts.received is signal.SIGINT
    assert not interrupts.cut_short


async def test_a_protected_part_that_takes_too_long_is_cut_short(monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 0.1)
    interrupts = Interrupts()

    async def work():
        with interrupts.listening(), interrupts.protected():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(5)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(work())
    assert interrupts.cut_short


async def test_what_was_there_before_is_there_again():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    threads = threading.active_count()
    with Interrupts().listening():
        assert threading.active_count() == threads + 1
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert threading.active_count() == threads
    assert signal.set_wakeup_fd(-1) == -1


async def test_a_signal_in_the_last_moment_ends_nothing_that_comes_after():
    interrupts = Interrupts()

    async def work():
        with interrupts.listening():
            os.kill(os.getpid(), signal.SIGINT)  # the loop hears of it when it has its next turn
        await asyncio.sleep(0)
        return interrupts.received

    assert await asyncio.create_task(work()) is signal.SIGINT


COMPUTING = """
import asyncio, sys, time
from viva.run.interrupts import Interrupts
from viva.run import interrupts

async def main():
    with Interrupts().listening():
        print("ready", flush=True)
        time.sleep(60)  # the engine computes: no other task has its turn

interrupts.LIMIT_S = float(sys.argv[1])
asyncio.run(main())
"""


@pytest.mark.parametrize(("limit_s", "signals"), [(0.5, 1), (60.0, 2)])
def test_a_process_that_only_computes_ends_at_the_limit_or_at_the_second_signal(limit_s, signals):
    command = [sys.executable, "-c", COMPUTING, str(limit_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        began = time.monotonic()
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        assert process.wait(timeout=20) == 143
        assert time.monotonic() - began < limit_s + 5
        assert "ended at once by SIGTERM; the run can be resumed" in process.stderr.read()


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
