"""What the garbage collector looks at, and how often."""

import gc
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["long_lived"]

_YOUNG, _OLD = 10_000, 100
"""New objects after which the collector looks at them, and how many of its longer looks there are for one at all
objects. A thousand conversations have half a million."""


@contextmanager
def long_lived() -> Generator[None]:
    """While it lasts, the collector passes over all that exists now, and looks less often at what is new.

    It would go through the libraries' half a million objects, and through all conversations of a step, again and
    again while these grow. Who uses this calls ``gc.collect()`` where work ends, after every step.
    """
    young, middle, old = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(
        max(young, _YOUNG) if young else 0, middle, max(old, _OLD)
    )  # 0: somebody has turned it off
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        gc.unfreeze()
