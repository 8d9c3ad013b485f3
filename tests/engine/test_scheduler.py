"""The pump: what is computed together, turns, cancellation, errors."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, wait

import pytest

from viva.engine.scheduler import LocalFuture, Pump


class Counter:
    """A worker whose requests take a stated number of units each; keeps a log of what each unit worked on."""

    def __init__(self, pump: Pump, name: str, log: list[str], priority: int = 1) -> None:
        self.priority = priority
        self._pump = pump
        self._name = name
        self._log = log
        self._queue: deque[tuple[str, int, LocalFuture[str]]] = deque()

    def ask(self, label: str, units: int = 1) -> LocalFuture[str]:
        future: LocalFuture[str] = LocalFuture(self._pump, cancellable=True)
        self._queue.append((label, units, future))
        self._pump.submit(self)
        return future

    def has_work(self) -> bool:
        return bool(self._queue)

    def run_unit(self) -> bool:
        waiting = ",".join(label for label, _, _ in self._queue)
        self._log.append(f"{self._name}:{waiting}")
        label, units, future = self._queue.popleft()
        if label == "fail":
            self._queue.appendleft((label, units, future))
            raise RuntimeError("this unit fails")
        if label == "interrupt":
            self._queue.appendleft((label, units, future))
            raise KeyboardInterrupt
        if units > 1:
            self._queue.appendleft((label, units - 1, future))
            return False
        future.resolve(label.upper())
        return True

    def fail(self, error: BaseException) -> None:
        self._queue.popleft()[2].reject(error)


@pytest.fixture
def pump() -> Pump:
    return Pump()


def test_a_result_can_be_asked_for_without_an_event_loop(pump: Pump) -> None:
    worker = Counter(pump, "a", [])
    assert worker.ask("x", 5).result() == "X"


async def test_a_result_can_be_awaited_in_every_way_the_sdk_offers(pump: Pump) -> None:
    worker = Counter(pump, "a", [])
    assert await worker.ask("x") == "X"
    assert await worker.ask("y").result_async() == "Y"
    assert await asyncio.create_task(worker.ask("z").result_async()) == "Z"
    assert await asyncio.wrap_future(worker.ask("w").future()) == "W"
    done = worker.ask("v")
    await done
    assert (await done, done.result()) == ("V", "V")


async def test_a_result_can_be_asked_for_inside_a_loop(pump: Pump) -> None:
    assert Counter(pump, "a", []).ask("x", 3).result() == "X"


def test_requests_of_slow_programs_are_collected_before_a_unit_starts(pump: Pump) -> None:
    log: list[str] = []
    worker = Counter(pump, "a", log)

    async def agent(name: str, turns_before: int) -> None:
        for _ in range(turns_before):
            await asyncio.sleep(0)
        await worker.ask(name)

    async def program() -> None:
        await asyncio.gather(agent("x", 0), agent("y", 9), agent("z", 25))

    asyncio.run(program())
    assert log[0] == "a:x,y,z"


def test_two_runs_of_one_program_work_on_the_same_batches(pump: Pump) -> None:
    def run(jitter: float) -> list[str]:
        log: list[str] = []
        worker = Counter(pump, "a", log)

        async def agent(number: int) -> None:
            for turn in range(3):
                time.sleep(jitter * number)
                await worker.ask(f"{number}.{turn}", 1 + (number + turn) % 3)

        async def program() -> None:
            await asyncio.gather(*(agent(number) for number in range(4)))

        asyncio.run(program())
        return log

    assert run(0) == run(0.003)


async def test_what_nobody_awaits_is_done_too(pump: Pump) -> None:
    future = Counter(pump, "a", []).ask("x", 3)
    for _ in range(120):
        await asyncio.sleep(0)
    assert future.done()


async def test_the_pump_ends_when_there_is_nothing_to_do_and_starts_again(pump: Pump) -> None:
    worker = Counter(pump, "a", [])
    await worker.ask("x")
    for _ in range(120):
        await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1
    assert await worker.ask("y") == "Y"


def test_requests_made_before_a_loop_and_left_by_another_are_done(pump: Pump) -> None:
    worker = Counter(pump, "a", [])
    early = worker.ask("early")

    async def leave() -> LocalFuture[str]:
        return worker.ask("left", 50)

    async def collect(future: LocalFuture[str]) -> str:
        return await future

    left = asyncio.run(leave())
    assert asyncio.run(collect(early)) == "EARLY"
    assert asyncio.run(collect(left)) == "LEFT"


def test_workers_of_lower_priority_number_go_first_and_equal_ones_take_turns(pump: Pump) -> None:
    log: list[str] = []
    first, second = Counter(pump, "a", log), Counter(pump, "b", log)
    urgent = Counter(pump, "u", log, priority=0)
    last = [first.ask("x", 2), second.ask("y", 2), urgent.ask("z", 2)]
    for future in last:
        future.result()
    assert log == ["u:z", "u:z", "a:x", "b:y", "a:x", "b:y"]


def test_an_error_reaches_the_request_it_belongs_to_and_no_other(pump: Pump) -> None:
    worker = Counter(pump, "a", [])
    bad, good = worker.ask("fail"), worker.ask("x")
    assert good.result() == "X"
    with pytest.raises(RuntimeError, match="this unit fails"):
        bad.result()


def test_an_interrupt_fails_its_request_and_is_raised(pump: Pump) -> None:
    worker = Counter(pump, "a", [])
    stopped, good = worker.ask("interrupt"), worker.ask("x")
    with pytest.raises(KeyboardInterrupt):
        good.result()
    with pytest.raises(KeyboardInterrupt):
        stopped.result()
    assert good.result() == "X"


def test_a_result_asked_for_inside_a_unit_is_refused_instead_of_hanging(pump: Pump) -> None:
    worker = Counter(pump, "a", [])
    other = worker.ask("x")
    worker.run_unit = lambda: bool(other.result())  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="from inside the engine"):
        other.result()


def test_a_request_that_got_lost_raises_instead_of_hanging(pump: Pump) -> None:
    with pytest.raises(RuntimeError, match="lost"):
        LocalFuture(pump, cancellable=True).result()


async def test_waiting_can_time_out(pump: Pump) -> None:
    worker = Counter(pump, "a", [])
    with pytest.raises(TimeoutError):
        await worker.ask("x", 10**6).result_async(timeout=0.02)
    with pytest.raises(TimeoutError, match=r"0\.02 seconds"):
        worker.ask("y", 10**6).result(timeout=0.02)


async def test_cancelling_the_waiting_task_cancels_a_request_but_not_an_operation(pump: Pump) -> None:
    worker = Counter(pump, "a", [])
    request = worker.ask("x", 10**6)
    operation: LocalFuture[str] = LocalFuture(pump, cancellable=False)
    for future in (request, operation):
        waiting = asyncio.create_task(future.result_async())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert request.cancelled()
    assert not operation.cancelled()
    request.resolve("too late")
    operation.resolve("done")
    assert operation.result() == "done"


def test_standard_futures_can_be_waited_for(pump: Pump) -> None:
    worker = Counter(pump, "a", [])
    futures = [worker.ask(name, 3).future() for name in "xyz"]
    done, pending = wait(futures, timeout=10)
    assert (len(done), len(pending)) == (3, 0)


def test_many_threads_may_ask_at_once(pump: Pump) -> None:
    worker = Counter(pump, "a", [])
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(worker.ask(f"x{n}", 5).result())) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert sorted(results) == sorted(f"X{n}" for n in range(8))


@pytest.mark.parametrize("outcome", ["value", "error", "cancel"])
def test_a_mapped_future_follows_its_source(pump: Pump, outcome: str) -> None:
    source: LocalFuture[int] = LocalFuture(pump, cancellable=True)
    mapped = source.map(lambda value: value + 1)
    actions: dict[str, Callable[[], object]] = {
        "value": lambda: source.resolve(1),
        "error": lambda: source.reject(ValueError("bad")),
        "cancel": lambda: source.future().cancel(),
    }
    actions[outcome]()
    if outcome == "value":
        assert mapped.result() == 2
    else:
        with pytest.raises((ValueError, CancelledError)):
            mapped.result()


def test_cancelling_a_mapped_future_cancels_its_source(pump: Pump) -> None:
    source: LocalFuture[int] = LocalFuture(pump, cancellable=True)
    source.map(str).future().cancel()
    assert source.cancelled()


class Looks:
    """Writes down when the pump looks and pauses."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def look(self) -> None:
        self._log.append("look")

    def pause(self) -> None:
        self._log.append("pause")


def test_every_unit_is_work_to_the_one_who_looks_at_others_also_one_that_fails(pump: Pump) -> None:
    log: list[str] = []
    pump._waiting = Looks(log)  # pyright: ignore[reportAttributeAccessIssue]
    worker = Counter(pump, "w", log)
    worker.ask("a")
    worker.ask("fail")
    while pump.run_unit():
        pass
    assert log == ["look", "w:a,fail", "pause", "look", "w:fail", "pause"]
