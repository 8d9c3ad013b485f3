"""Prompts that stay where they are until somebody asks for them, so that large data need no memory.

Of each one eight bytes of a digest are kept, from when all were read to find mistakes: a prompt that was changed since
is never trained on.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import overload

from viva.training.data import PromptItem, PromptsChangedError

__all__ = ["LazyPrompts", "file_lines", "indexed_lines", "item_digest", "unchanged"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LazyPrompts(Sequence[PromptItem]):
    """Several sources one after another, each read item by item.

    Args:
        parts: For each source its length, and what reads the item at a place.
    """

    def __init__(self, parts: Sequence[tuple[int, Callable[[int], PromptItem]]]) -> None:
        self._readers = [read for _, read in parts]
        self._ends = list(accumulate(length for length, _ in parts))

    def __len__(self) -> int:
        """Number of prompts."""
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> PromptItem: ...

    @overload
    def __getitem__(self, index: slice) -> list[PromptItem]: ...

    def __getitem__(self, index: int | slice) -> PromptItem | list[PromptItem]:
        """One prompt, read now, or several.

        Raises:
            IndexError: If there is none.
        """
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        part = bisect_right(self._ends, place)
        return self._readers[part](place - (self._ends[part - 1] if part else 0))


def item_digest(item: PromptItem) -> int:
    """Eight bytes of a digest of a prompt and its answer."""
    text = repr((item.question, item.answer)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def unchanged(
    read: Callable[[int], PromptItem], digests: Sequence[int], source: str
) -> Callable[[int], PromptItem]:
    """What reads the item at a place as it was.

    Args:
        read: Reads the item at a place as it is.
        digests: `item_digest` of every item.
        source: File or data set, for the message.

    Returns:
        A function that raises `PromptsChangedError` where an item is no longer what it was.
    """

    def checked(place: int) -> PromptItem:
        try:
            item = read(place)
        except (ValueError, OSError) as error:
            raise PromptsChangedError(_told(source, place)) from error
        if item_digest(item) != digests[place]:
            raise PromptsChangedError(_told(source, place))
        return item

    return checked


def _told(source: str, place: int) -> str:
    return (
        f"{source} was changed while the run reads from it: prompt {place + 1} is no longer what it was when the run "
        "began. Put the data back as they were, or give a copy of the new ones to a new run."
    )


def file_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Lines that are not blank.

    Yields:
        The line's number from 1, the byte at which it begins, and the line, without a byte order mark.
    """
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            mark = len(_BYTE_ORDER_MARK) if number == 1 and line.startswith(_BYTE_ORDER_MARK) else 0
            if line[mark:].strip():
                yield number, start + mark, line[mark:]
            start += len(line)


def indexed_lines(path: Path, starts: Sequence[int]) -> Callable[[int], bytes]:
    """What reads the line at a place.

    Args:
        path: Of the file.
        starts: First bytes of the lines, from `file_lines`.
    """

    def read(place: int) -> bytes:
        with path.open("rb") as file:
            file.seek(starts[place])
            return file.readline()

    return read
