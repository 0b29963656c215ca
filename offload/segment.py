"""A segment: one immutable file. Written once, head last, so a file without its head is none; read at known offsets.

It knows bytes, checksums and one file; which file serves whom is the store's business (offload/disk.py). No libhdf5, no
mmap, no pickle on the way in. Nothing read counts before its checksum agrees: on a raise the buffers hold rubbish.
"""

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from qkv.errors import CorruptSegment, ForeignSegment, ShapeError
from qkv.offload.header import PROLOGUE, Head, Header, checksum, checksum_of, decode, encode, prologue
from qkv.offload.io import Buffer, FileIO, physical, read_into, sync_folder, write_from

FIRST_READ = 1 << 16  # most heads fit: one call
GAP_BYTES = 1 << 16  # read over a gap up to this long rather than start another read


class Want(NamedTuple):
    """So many parts of a layer, from `first` on, to be read into one buffer."""

    first: int
    parts: int
    out: memoryview


class LayerBytes(NamedTuple):
    """One layer in host memory: a buffer a block, and the exact tokens' (empty: this file has none)."""

    records: Sequence[Buffer]
    sink: Buffer = b""
    tail: Buffer = b""

    def parts(self) -> list[memoryview]:
        """As a file has them: summaries (none yet), records, sink, tail."""
        return [memoryview(part).cast("B") for part in (b"", *self.records, self.sink, self.tail)]


def create(io: FileIO, path: str, header: Header, layers: Iterable[LayerBytes], key: bytes | None = None) -> Head:
    """Write a new file, readable by its owner only, and make its bytes durable; its name is not, see `publish`.

    layers: one for each layer of the header, taken one at a time. Whatever fails, no file stays.
    Raises OSError, ShapeError (sizes other than the header's).
    """
    none = tuple((bytes(16),) * (header.blocks + 3) for _ in range(header.layers))
    empty = encode(header, none, (bytes(16),) * header.layers, key)[
        0
    ]  # where the data begins does not depend on the checksums
    fd = io.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        try:
            io.fallocate(fd, empty.file_bytes)
            sums, runs, at = [], [], empty.data_offset
            for number, layer in enumerate(layers):
                parts, wanted = layer.parts(), header.parts(number)
                if [len(part) for part in parts] != wanted:
                    raise ShapeError(f"layer {number}: got parts of {[len(p) for p in parts]} bytes, wanted {wanted}")
                sums.append(tuple(checksum(part, key) for part in parts))
                runs.append(checksum_of(parts[1:-2], key))
                write_from(io, fd, [*parts, bytes(header.extent - sum(wanted))], at)
                at += header.extent
            if len(sums) != header.layers:
                raise ShapeError(f"segment: got {len(sums)} layers, wanted {header.layers}")
            head, data = encode(header, tuple(sums), tuple(runs), key)
            write_from(io, fd, [data], 0)
            io.fsync(fd)  # if this fails, what the disk holds is unknown: the file goes, and nobody tries again
            return head
        finally:
            io.close(fd)
    except BaseException:
        discard(io, path)
        raise


def publish(io: FileIO, path: str, target: str) -> bool:
    """Give a created file its final name, durably. False: that name was taken, by the same bytes. `path` is gone after.

    Raises OSError; then the final name may be there or not, and stands for the whole file if it is.
    """
    try:
        io.link(path, target)
        made = True
    except FileExistsError:
        made = False
    finally:
        discard(io, path)
    sync_folder(io, os.path.dirname(target))
    return made


def discard(io: FileIO, path: str) -> None:
    """Remove a file that nothing refers to, if that is possible now; else the next writer clears it away."""
    try:
        io.unlink(path)
    except OSError:
        return


