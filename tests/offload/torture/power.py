"""power.py FOLDER PUTS [files | folders]: a writer's file operations are recorded; the power fails after each.

What a crash may leave: of a file, its bytes at the last fsync and any of the writes behind it, whole or in part; of a
folder, its names at its last fsync and any of the changes behind it. That is weaker than what file systems in use keep.
The index is SQLite's own business: it is missing, older, newer, or torn. Prints one JSON object.
files, folders: their fsyncs do nothing; what is looked for must show then.
"""

import json
import os
import random
import shutil
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path

from documents import Document

from qkv.errors import StoreFull
from qkv.offload.disk import DiskStore
from qkv.offload.io import FileIO

QUOTA = 1_400_000
INDEX = ("index.db", "index.db-wal", "index.db-shm")


@dataclass
class File:
    """A file's bytes that are safe, and writes that are not: (offset, data), or (size, None) for a length."""

    safe: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    def after(self, rng: random.Random) -> bytes:
        data = bytearray(self.safe)
        for offset, written in self.pending:
            if rng.random() < 0.5:
                continue
            if written is not None and rng.random() < 0.3:
                written = written[: rng.randrange(len(written) + 1)]
            end = offset + len(written or b"")
            data.extend(bytes(max(0, end - len(data))))
            if written is not None:
                data[offset:end] = written
        return bytes(data)


class Recorder(FileIO):
    """Does what it is told, and keeps account of what is safe. Serial numbers name files, paths name folders."""

    def __init__(self, root: str, broken: str = "") -> None:
        self.root, self.broken = root, broken
        self.files: list[File] = []
        self.serials: dict[int, int] = {}  # by inode number, which the file system gives away again
        self.safe: dict[str, dict[str, int | None]] = {}  # folder: name -> serial; None: a folder
        self.pending: dict[str, list[tuple[str, int | None, bool]]] = {}  # folder: (name, serial, there)
        self.opened: dict[int, tuple[str, int]] = {}
        self.moment = lambda: None  # called after every operation

    def _name(self, path: str, serial: int | None, there: bool) -> None:
        self.pending.setdefault(os.path.dirname(path), []).append((os.path.basename(path), serial, there))
        self.moment()

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
        fd = super().open(path, flags, mode)
        inode = os.fstat(fd).st_ino
        if new:
            self.serials[inode] = len(self.files)
            self.files.append(File())
            self._name(path, self.serials[inode], True)
        self.opened[fd] = path, self.serials.get(inode, -1)
        return fd

    def pwritev(self, fd: int, buffers: object, offset: int) -> int:
        done = super().pwritev(fd, buffers, offset)  # type: ignore[arg-type]
        self.files[self.opened[fd][1]].pending.append((offset, _bytes(fd, self.opened[fd][0])[offset : offset + done]))
        self.moment()
        return done

    def fallocate(self, fd: int, size: int) -> None:
        super().fallocate(fd, size)
        self.files[self.opened[fd][1]].pending.append((size, None))
        self.moment()

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        path, serial = self.opened[fd]
        folder = stat.S_ISDIR(os.fstat(fd).st_mode)
        if self.broken == ("folders" if folder else "files"):
            return
        if folder:
            names = self.safe.setdefault(path, {})
            for name, number, there in self.pending.pop(path, []):
                names[name] = number
                if not there:
                    del names[name]
        else:
            self.files[serial] = File(bytearray(_bytes(fd, path)))
        self.moment()

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        self._name(target, self.serials[os.stat(target).st_ino], True)

    def unlink(self, path: str) -> None:
        serial = self.serials.get(os.lstat(path).st_ino, -1)
        super().unlink(path)
        self._name(path, serial, False)

    def rename(self, source: str, target: str) -> None:
        serial = self.serials[os.lstat(source).st_ino]
        super().rename(source, target)
        self._name(source, serial, False)
        self._name(target, serial, True)

    def mkdir(self, path: str) -> None:
        super().mkdir(path)
        self._name(path, None, True)

    def crash(self, to: str, rng: random.Random) -> None:
        """What the disk may hold if the power fails now."""
        shutil.rmtree(to, ignore_errors=True)
        self._folder(self.root, to, rng)

    def _folder(self, folder: str, to: str, rng: random.Random) -> None:
        os.mkdir(to, 0o700)
        names = dict(self.safe.get(folder, {}))
        for name, serial, there in self.pending.get(folder, []):
            if rng.random() < 0.5:
                names[name] = serial
                if not there:
                    del names[name]
        for name, serial in names.items():
            if name in INDEX:
                continue
            if serial is None:
                self._folder(os.path.join(folder, name), os.path.join(to, name), rng)
            else:
                Path(to, name).write_bytes(self.files[serial].after(rng))


def _bytes(fd: int, path: str) -> bytes:
    """Of an open file, whatever it was opened for; `path` still names it."""
    assert os.fstat(fd).st_ino == os.stat(path).st_ino
    return Path(path).read_bytes()


class Writer(DiskStore):
    """Knows what it has promised: what `put` has returned and nothing has evicted."""

    def _evict(self, entry):  # type: ignore[no-untyped-def]
        self.promised.pop(entry.name, None)
        super()._evict(entry)


def look(crashed: Path, promised: dict[str, int]) -> dict[str, int]:
    """Open what the crash left."""
    with DiskStore(crashed, quota=QUOTA, floor=0) as store:
        whole, bad, unread = store.verify()
        lost = wrong = 0
        for number in promised.values():
            found = store.find(Document(number).prefix())
            lost += found is None
            wrong += found is not None and not Document(number).holds(found)
        return {
            "whole": whole,
            "damaged": len(bad) + len(unread),
            "lost": lost,
            "wrong": wrong,
            "promised": len(promised),
        }


def main(folder: Path, puts: int, broken: str = "") -> dict[str, int]:
    path, crashed = folder / "store", folder / "crashed"
    rng, total = random.Random(puts), {"states": 0}
    recorder = Recorder(str(path), broken)
    recorder.safe[str(folder)] = {"store": None}
    indexes: list[dict[str, bytes]] = [{}]
    promised: dict[str, int] = {}

    def moment() -> None:
        recorder.crash(str(crashed), rng)
        held = {name: (path / name).read_bytes() for name in INDEX if (path / name).exists()}
        if held != indexes[-1]:
            indexes.append(held)
        for name, data in rng.choice([indexes[-1], rng.choice(indexes), {}]).items():
            (crashed / name).write_bytes(data if rng.random() < 0.7 else data[: rng.randrange(len(data) + 1)])
        for name, count in look(crashed, promised).items():
            total[name] = total.get(name, 0) + count
        total["states"] += 1

    recorder.moment = moment
    Writer.promised = promised  # type: ignore[attr-defined]
    with Writer(path, quota=QUOTA, floor=0, io=recorder) as store:
        for _ in range(puts):
            number = rng.randrange(60)
            try:
                promised[Document(number).put(store)] = number
            except StoreFull:
                total["full"] = total.get("full", 0) + 1
            if rng.random() < 0.1 and (entries := store.entries()):
                entry = rng.choice(entries)
                promised.pop(entry.name, None)  # and what stands on it cannot be found either
                for child in store.entries():
                    if child.parent == entry.name:
                        promised.pop(child.name, None)
                store.damaged(entry.namespace, entry.name)
    return total


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])))
