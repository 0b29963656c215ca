"""The store's folder: what is where, who may write, and what is not touched.

    root/FORMAT  LOCK  index.db  tmp/  quarantine/  ns/<namespace>/<ab>/<name>.h5

Folders are 0700, files 0600. A folder that others can write to, a link, or somebody else's folder is refused.
"""

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator

from qkv.errors import InputError, StoreLocked
from qkv.offload.io import FileIO, sync_folder, write_from

FORMAT = b"qkv store 1\n"
SUFFIX = ".h5"


class Folder:
    """Opens, or makes, a store's folder. Raises InputError, StoreLocked, OSError."""

    def __init__(self, root: str, io: FileIO, readonly: bool) -> None:
        self.root, self.io, self.readonly = os.path.abspath(root), io, readonly
        self._lock: int | None = None
        self._prepare()
        if not readonly:
            self._lock = io.open(self.path("LOCK"), os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self.close()
                raise StoreLocked(self.root) from None
            for name in ("tmp", "quarantine", "ns"):
                self._folder(self.path(name))

    def close(self) -> None:
        """Let another process write."""
        if self._lock is not None:
            self.io.close(self._lock)
            self._lock = None

    def path(self, *parts: str) -> str:
        return os.path.join(self.root, *parts)

    def segment(self, namespace: str, name: str) -> str:
        """Where a segment lies."""
        return self.path("ns", namespace, name[:2], name + SUFFIX)

    def place(self, namespace: str, name: str) -> str:
        """As `segment`; its folder is there afterwards, durably."""
        for parts in (("ns", namespace), ("ns", namespace, name[:2])):
            self._folder(self.path(*parts))
        return self.segment(namespace, name)

    def remove(self, namespace: str, name: str) -> None:
        """Remove a segment, and folders that are empty without it."""
        path = self.segment(namespace, name)
        with contextlib.suppress(FileNotFoundError):
            self.io.unlink(path)
        with contextlib.suppress(OSError):  # not empty
            for _ in range(2):
                path = os.path.dirname(path)
                os.rmdir(path)

    def new(self) -> str:
        """A name for a file that is being written."""
        return self.path("tmp", f"{os.getpid()}.{secrets.token_hex(8)}")

    def clear_new(self) -> None:
        """Remove files that no writer finished; the lock says that nobody is writing."""
        for entry in os.scandir(self.path("tmp")):
            if entry.is_file(follow_symlinks=False):
                self.io.unlink(entry.path)

    def segments(self) -> Iterator[tuple[str, str]]:
        """(namespace, name) of every file that is named like a segment."""
        for namespace in _folders(self.path("ns")):
            for part in _folders(self.path("ns", namespace)):
                for entry in os.scandir(self.path("ns", namespace, part)):
                    name = entry.name.removesuffix(SUFFIX)
                    if entry.name.endswith(SUFFIX) and len(name) == 64 and name[:2] == part:
                        yield namespace, name

    def quarantined(self) -> list[str]:
        """Damaged files, oldest first."""
        found = [entry for entry in os.scandir(self.path("quarantine")) if entry.is_file(follow_symlinks=False)]
        return [entry.path for entry in sorted(found, key=lambda entry: (entry.stat().st_mtime, entry.name))]

    def other_bytes(self) -> int:
        """Bytes on the disk of all that is no segment: index, damaged and unfinished files, folders."""
        return self._usage(lambda folder: not folder.startswith(self.path("ns")))

    def disk_usage(self) -> int:
        """Bytes that everything in the folder takes on the disk, folders too."""
        return self._usage(lambda folder: True)

    def _usage(self, counts_files: Callable[[str], bool]) -> int:
        total = os.lstat(self.root).st_blocks * 512
        for folder, folders, files in os.walk(self.root):
            for name in (*folders, *(files if counts_files(folder) else ())):
                with contextlib.suppress(FileNotFoundError):  # a writer or SQLite took it away meanwhile
                    total += os.lstat(os.path.join(folder, name)).st_blocks * 512
        return total

    def _prepare(self) -> None:
        root = self.root
        try:
            found = os.lstat(root)
        except FileNotFoundError:
            if self.readonly:
                raise InputError(f"store {root}: there is none; open it for writing once") from None
            if not os.path.isdir(os.path.dirname(root)):
                raise InputError(f"store {root}: the folder it should lie in does not exist; make that first") from None
            self._folder(root)
            found = os.lstat(root)
        if stat.S_ISLNK(found.st_mode):
            raise InputError(f"store {root}: it is a symbolic link; give the folder itself")
        if not stat.S_ISDIR(found.st_mode):
            raise InputError(f"store {root}: it is not a folder")
        if found.st_mode & 0o022:
            raise InputError(f"store {root}: others can write to it; chmod 700 it, or give a folder of your own")
        if not self.readonly and not os.access(root, os.W_OK | os.X_OK):
            raise InputError(f"store {root}: it cannot be written; open it with readonly=True, or give another folder")
        self._hold_to_format(root)

    def _hold_to_format(self, root: str) -> None:
        path = self.path("FORMAT")
        said = b""
        if os.path.lexists(path):
            with open(path, "rb") as file:
                said = file.read(64)
        elif os.listdir(root):
            raise InputError(f"store {root}: it holds files and is no store of qkv; give an empty or new folder")
        if said == FORMAT:
            return
        if not FORMAT.startswith(said):  # a part of it, or nothing: whoever made this store did not come further
            raise InputError(f"store {root}: its FORMAT is {said!r}, this release reads {FORMAT!r}; nothing is touched")
        if self.readonly:
            raise InputError(f"store {root}: it is empty; open it for writing once")
        fd = self.io.open(path, os.O_WRONLY | os.O_CREAT)
        try:
            write_from(self.io, fd, [FORMAT], 0)
            self.io.fsync(fd)
        finally:
            self.io.close(fd)
        sync_folder(self.io, root)

    def _folder(self, path: str) -> None:
        try:
            self.io.mkdir(path)
        except FileExistsError:
            return
        sync_folder(self.io, os.path.dirname(path))


def _folders(path: str) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
