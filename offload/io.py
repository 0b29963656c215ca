"""The only door to files of the store: what a test can make fail, be late, or forget.

Every method is one system call, retried where the kernel was interrupted; helpers below loop until all bytes are there.
"""

import os
from collections.abc import Sequence
from time import monotonic

Buffer = bytes | bytearray | memoryview
MOST_VECTORS = 512  # buffers a call; the kernel takes 1,024
WRITE_BYTES = 1 << 26  # a call


class FileIO:
    """System calls by name. Subclasses in tests record them, fail them or delay them."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """A descriptor that no child inherits; a symbolic link is refused (ELOOP)."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)

    def open_direct(self, fd: int) -> int:
        """A second descriptor of an open file, for reading past the page cache in whole pages."""
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def fallocate(self, fd: int, size: int) -> None:
        """Have the file system promise the room, so that a full disk shows before anything is written."""
        os.posix_fallocate(fd, 0, size)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def mkdir(self, path: str) -> None:
        os.mkdir(path, 0o700)


def read_into(io: FileIO, fd: int, buffers: Sequence[memoryview], offset: int, deadline: float | None = None) -> int:
    """Fill the buffers one after another from `offset` on; returns the bytes read, fewer only at the file's end.

    deadline: of `monotonic()`, looked at between calls. Raises OSError, TimeoutError.
    """
    left, done = [part for part in buffers if len(part)], 0
    while left:
        if deadline is not None and monotonic() > deadline:
            raise TimeoutError(f"reading took longer than its deadline, {done} bytes in")
        try:
            count = io.preadv(fd, left[:MOST_VECTORS], offset + done)
        except InterruptedError:
            continue
        if not count:
            break
        done += count
        left = _behind(left, count)
    return done


def write_from(io: FileIO, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Write all of the buffers one after another from `offset` on; returns their length. Raises OSError."""
    left = [part for part in (memoryview(buffer).cast("B") for buffer in buffers) if len(part)]
    done = 0
    while left:
        try:
            count = io.pwritev(fd, _at_most(left, WRITE_BYTES), offset + done)
        except InterruptedError:
            continue
        if not count:
            raise OSError("the file system took no byte")
        done += count
        left = _behind(left, count)
    return done


def sync_folder(io: FileIO, path: str) -> None:
    """Make the names in a folder durable. Raises OSError."""
    fd = io.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        io.fsync(fd)
    finally:
        io.close(fd)


def physical(found: os.stat_result) -> int:
    """Bytes that a file takes on the disk."""
    return found.st_blocks * 512


def _behind(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers after their first `count` bytes."""
    for index, part in enumerate(buffers):
        if count < len(part):
            return [part[count:], *buffers[index + 1 :]]
        count -= len(part)
    return []


def _at_most(buffers: list[memoryview], size: int) -> list[memoryview]:
    taken = []
    for part in buffers[:MOST_VECTORS]:
        taken.append(part[:size])
        size -= len(taken[-1])
        if not size:
            break
    return taken
