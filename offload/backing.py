"""Where a streamed layer's rows lie between two steps: host memory, or an unnamed file. Written and read in groups.

A group is a run of whole rows of about GROUP_BYTES. A file's groups have checksums here: what is read is what was
written, or CorruptSegment.
"""

import os
import tempfile
import weakref
from collections.abc import Iterable
from itertools import pairwise
from time import monotonic

import numpy as np

from qkv.errors import CorruptSegment
from qkv.offload.header import checksum
from qkv.offload.io import FileIO, read_into, write_from

GROUP_BYTES = 1 << 16


class Backing:
    """One layer's rows. Rows that were never written are not read: what `load` leaves there is of no meaning."""

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self.group = max(1, GROUP_BYTES // row_bytes) * row_bytes
        self.written: dict[int, int] = {}  # by group: bytes, fewer where the layer's rows ended when it was written
        self.bytes_read = self.bytes_written = 0

    def groups_of(self, rows: Iterable[int]) -> list[int]:
        return sorted({row * self.row_bytes // self.group for row in rows})

    def store(self, rows: memoryview, groups: list[int]) -> None:
        """Keep these groups of the layer's rows. Raises OSError."""
        for first, end in _runs(groups):
            part = rows[first * self.group : min(end * self.group, len(rows))]
            self._put(part, first)
            self.bytes_written += len(part)
            for group in range(first, end):
                self.written[group] = min(self.group, len(rows) - group * self.group)

    def load(self, rows: memoryview, seconds: float) -> None:
        """Fill what was written of the layer's rows. Raises CorruptSegment, OSError (TimeoutError: late)."""
        deadline = monotonic() + seconds
        for first, end in _runs(sorted(self.written)):
            part = rows[first * self.group : (end - 1) * self.group + self.written[end - 1]]
            self._get(part, first, deadline)
            self.bytes_read += len(part)

    @property
    def nbytes(self) -> int:
        """Held, wherever that is."""
        return sum(self.written.values())

    def _pieces(self, part: memoryview, first: int) -> Iterable[tuple[int, memoryview]]:
        """The groups, from `first` on, that a part consists of."""
        for at in range(0, len(part), self.group):
            yield first + at // self.group, part[at : at + self.group]

    def _put(self, part: memoryview, group: int) -> None:
        raise NotImplementedError

    def _get(self, part: memoryview, group: int, deadline: float) -> None:
        raise NotImplementedError


class HostRows(Backing):
    """In host memory; a group's room is taken, and touched, when it is first written."""

    def __init__(self, row_bytes: int) -> None:
        super().__init__(row_bytes)
        self._held: dict[int, np.ndarray] = {}

    def _put(self, part: memoryview, group: int) -> None:
        for number, piece in self._pieces(part, group):
            if number not in self._held:
                self._held[number] = np.zeros(self.group, np.uint8)
            self._held[number][: len(piece)] = piece

    def _get(self, part: memoryview, group: int, deadline: float) -> None:
        for number, piece in self._pieces(part, group):
            piece[:] = self._held[number][: len(piece)].data


class FileRows(Backing):
    """In a file without a name in `folder`: it is gone with the process, however that ends."""

    def __init__(self, row_bytes: int, folder: str, io: FileIO) -> None:
        super().__init__(row_bytes)
        self._io, self._path = io, os.path.join(folder, "qkv")
        self._sums: dict[int, bytes] = {}  # by group
        self._fd = _unnamed(io, folder)
        weakref.finalize(self, io.close, self._fd)

    def drop_cached(self) -> None:
        """Have the kernel forget the file's pages."""
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _put(self, part: memoryview, group: int) -> None:
        write_from(self._io, self._fd, [part], group * self.group)
        for number, piece in self._pieces(part, group):
            self._sums[number] = checksum(piece, None)

    def _get(self, part: memoryview, group: int, deadline: float) -> None:
        offset = group * self.group
        if read_into(self._io, self._fd, [part], offset, deadline) < len(part):
            raise CorruptSegment(self._path, offset, "the file ends")
        for number, piece in self._pieces(part, group):
            if checksum(piece[: self.written[number]], None) != self._sums[number]:
                raise CorruptSegment(self._path, number * self.group, "spilled records do not match their checksum")


def _unnamed(io: FileIO, folder: str) -> int:
    try:
        return io.open(folder, os.O_RDWR | os.O_TMPFILE)
    except OSError:  # not every file system can
        path = tempfile.mktemp(prefix="qkv.", dir=folder)  # opened with O_EXCL: nobody can slip another file in
        fd = io.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        io.unlink(path)
        return fd


def _runs(groups: list[int]) -> Iterable[tuple[int, int]]:
    """(first, end) of consecutive groups, in order."""
    cuts = [place for place, (one, next_) in enumerate(pairwise(groups), 1) if next_ != one + 1]
    for start, stop in pairwise([0, *cuts, len(groups)] if groups else []):
        yield groups[start], groups[stop - 1] + 1
