"""Garbage collection while a run lasts."""

import gc
from collections.abc import Generator
from contextlib import contextmanager

_YOUNG, _OLD = 10_000, 100
"""New objects after which the collector looks at them, and how many of its longer looks there are for one at all
objects. A thousand conversations have half a million."""


@contextmanager
def frozen_gc() -> Generator[None]:
    """Freeze the objects that exist now, and raise the garbage collector's thresholds for new ones.

    It would go through the libraries' half a million objects, and through all conversations of a step, again and
    again while these grow. Who uses this calls ``gc.collect()`` where work ends, after every step.
    """
    young, middle, old = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(max(young, _YOUNG) if young else 0, middle, max(old, _OLD))  # 0: it is turned off
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        gc.unfreeze()
