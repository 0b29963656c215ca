"""Where a streamed layer's rows lie between two steps: host memory, or an unnamed file. Written and read in groups.

A group is a run of whole rows of about GROUP_BYTES; so many groups are a chunk. A file's chunks have checksums here:
what is read is what was written, or CorruptSegment. Files are read past the page cache, whose copies would take a core
from the computation that they are read beside. Who has memory to spare for them gives it to the host tier.
"""

import errno
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
from qkv.offload.tier import PAGE, slab_bytes

GROUP_BYTES = 1 << 16
CHUNK_GROUPS = 16  # a checksum each: a reader that goes back to Python often waits for the interpreter each time


class Backing:
    """One layer's rows. Rows that were never written are not read: what `load` leaves there is of no meaning.

    `store` and `load` take memory that begins with the layer's rows. `load` may write to the rest of the last page.
    """

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self.group = max(1, GROUP_BYTES // row_bytes) * row_bytes
        self.written: dict[int, int] = {}  # by group: bytes, fewer where the layer's rows ended when it was written
        self._runs: list[tuple[int, int]] = []  # first and end, in bytes, of what was written
        self.bytes_read = self.bytes_written = 0

    def groups_of(self, rows: Iterable[int]) -> list[int]:
        return sorted({row * self.row_bytes // self.group for row in rows})

    def store(self, rows: memoryview, groups: list[int]) -> None:
        """Keep these groups of the layer's rows; all that was ever written stands in them. Raises OSError."""
        for first, end in _runs(groups):
            part = rows[first * self.group : min(end * self.group, len(rows))]
            self._put(part, first)
            self.bytes_written += len(part)
            for group in range(first, end):
                self.written[group] = min(self.group, len(rows) - group * self.group)
        self._runs = self._spans(sorted(self.written))

    def load(self, rows: memoryview, seconds: float) -> None:
        """Fill what was written of the layer's rows. Raises CorruptSegment, OSError (TimeoutError: late)."""
        deadline = monotonic() + seconds
        for begin, end in self._runs:
            self._get(rows, begin, end, deadline)
            self.bytes_read += end - begin

    @property
    def nbytes(self) -> int:
        """Held, wherever that is."""
        return sum(self.written.values())

    def _pieces(self, part: memoryview, first: int) -> Iterable[tuple[int, memoryview]]:
        """The groups, from `first` on, that a part consists of."""
        for at in range(0, len(part), self.group):
            yield first + at // self.group, part[at : at + self.group]

    def _spans(self, groups: list[int]) -> list[tuple[int, int]]:
        """First and end, in bytes, of runs of written groups. One that was written short ends its run."""
        spans: list[tuple[int, int]] = []
        for group in groups:
            begin = group * self.group
            end = begin + self.written[group]
            if spans and spans[-1][1] == begin:
                begin = spans.pop()[0]
            spans.append((begin, end))
        return spans

    def _put(self, part: memoryview, group: int) -> None:
        raise NotImplementedError

    def _get(self, rows: memoryview, begin: int, end: int, deadline: float) -> None:
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

    def _get(self, rows: memoryview, begin: int, end: int, deadline: float) -> None:
        for number, piece in self._pieces(rows[begin:end], begin // self.group):
            piece[:] = self._held[number][: len(piece)].data


class FileRows(Backing):
    """In a file without a name in `folder`: it is gone with the process, however that ends."""

    def __init__(self, row_bytes: int, folder: str, io: FileIO) -> None:
        super().__init__(row_bytes)
        self._io, self._path = io, os.path.join(folder, "qkv")
        self._sums: dict[int, bytes] = {}  # by chunk
        self._fd = _unnamed(io, folder)
        weakref.finalize(self, io.close, self._fd)
        self._size, self.direct = 0, self._open_direct()

    def drop_cached(self) -> None:
        """Have the kernel forget the file's pages."""
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def store(self, rows: memoryview, groups: list[int]) -> None:
        size = slab_bytes(min((max(groups) + 1) * self.group, len(rows))) if groups else 0
        if size > self._size:  # whole pages: no read past the page cache ends in half a one
            self._io.fallocate(self._fd, size)  # before anything is written: a full disk costs nothing that was there
            self._size = size
        super().store(rows, groups)
        for chunk in {group // CHUNK_GROUPS for group in groups}:
            self._sums[chunk] = self._sum(rows, chunk)

    def load(self, rows: memoryview, seconds: float) -> None:
        super().load(rows, seconds)
        for chunk, wanted in self._sums.items():
            if self._sum(rows, chunk) != wanted:
                at = chunk * CHUNK_GROUPS * self.group
                raise CorruptSegment(self._path, at, "spilled records do not match their checksum")

    def _sum(self, rows: memoryview, chunk: int) -> bytes:
        groups = range(chunk * CHUNK_GROUPS, (chunk + 1) * CHUNK_GROUPS)
        spans = self._spans([group for group in groups if group in self.written])
        return b"".join(checksum(rows[begin:end], None) for begin, end in spans)

    def _put(self, part: memoryview, group: int) -> None:
        write_from(self._io, self._fd, [part], group * self.group)

    def _get(self, rows: memoryview, begin: int, end: int, deadline: float) -> None:
        done = self._get_direct(rows, begin, end, deadline)
        if done is None:
            done = read_into(self._io, self._fd, [rows[begin:end]], begin, deadline)
        if done < end - begin:
            raise CorruptSegment(self._path, begin + done, "the file ends")

    def _get_direct(self, rows: memoryview, begin: int, end: int, deadline: float) -> int | None:
        """As many bytes from `begin` on as were read; whole pages were, around them. None: it cannot be done."""
        first = begin // PAGE * PAGE
        out = rows[first : slab_bytes(end)]
        if self.direct is None or len(out) % PAGE:
            return None
        try:
            return read_into(self._io, self.direct, [out], first, deadline) - (begin - first)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = None  # larger pages, memory that does not begin with one
            return None

    def _open_direct(self) -> int | None:
        try:
            direct = self._io.open_direct(self._fd)
        except OSError:  # not every file system can
            return None
        weakref.finalize(self, self._io.close, direct)
        return direct


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
