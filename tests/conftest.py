"""What holds for every test: calm threads, set before anything loads torch, and repeatable property tests.

A session of the SDK lives in a thread, which asks its server, waits for a random time and asks again. One that a test
leaves behind draws these numbers beside the property tests that come after it, so it ends with its test.

``pytest --hypothesis-profile=explore`` draws new examples on every run.
"""

import gc
import os
from collections.abc import Iterator
from typing import IO, Any

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# processes that share the cores; a test of several threads asks for them
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

os.environ.setdefault("TINKER_TELEMETRY", "0")

# a look of the collector at all objects, of which libraries have a million, takes half a second; it is due after
# 900,000 new ones, not after 70,000
gc.set_threshold(9_000, *gc.get_threshold()[1:])

# a deadline would fail tests for the load of the machine they run on
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def disks_are_not_waited_for() -> Iterator[None]:
    """No test takes the power away, so what the system was given is there; a descriptor that is none still fails.

    Whole runs force some fifty files to the disk. What is forced, and when, is watched by tests that put a function of
    their own here; runs that are killed at such a call have processes of their own.
    """

    def told(file: int | IO[Any]) -> None:
        os.fstat(file if isinstance(file, int) else file.fileno())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", told)
        yield


@pytest.fixture(autouse=True)
def sessions_end_with_their_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close what the SDK opened for a test; sessions of wider fixtures stay."""
    from tinker.lib.internal_client_holder import InternalClientHolder  # loads torch

    opened: list[InternalClientHolder] = []
    begin = InternalClientHolder.__init__

    def recorded(holder: InternalClientHolder, *given: Any, **options: Any) -> None:
        opened.append(holder)
        begin(holder, *given, **options)

    monkeypatch.setattr(InternalClientHolder, "__init__", recorded)
    yield
    for holder in opened:
        holder.close()
