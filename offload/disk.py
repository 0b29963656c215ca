"""DiskStore: segments in a folder. One process writes, any number read; what it gives back is proven or nothing.

find     the longest checkpoint of these tokens: names, token ids and checksums of every head agree
put      what is new behind the blocks that are stored already, byte for byte the same
evict    leaf first, by seconds of prefill saved a byte and by last use, until the limit holds
"""

import contextlib
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from threading import RLock
from typing import Any

from qkv.errors import CorruptSegment, ForeignSegment, InputError, StoreFull
from qkv.offload.checkpoint import Found, Promise, behind, equal, fits, same_tokens
from qkv.offload.export import join
from qkv.offload.folder import Folder
from qkv.offload.header import Header, checksum
from qkv.offload.index import Entry, Index
from qkv.offload.io import FileIO, physical
from qkv.offload.segment import LayerBytes, Segment, create, discard, file_bytes, publish
from qkv.prefix import Prefix

OVERHEAD = 4 << 20  # of the limit, for what index and folders grow by before they are counted again
LEAST_LIMIT = 16 << 20
MOST_COMPARED = 4  # chains whose blocks are compared with new ones before they are stored once more


class DiskStore:
    """A store in `path`, which is made if it is not there. Thread-safe.

    limit     bytes on the disk that it never passes, index and damaged files included
    quota     of one namespace; None: the limit. floor: bytes that stay free on the file system
    key       16 to 64 secret bytes: everything is authenticated by it, and a store written with another is not read
    readonly  no lock, nothing is changed; else a second writer gets StoreLocked
    Raises InputError, StoreLocked, OSError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        limit: int = 50 << 30,
        *,
        quota: int | None = None,
        floor: int = 1 << 30,
        key: bytes | None = None,
        readonly: bool = False,
        io: FileIO | None = None,
    ) -> None:
        if key is not None and not 16 <= len(key) <= 64:
            raise InputError(f"store key: got {len(key)} bytes, wanted 16 to 64")
        for name, value, least in (("limit", limit, LEAST_LIMIT), ("quota", quota or 1, 1), ("floor", floor, 0)):
            if value < least:
                raise InputError(f"store {name}: got {value} bytes, wanted at least {least}")
        self.io, self.key, self.readonly = io or FileIO(), key, readonly
        self.limit, self.quota, self.floor = limit, quota, floor
        self.counts: Counter[str] = Counter()  # hits, misses, stored, same, evicted, corrupt, foreign, failed
        self._lock = RLock()
        self._folder = Folder(os.fspath(path), self.io, readonly)
        try:
            self._index = self._open_index()
            if not readonly:
                self._folder.clear_new()
                self._reconcile()
        except BaseException:
            self._folder.close()
            raise

    @property
    def path(self) -> str:
        return self._folder.root

    def close(self) -> None:
        """Let another process write. What was found stays readable."""
        with self._lock:
            self._index.close()
            self._folder.close()

    def __enter__(self) -> "DiskStore":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    # ---- reading ----

    def find(self, prefix: Prefix, deadline: float | None = None, left: int = 1) -> Found | None:
        """The longest stored checkpoint that leaves at least `left` tokens of `prefix` to compute; None: a miss.

        Damaged files are taken out of use and the search goes on; errors of the file system are misses. Counted.
        """
        namespace = prefix.namespace.root.hex()
        for blocks in range(len(prefix.keys), 0, -1):
            with self._lock:
                entries = self._index.ending(namespace, prefix.keys[blocks - 1].hex())
            for entry in entries:
                if entry.first + entry.blocks != blocks or not fits(entry, prefix, blocks, left):
                    continue
                found = self._chain(entry, prefix, blocks, deadline)
                if found is not None:
                    self.counts["hits"] += 1
                    self._use([segment.head.name for segment, _ in found.chain])
                    return found
        self.counts["misses"] += 1
        return None

    def promised(self, prefix: Prefix, left: int = 1) -> Promise | None:
        """What `find` would find if every file is whole. Reads the index only; changes and counts nothing."""
        namespace, space = prefix.namespace.root.hex(), prefix.namespace
        for blocks in range(len(prefix.keys), 0, -1):
            with self._lock:
                for entry in self._index.ending(namespace, prefix.keys[blocks - 1].hex()):
                    if entry.first + entry.blocks == blocks and fits(entry, prefix, blocks, left):
                        tokens = space.sink_tokens + blocks * space.block_tokens + entry.tail_tokens
                        size, seconds = entry.bytes, entry.seconds
                        while entry.parent and (above := self._index.get(entry.parent)) is not None:
                            entry = above
                            size, seconds = size + entry.bytes, seconds + entry.seconds
                        return Promise(tokens, blocks, size, seconds)
        return None

    def _chain(self, entry: Entry, prefix: Prefix, blocks: int, deadline: float | None) -> Found | None:
        """Open the entry and all it stands on, and prove them. None: something is missing or damaged."""
        chain: list[tuple[Segment, int]] = []
        end, seconds, tail = blocks, 0.0, entry.tail_tokens
        name = entry.name
        with contextlib.ExitStack() as opened:
            while name:
                segment = self._open(entry.namespace, name, deadline)
                if segment is None:
                    return None
                opened.callback(segment.close)
                header = segment.header
                count = end - header.first_block
                if not 0 <= count <= header.blocks or not same_tokens(header, prefix, count, tail if not chain else 0):
                    return None
                chain.insert(0, (segment, count))
                seconds += header.seconds * (count / header.blocks if header.blocks else 0.0)
                end, name = header.first_block, header.parent
            if end or chain[0][0].header.sink_tokens != prefix.namespace.sink_tokens:
                return None
            opened.pop_all()
        return Found(tuple(chain), blocks, tail, seconds)

    def _open(self, namespace: str, name: str, deadline: float | None = None) -> Segment | None:
        path = self._folder.segment(namespace, name)
        try:
            segment = Segment.open(path, key=self.key, io=self.io, deadline=deadline)
            if segment.head.name != name or segment.header.namespace != namespace:
                segment.close()
                raise CorruptSegment(path, 0, "it is not the file of that name")
            return segment
        except CorruptSegment:
            self.damaged(namespace, name)
        except ForeignSegment:
            self.counts["foreign"] += 1
            self._forget(name)
        except FileNotFoundError:
            self._forget(name)
        except OSError:
            self.counts["failed"] += 1
        return None

    def damaged(self, namespace: str, name: str) -> None:
        """Take a segment out of use: it goes to quarantine/, nobody finds it again. Counted; raises nothing."""
        self.counts["corrupt"] += 1
        if self.readonly:
            return
        self._forget(name)
        with contextlib.suppress(OSError):
            self.io.rename(self._folder.segment(namespace, name), self._folder.path("quarantine", f"{name}.h5"))

    def _forget(self, name: str) -> None:
        if not self.readonly:
            with self._lock, contextlib.suppress(sqlite3.Error):
                self._index.remove(name)

    def _use(self, names: list[str]) -> None:
        """What was used now starts above what was evicted last."""
        if self.readonly:
            return
        with self._lock, contextlib.suppress(sqlite3.Error):
            entries = [entry for entry in map(self._index.get, names) if entry is not None]
            inflation = self._index.inflation
            self._index.touch((entry.name, inflation + _worth(entry.seconds, entry.bytes)) for entry in entries)

    # ---- writing ----

    def put(self, prefix: Prefix, blocks: int, header: Header, layer: Callable[[int], LayerBytes]) -> str:
        """Store a checkpoint of `prefix`: its sink, first `blocks` blocks and tail. Returns the name of its segment.

        header: from `checkpoint.header_of`, all blocks in it; layer(number): that layer's bytes, asked for twice.
        Blocks that are stored already, byte for byte, are not stored again.
        Raises StoreFull, OSError; then nothing was stored. InputError: the store is open for reading only.
        """
        if self.readonly:
            raise InputError(f"store {self.path}: it is open for reading only")
        with self._lock:
            sums = [[checksum(part, self.key) for part in layer(number).parts()] for number in range(header.layers)]
            base = self._stored(prefix, blocks, header, sums)
            if base is not None and base[0] == blocks and (same := self._same_tail(prefix, header, sums, base[1])):
                self.counts["same"] += 1
                self._use([same])
                return same
            parent, first = (base[1][-1], base[0]) if base else ("", 0)
            part = behind(header, first, parent)

            def layers() -> Iterator[LayerBytes]:
                for number in range(header.layers):
                    whole = layer(number)
                    yield LayerBytes(whole.records[first:], b"" if first else whole.sink, whole.tail)

            self._make_room(part, base[1] if base else [])
            path = self._folder.new()
            head = create(self.io, path, part, layers(), self.key)
            target = self._folder.place(part.namespace, head.name)
            publish(self.io, path, target)
            size = file_bytes(self.io, target)
            self._index.add(head, size, self._index.inflation + _worth(part.seconds, size))
            self.counts["stored"] += 1
            return head.name

    def _stored(
        self, prefix: Prefix, blocks: int, header: Header, sums: list[list[bytes]]
    ) -> tuple[int, list[str]] | None:
        """The most blocks that a chain of segments holds with just these bytes, and the chain's names."""
        compared = 0
        for count in range(blocks, 0, -1):
            for name in self._index.holding(prefix.keys[count - 1]):
                entry = self._index.get(name)
                if entry is None or entry.namespace != header.namespace:
                    continue
                compared += 1
                if compared > MOST_COMPARED:
                    return None
                found = self._chain(entry._replace(tail_tokens=0), prefix, count, None)
                if found is None:
                    continue
                with contextlib.closing(found):
                    if equal(found, sums):
                        return count, [segment.head.name for segment, _ in found.chain]
        return None

    def _same_tail(self, prefix: Prefix, header: Header, sums: list[list[bytes]], chain: list[str]) -> str | None:
        """A segment that has this tail, byte for byte, behind this chain."""
        for entry in self._index.ending(header.namespace, header.end):
            if entry.tail_content != header.tail_content or chain[-1] not in (entry.name, entry.parent):
                continue
            segment = self._open(entry.namespace, entry.name)
            if segment is not None:
                with segment:
                    if all(held[-1] == own[-1] for held, own in zip(segment.head.sums, sums, strict=True)):
                        return entry.name
        return None

    def _make_room(self, header: Header, spared: list[str]) -> None:
        """Evict until a segment of this header fits limit, quota and floor. Raises StoreFull; then it cannot fit."""
        need = header.layers * header.extent + (1 << 20)  # and its head, generously
        damaged = iter(self._folder.quarantined())
        while self._over(need, header.namespace) and (path := next(damaged, None)) is not None:
            discard(self.io, path)
        while place := self._over(need, header.namespace):
            leaf = self._index.leaf(header.namespace if place == "quota" else None, spared)
            if leaf is None:
                raise StoreFull(need, self.quota if place == "quota" and self.quota else self.limit)
            self._evict(leaf)

    def _over(self, need: int, namespace: str) -> str:
        """Which bound `need` more bytes would pass; '': none."""
        if self._index.bytes() + self._folder.other_bytes() + need + OVERHEAD > self.limit:
            return "limit"
        if self.quota is not None and self._index.bytes(namespace) + need > self.quota:
            return "quota"
        disk = os.statvfs(self.path)
        return "floor" if disk.f_bavail * disk.f_frsize - need < self.floor else ""

    def _evict(self, entry: Entry) -> None:
        self._index.inflation = max(self._index.inflation, entry.priority)
        self._index.remove(entry.name)  # first, so that no row stands for a file that is gone
        self._folder.remove(entry.namespace, entry.name)
        self.counts["evicted"] += 1

    def remove(self, name: str) -> list[str]:
        """Remove a segment and all that stands on it; returns their names. Raises InputError, OSError."""
        with self._lock:
            entry = self._index.get(name)
            if entry is None:
                raise InputError(f"store {self.path}: no segment {name!r}; see `qkv store ls`")
            gone = [child for other in self._index.every() if other.parent == name for child in self.remove(other.name)]
            self._evict(entry)
            return [*gone, name]

    # ---- upkeep ----

    def entries(self) -> list[Entry]:
        """Every segment, the next one to go first."""
        with self._lock:
            return self._index.every()

    def segment(self, entry: Entry) -> Segment:
        """An entry's file, open; close it. Raises InputError where it cannot be had."""
        opened = self._open(entry.namespace, entry.name)
        if opened is None:
            raise InputError(f"store {self.path}: segment {entry.name} cannot be read; see `qkv store verify`")
        return opened

    def export(self, entry: Entry, path: str, progress: Callable[[int], None] = lambda done: None) -> int:
        """Write the entry and all it stands on to one new file, verified on the way. Returns its bytes.

        progress: told the bytes of each layer. Raises InputError (a part cannot be had), CorruptSegment, OSError.
        """
        with contextlib.ExitStack() as opened:
            chain = [opened.enter_context(self.segment(entry))]
            while parent := chain[0].header.parent:
                above = self._index.get(parent)
                if above is None:
                    raise InputError(f"store {self.path}: segment {parent}, on which {entry.name} stands, is gone")
                chain.insert(0, opened.enter_context(self.segment(above)))
            return join(self.io, chain, path, self.key, progress)

    def disk_usage(self) -> int:
        """Bytes that the whole folder takes on the disk."""
        return self._folder.disk_usage()

    def verify(self, progress: Callable[[int], None] = lambda done: None) -> tuple[int, list[str], list[str]]:
        """Read every byte of every segment. How many are whole; those put aside as damaged; those not readable here."""
        whole, bad, unread = 0, list[str](), list[str]()
        for entry in self.entries():
            corrupt = self.counts["corrupt"]
            try:
                segment = self._open(entry.namespace, entry.name)
                if segment is not None:
                    with segment:
                        segment.verify(progress)
                    whole += 1
                    continue
            except CorruptSegment:
                self.damaged(entry.namespace, entry.name)
            (bad if self.counts["corrupt"] > corrupt else unread).append(entry.name)
        return whole, bad, unread

    def collect(self) -> list[str]:
        """Remove damaged files, and segments whose parents are gone. Returns their names. Raises OSError."""
        with self._lock:
            gone = []
            for path in self._folder.quarantined():
                self.io.unlink(path)
                gone.append(os.path.basename(path).removesuffix(".h5"))
            entries = self._index.every()
            there = {entry.name for entry in entries}
            orphans = [entry for entry in entries if entry.parent and entry.parent not in there]
            for entry in orphans:
                if self._index.get(entry.name) is not None:
                    gone += self.remove(entry.name)
            return gone

    def shrink(self, limit: int) -> list[str]:
        """Evict, leaf first, until all takes at most `limit` bytes on the disk. Returns what went. Raises OSError."""
        with self._lock:
            gone = []
            while self.disk_usage() > limit and (leaf := self._index.leaf(None, [])) is not None:
                self._evict(leaf)
                gone.append(leaf.name)
            return gone

    def _open_index(self) -> Index:
        path = self._folder.path("index.db")
        try:
            return Index(path, self.readonly)
        except sqlite3.Error:
            if self.readonly:  # none yet, or one that cannot be read: look at the heads ourselves
                self._index = Index(None)
                self._adopt(set())
                return self._index
        for suffix in ("", "-wal", "-shm"):
            discard(self.io, path + suffix)
        return Index(path)

    def _reconcile(self) -> None:
        """Rows without a file go, files without a row come back."""
        files = set(self._folder.segments())
        held = {(entry.namespace, entry.name) for entry in self._index.every()}
        for _, name in held - files:
            self._index.remove(name)
        self._adopt(held)

    def _adopt(self, known: set[tuple[str, str]]) -> None:
        for namespace, name in self._folder.segments():
            if (namespace, name) not in known and (segment := self._open(namespace, name)) is not None:
                with segment:
                    size = physical(self.io.fstat(segment.fd))
                    self._index.add(segment.head, size, self._index.inflation + _worth(segment.header.seconds, size))


def _worth(seconds: float, size: int) -> float:
    """Seconds of prefill saved by each GiB kept."""
    return seconds / max(1, size) * 2**30
