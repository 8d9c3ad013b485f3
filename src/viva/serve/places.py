"""A bounded number of requests at once."""

from collections.abc import Generator
from contextlib import contextmanager

from viva.serve.bodies import RequestError


class Places:
    """Places of requests that are being answered or wait for it.

    Args:
        limit: At least 1.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"queue must be at least 1, the number of requests at once; got {limit}")
        self._limit = limit
        self.taken = 0

    @contextmanager
    def take(self) -> Generator[None]:
        """A place for as long as the context lasts.

        Raises:
            RequestError: If all are taken (429).
        """
        if self.taken >= self._limit:
            raise RequestError(
                f"{self.taken} requests are being answered or wait, and no more are taken (queue={self._limit}); try "
                "again in a moment",
                status=429,
                code="rate_limit_exceeded",
            )
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1
