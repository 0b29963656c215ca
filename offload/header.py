"""What a segment says about itself, and the bytes it says it in. Nothing is parsed before its checksum agrees.

    0       prologue: magic, version, kind of checksum, sizes, digest of all bytes before the data
    64      JSON, then token ids (uint32), block keys (32 bytes each), checksums (16 bytes each): of every part, and of
            all of a layer's records together
    user    HDF5 metadata (offload/hdf5.py)
    data    layer 0 | layer 1 | ...       each: summaries, records, sink, tail, zeros to the extent's end

Checksums are xxh3-128, against accidents; with a key they are keyed BLAKE2b, against tampering too.
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

import xxhash

from qkv.errors import CorruptSegment, ForeignSegment
from qkv.offload.hdf5 import PAGE, metadata
from qkv.offload.io import Buffer

MAGIC = b"qkv\x00seg\n"
VERSION = 1
PLAIN, KEYED = 0, 1
PROLOGUE = struct.Struct("<8sHHIQQ16s16x")  # magic, version, kind, header bytes, data offset, file bytes, digest
MOST_HEADER = 1 << 28
SUM_BYTES = 16
KEY_BYTES = 32
DIGEST_AT = 32
assert PROLOGUE.size == 64


@dataclass(frozen=True)
class Header:
    """One file: `blocks` consecutive blocks of a prefix in every layer, with exact tokens before and behind them.

    namespace     root of the names (qkv/prefix.py), hex
    parent        name of the segment whose blocks come before, hex; "": it begins with the sink
    end           name of the last block, here or in a parent, hex
    first_block   blocks of the prefix that come before, in parents; keys: names of this file's blocks
    tokens        ids of its sink, blocks and tail, little-endian uint32
    tail_content  SHA-256 of what stands in the tail (Prefix.tail)
    record_bytes, sink_bytes, tail_bytes, summary_bytes  one number a layer; summary_bytes is of one block, and 0 so far
    seconds       of prefill that its blocks took
    about         the namespace's fields but for its salt, JSON; `namespace` decides
    """

    namespace: str
    parent: str
    end: str
    first_block: int
    sink_tokens: int
    tail_tokens: int
    tail_content: str
    record_bytes: tuple[int, ...]
    sink_bytes: tuple[int, ...]
    tail_bytes: tuple[int, ...]
    summary_bytes: tuple[int, ...]
    seconds: float
    created_by: str
    about: str
    keys: tuple[bytes, ...]
    tokens: bytes

    @property
    def blocks(self) -> int:
        return len(self.keys)

    @property
    def layers(self) -> int:
        return len(self.record_bytes)

    def parts(self, layer: int) -> list[int]:
        """Sizes of what follows one another in a layer's extent: summaries, each record, sink, tail."""
        records = [self.record_bytes[layer]] * self.blocks
        return [self.summary_bytes[layer] * self.blocks, *records, self.sink_bytes[layer], self.tail_bytes[layer]]

    @cached_property
    def extent(self) -> int:
        """Bytes of every layer's part of the data: whole pages."""
        return -(-max(sum(self.parts(layer)) for layer in range(self.layers)) // PAGE) * PAGE


@dataclass(frozen=True)
class Head:
    """A header, its file's checksums, and where the data begins. name: digest of all of it.

    sums: by layer and part. runs: by layer, of all its records as one; a reader that takes them all need not go back to
    the interpreter, and wait for it, after each.
    """

    header: Header
    sums: tuple[tuple[bytes, ...], ...]
    runs: tuple[bytes, ...]
    kind: int
    data_offset: int
    name: str

    @property
    def file_bytes(self) -> int:
        return self.data_offset + self.header.layers * self.header.extent


def checksum(data: Buffer, key: bytes | None) -> bytes:
    """16 bytes."""
    if key is None:
        return xxhash.xxh3_128_digest(data)
    return hashlib.blake2b(data, digest_size=SUM_BYTES, key=key).digest()


def checksum_of(parts: Sequence[Buffer], key: bytes | None) -> bytes:
    """As `checksum`, of buffers that follow one another."""
    made = xxhash.xxh3_128() if key is None else hashlib.blake2b(digest_size=SUM_BYTES, key=key)
    for part in parts:
        made.update(part)
    return made.digest()


def encode(
    header: Header, sums: tuple[tuple[bytes, ...], ...], runs: tuple[bytes, ...], key: bytes | None
) -> tuple[Head, bytes]:
    """The head, and the bytes before the data."""
    plain = {name: value for name, value in asdict(header).items() if name not in ("keys", "tokens")}
    text = json.dumps({**plain, "blocks": header.blocks, "ids": len(header.tokens) // 4}, sort_keys=True).encode()
    flat = b"".join(part for layer in (*sums, runs) for part in layer)
    body = struct.pack("<I", len(text)) + text + header.tokens + b"".join(header.keys) + flat
    size = PROLOGUE.size + len(body)
    user = PAGE
    while user < size:
        user *= 2
    hdf5 = metadata(user, header.layers, header.extent)
    offset = user + len(hdf5)
    kind = PLAIN if key is None else KEYED
    total = offset + header.layers * header.extent
    rest = body + bytes(user - size) + hdf5
    data = PROLOGUE.pack(MAGIC, VERSION, kind, size, offset, total, bytes(SUM_BYTES)) + rest
    data = data[:DIGEST_AT] + checksum(data, key) + data[DIGEST_AT + SUM_BYTES :]
    return Head(header, sums, runs, kind, offset, _name(data)), data


def prologue(path: str, data: bytes, file_bytes: int) -> tuple[int, int]:
    """Where the data begins, and the kind of checksum, from a file's first 64 bytes.

    Raises ForeignSegment (not a segment, or of another version), CorruptSegment (sizes that cannot be).
    """
    if data[: len(MAGIC)] != MAGIC:
        raise ForeignSegment(path, "not a segment of qkv")
    if len(data) < PROLOGUE.size:
        raise CorruptSegment(path, len(data), "the file ends")
    _, version, kind, size, offset, total, _ = PROLOGUE.unpack(data[: PROLOGUE.size])
    if version != VERSION:
        raise ForeignSegment(path, f"segment version {version}; this release reads {VERSION}")
    if kind not in (PLAIN, KEYED) or not PROLOGUE.size < size <= offset <= min(total, MOST_HEADER):
        raise CorruptSegment(path, 8, "its sizes cannot be")
    if total != file_bytes:
        raise CorruptSegment(path, min(total, file_bytes), f"it has {file_bytes} bytes, its head says {total}")
    return offset, kind


def decode(path: str, data: bytes, key: bytes | None) -> Head:
    """The head, from all bytes before the data.

    Raises CorruptSegment, ForeignSegment (written with a key and none given, or the other way round).
    """
    _, _, kind, size, offset, total, digest = PROLOGUE.unpack(data[: PROLOGUE.size])
    if (kind == KEYED) != (key is not None):
        held = "with a key" if kind == KEYED else "without a key"
        raise ForeignSegment(path, f"written {held}; open the store {held}")
    if checksum(data[:DIGEST_AT] + bytes(SUM_BYTES) + data[DIGEST_AT + SUM_BYTES :], key) != digest:
        raise CorruptSegment(path, 0, "its head does not match its checksum")
    try:
        header, sums, runs = _body(data[PROLOGUE.size : size])
        head = Head(header, sums, runs, kind, offset, _name(data))
        fits = head.file_bytes == total
    except (KeyError, TypeError, ValueError, IndexError, struct.error) as error:
        raise CorruptSegment(path, PROLOGUE.size, f"its head cannot be read ({error!r})") from error
    if not fits:
        raise CorruptSegment(path, PROLOGUE.size, "its head and its sizes disagree")
    return head


def _body(body: bytes) -> tuple[Header, tuple[tuple[bytes, ...], ...], tuple[bytes, ...]]:
    (length,) = struct.unpack_from("<I", body)
    plain: dict[str, Any] = json.loads(body[4 : 4 + length])
    blocks, ids = plain.pop("blocks"), plain.pop("ids")
    at = 4 + length
    tokens, at = body[at : at + 4 * ids], at + 4 * ids
    keys, at = _cut(body[at : at + KEY_BYTES * blocks], KEY_BYTES), at + KEY_BYTES * blocks
    if set(plain) != {field.name for field in fields(Header)} - {"keys", "tokens"}:
        raise ValueError("unknown or missing fields")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    header = Header(**values, keys=keys, tokens=tokens)
    each = _cut(body[at:], SUM_BYTES)
    parts = blocks + 3
    of_parts = parts * header.layers
    if len(keys) != blocks or len(tokens) != 4 * ids or len(each) != of_parts + header.layers:
        raise ValueError("its tables have other lengths than it says")
    sums = tuple(each[first : first + parts] for first in range(0, of_parts, parts))
    return header, sums, each[of_parts:]


def _cut(data: bytes, size: int) -> tuple[bytes, ...]:
    return tuple(data[at : at + size] for at in range(0, len(data), size))


def _name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
