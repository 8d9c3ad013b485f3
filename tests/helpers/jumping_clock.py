"""An event loop whose time stands still while there is something to do, and jumps to the next alarm when not.

Time limits of minutes cost nothing, and go off only where nobody moves: what a test finds does not depend on the
machine.
"""

import asyncio
import selectors


class _Jumping(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout=None):
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing is ever going to happen")
        self.now += max(timeout, 0.0)
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """See above."""

    def __init__(self):
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self):
        return self._jumping.now


def run(coroutine):
    """What a coroutine returns that runs in such a loop."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(coroutine)
