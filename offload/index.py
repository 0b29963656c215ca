"""The store's index: what lies where and what may go first. Derived from the segments' heads: losing it costs a scan.

SQLite, one writer, any number of readers. A row is added behind its file and removed before it, so the index may lag
behind the files, and a file without a row is found again.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from qkv.offload.header import Head

_SCHEMA = """
CREATE TABLE IF NOT EXISTS segments (
    name TEXT PRIMARY KEY, namespace TEXT NOT NULL, parent TEXT NOT NULL, end TEXT NOT NULL, first INTEGER NOT NULL,
    blocks INTEGER NOT NULL, tail_tokens INTEGER NOT NULL, tail_content TEXT NOT NULL, bytes INTEGER NOT NULL,
    seconds REAL NOT NULL, priority REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_end ON segments (namespace, end);
CREATE INDEX IF NOT EXISTS by_parent ON segments (parent);
CREATE INDEX IF NOT EXISTS by_priority ON segments (priority);
CREATE TABLE IF NOT EXISTS blocks (
    key BLOB NOT NULL, name TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (key, name)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_name ON blocks (name);
CREATE TABLE IF NOT EXISTS numbers (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID;
"""
_COLUMNS = "name, namespace, parent, end, first, blocks, tail_tokens, tail_content, bytes, seconds, priority"


class Entry(NamedTuple):
    """One segment. first: blocks of its prefix that lie in parents; priority: the lowest leaf goes first."""

    name: str
    namespace: str
    parent: str
    end: str
    first: int
    blocks: int
    tail_tokens: int
    tail_content: str
    bytes: int
    seconds: float
    priority: float


class Index:
    """path: of the database; None: in memory. Not thread-safe; the store's lock guards it. Raises sqlite3.Error."""

    def __init__(self, path: str | None, readonly: bool = False) -> None:
        target = ":memory:" if path is None else f"file:{path}?mode={'ro' if readonly else 'rwc'}"
        self._db = sqlite3.connect(
            target, uri=path is not None, check_same_thread=False, isolation_level=None, timeout=5
        )
        if path is not None and not readonly:
            os.chmod(path, 0o600)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA wal_autocheckpoint=128")
            self._db.execute("PRAGMA journal_size_limit=1048576")
        if path is not None:
            found = self._db.execute("PRAGMA quick_check").fetchone()
            if found[0] != "ok":
                raise sqlite3.DatabaseError(found[0])
        if readonly:
            self._db.execute("SELECT 1 FROM segments LIMIT 1")  # an empty file is a database too
        else:
            self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def add(self, head: Head, size: int, priority: float) -> None:
        """A segment that is in place. `size`: its bytes on the disk."""
        h = head.header
        row = (
            head.name, h.namespace, h.parent, h.end, h.first_block, h.blocks, h.tail_tokens, h.tail_content, size,
            h.seconds, priority,
        )  # fmt: skip
        with self._transaction():
            self._db.execute(f"INSERT OR REPLACE INTO segments ({_COLUMNS}) VALUES ({', '.join('?' * len(row))})", row)
            blocks = [(key, head.name, h.first_block + place) for place, key in enumerate(h.keys)]
            self._db.executemany("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?)", blocks)

    def remove(self, name: str) -> None:
        """Forget a segment."""
        with self._transaction():
            self._db.execute("DELETE FROM segments WHERE name = ?", (name,))
            self._db.execute("DELETE FROM blocks WHERE name = ?", (name,))

    def get(self, name: str) -> Entry | None:
        return self._one("WHERE name = ?", (name,))

    def every(self, namespace: str | None = None) -> list[Entry]:
        """All segments, or those of one namespace, lowest priority first."""
        where, values = ("WHERE namespace = ?", (namespace,)) if namespace is not None else ("", ())
        return self._many(f"{where} ORDER BY priority, name", values)

    def ending(self, namespace: str, end: str) -> list[Entry]:
        """Segments whose tail stands behind this block."""
        return self._many("WHERE namespace = ? AND end = ? ORDER BY tail_tokens DESC, name", (namespace, end))

    def holding(self, key: bytes) -> list[str]:
        """Names of segments that hold this block."""
        return [row[0] for row in self._db.execute("SELECT name FROM blocks WHERE key = ? ORDER BY name", (key,))]

    def touch(self, names: Iterable[tuple[str, float]]) -> None:
        """New priorities."""
        with self._transaction():
            self._db.executemany("UPDATE segments SET priority = ? WHERE name = ?", [(p, name) for name, p in names])

    def leaf(self, namespace: str | None, spared: Iterable[str]) -> Entry | None:
        """The segment to evict: of those that no other one stands on, the one with the lowest priority."""
        marks = list(spared)
        where = "WHERE NOT EXISTS (SELECT 1 FROM segments AS child WHERE child.parent = segments.name)"
        where += f" AND name NOT IN ({', '.join('?' * len(marks))})" if marks else ""
        where += " AND namespace = ?" if namespace is not None else ""
        values = (*marks, *([namespace] if namespace is not None else []))
        return self._one(f"{where} ORDER BY priority, name LIMIT 1", values)

    def bytes(self, namespace: str | None = None) -> int:
        """On the disk, of all segments or of one namespace's."""
        where, values = ("WHERE namespace = ?", (namespace,)) if namespace is not None else ("", ())
        total: int = self._db.execute(f"SELECT COALESCE(SUM(bytes), 0) FROM segments {where}", values).fetchone()[0]
        return total

    @property
    def inflation(self) -> float:
        """The priority of what was evicted last: what is used now starts above it, so age shows without a clock."""
        found = self._db.execute("SELECT value FROM numbers WHERE name = 'inflation'").fetchone()
        return float(found[0]) if found else 0.0

    @inflation.setter
    def inflation(self, value: float) -> None:
        self._db.execute("INSERT OR REPLACE INTO numbers VALUES ('inflation', ?)", (value,))

    def _one(self, where: str, values: Iterable[object]) -> Entry | None:
        found = self._many(where, values)
        return found[0] if found else None

    def _many(self, where: str, values: Iterable[object]) -> list[Entry]:
        return [Entry(*row) for row in self._db.execute(f"SELECT {_COLUMNS} FROM segments {where}", tuple(values))]
