"""New whole lines of a file that another process appends to, and may cut back (a run that is resumed does)."""

from collections.abc import Iterator
from pathlib import Path

__all__ = ["GrowingFile"]

_TAIL_BYTES = 256


class GrowingFile:
    """Reads each line once, as soon as it is whole. A missing file is an empty one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        """Bytes read so far: where the next line starts."""
        self._tail = b""

    @property
    def size(self) -> int:
        """Bytes the file has now."""
        try:
            return self.path.stat().st_size
        except OSError:  # there is none, or none any more
            return 0

    def was_cut_back(self) -> bool:
        """Whether what was read before is no longer what the file holds; then everything starts anew."""
        if not self.offset:
            return False
        if self.size >= self.offset:
            with self.path.open("rb") as file:
                file.seek(self.offset - len(self._tail))
                if file.read(len(self._tail)) == self._tail:
                    return False
        self.offset, self._tail = 0, b""
        return True

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """(offset, line) of every whole line not read yet; stop at any time and go on later."""
        if self.size <= self.offset:
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while (line := file.readline()).endswith(b"\n"):
                start = self.offset
                self.offset += len(line)
                self._tail = (self._tail + line)[-_TAIL_BYTES:]
                yield start, line

    def line_at(self, offset: int) -> bytes:
        """The line that starts at a byte."""
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.readline()