@dataclass(frozen=True)
class Segment:
    """An open segment. Thread-safe: reads share nothing. Close it, or use it in a `with`."""

    path: str
    head: Head
    fd: int
    io: FileIO
    key: bytes | None

    @classmethod
    def open(
        cls, path: str, *, key: bytes | None = None, io: FileIO | None = None, deadline: float | None = None
    ) -> "Segment":
        """Open a file and check its length and all of its head.

        deadline: of `monotonic()`. Raises CorruptSegment, ForeignSegment, OSError (TimeoutError: late).
        """
        io = io or FileIO()
        fd = io.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe of that name must not hold us up
        try:
            found = io.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise ForeignSegment(path, "not a regular file")
            first = _exactly(io, fd, path, 0, min(FIRST_READ, found.st_size), deadline)
            offset, _ = prologue(path, first[: PROLOGUE.size], found.st_size)
            more = _exactly(io, fd, path, len(first), max(0, offset - len(first)), deadline)
            return cls(path, decode(path, (first + more)[:offset], key), fd, io, key)
        except BaseException:
            io.close(fd)
            raise

    @property
    def header(self) -> Header:
        return self.head.header

    def read_layer(
        self,
        layer: int,
        records: Buffer,
        first: int = 0,
        *,
        sink: Buffer | None = None,
        tail: Buffer | None = None,
        deadline: float | None = None,
    ) -> int:
        """Read records `first`, first+1, ... of a layer into `records`, as many as fit; its exact tokens if asked for.

        Buffers are writable. Returns the bytes read from the file. Raises CorruptSegment, ShapeError (another size),
        OSError.
        """
        blocks, out = self.header.blocks, memoryview(records).cast("B")
        if not 0 <= first <= blocks:
            raise ShapeError(f"layer {layer}: got first record {first}, wanted 0 to {blocks}")
        count = len(out) // self.header.record_bytes[layer]
        wants = [Want(1 + first, min(count, blocks - first), out)] if len(out) else []
        for part, buffer in ((blocks + 1, sink), (blocks + 2, tail)):
            if buffer is not None:
                wants.append(Want(part, 1, memoryview(buffer).cast("B")))
        return self._read(layer, wants, deadline)

    def verify(self, progress: Callable[[int], None] = lambda done: None) -> int:
        """Read the whole data and check every byte; the head was checked by `open`. Returns the bytes read.

        progress: told the bytes of each layer when it is done. Raises CorruptSegment, OSError.
        """
        total = 0
        for layer in range(self.header.layers):
            scratch = memoryview(bytearray(self.header.extent))
            wants, at = [], 0
            for part, size in enumerate(self.header.parts(layer)):
                wants.append(Want(part, 1, scratch[at : at + size]))
                at += size
            total += self._read(layer, wants, None, scratch[at:])
            if checksum_of([want.out for want in wants[1:-2]], self.key) != self.head.runs[layer]:
                raise CorruptSegment(self.path, 0, f"layer {layer}: its records and their common checksum disagree")
            progress(self.header.extent)
        return total

    def close(self) -> None:
        self.io.close(self.fd)

    def __enter__(self) -> "Segment":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _read(
        self,
        layer: int,
        wants: list[Want],
        deadline: float | None,
        zeros: memoryview | None = None,
    ) -> int:
        """Fill parts of a layer, in rising order, in as few calls as gaps allow; then check each.

        zeros: the extent's end, read behind the last part and looked at.
        """
        sizes, starts = self.header.parts(layer), [self.head.data_offset + layer * self.header.extent]
        for size in sizes:
            starts.append(starts[-1] + size)
        total, run, begin, end = 0, list[memoryview](), 0, -1
        for part, count, out in wants:
            wanted = starts[part + count] - starts[part]
            if len(out) != wanted:
                raise ShapeError(f"layer {layer}, part {part}: got a buffer of {len(out)} bytes, wanted {wanted}")
            if run and starts[part] - end > GAP_BYTES:
                total += self._fill(run, begin, deadline)
                run = []
            if not run:
                begin = end = starts[part]
            if starts[part] > end:
                run.append(memoryview(bytearray(starts[part] - end)))
            run.append(out)
            end = starts[part] + len(out)
        total += self._fill([*run, *([zeros] if zeros is not None else [])], begin, deadline)
        for want in wants:
            self._check(layer, want, starts)
        if zeros is not None and zeros.tobytes().count(0) != len(zeros):
            raise CorruptSegment(self.path, end, f"layer {layer} does not end in zeros")
        return total

    def _check(self, layer: int, want: Want, starts: list[int]) -> None:
        """Raises CorruptSegment, with the first part that is damaged."""
        first, count, out = want
        if (first, count) == (1, self.header.blocks) and checksum(out, self.key) == self.head.runs[layer]:
            return
        for part in range(first, first + count):
            bytes_ = out[starts[part] - starts[first] : starts[part + 1] - starts[first]]
            if checksum(bytes_, self.key) != self.head.sums[layer][part]:
                raise CorruptSegment(self.path, starts[part], f"layer {layer}, part {part} does not match its checksum")

    def _fill(self, buffers: list[memoryview], offset: int, deadline: float | None) -> int:
        wanted = sum(map(len, buffers))
        done = read_into(self.io, self.fd, buffers, offset, deadline)
        if done < wanted:
            raise CorruptSegment(self.path, offset + done, "the file ends")
        return done


def file_bytes(io: FileIO, path: str) -> int:
    """What a file takes on the disk. Raises OSError."""
    fd = io.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return physical(io.fstat(fd))
    finally:
        io.close(fd)


def _exactly(io: FileIO, fd: int, path: str, offset: int, size: int, deadline: float | None) -> bytes:
    data = bytearray(size)
    count = read_into(io, fd, [memoryview(data)], offset, deadline)
    if count < size:
        raise CorruptSegment(path, offset + count, "the file ends")
    return bytes(data)
