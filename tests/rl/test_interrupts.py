import asyncio
import os
import signal
import threading

import pytest

from viva.rl.interrupts import Interrupts


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
