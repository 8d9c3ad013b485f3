"""What the garbage collector looks at."""

import gc
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["long_lived"]


@contextmanager
def long_lived() -> Generator[None]:
    """While it lasts, the collector passes over all that exists now: the libraries' half a million objects.

    It would go through them again and again while a step's conversations grow.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
