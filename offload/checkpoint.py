"""What a segment says of a run of tokens: made from its names, and held against them."""

import hashlib
from dataclasses import dataclass, replace
from typing import NamedTuple

from qkv.offload.header import Header
from qkv.offload.index import Entry
from qkv.offload.segment import Segment
from qkv.prefix import TOKEN_BYTES, Prefix

CREATED_BY = "qkv 0.1.0"


class Sizes(NamedTuple):
    """Bytes by layer: of one record, of the exact sink, of the exact tail."""

    records: tuple[int, ...]
    sink: tuple[int, ...]
    tail: tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """A stored checkpoint. chain: open segments from the first block on, and how many blocks each gives.

    The last segment has the tail, the first one the sink. Close it.
    """

    chain: tuple[tuple[Segment, int], ...]
    blocks: int
    tail_tokens: int
    seconds: float

    @property
    def last(self) -> Header:
        return self.chain[-1][0].header

    @property
    def bytes(self) -> int:
        """That a load reads, heads not counted."""
        sides = sum(self.chain[0][0].header.sink_bytes) + sum(self.last.tail_bytes)
        return sides + sum(count * sum(segment.header.record_bytes) for segment, count in self.chain)

    def close(self) -> None:
        for segment, _ in self.chain:
            segment.close()


class Promise(NamedTuple):
    """What the index says of a checkpoint: tokens and blocks, bytes of its files, seconds of prefill they stand for."""

    tokens: int
    blocks: int
    bytes: int
    seconds: float


def content(prefix: Prefix, blocks: int, tail_tokens: int) -> str:
    return hashlib.sha256(prefix.tail(blocks, tail_tokens)).hexdigest()


def header_of(prefix: Prefix, blocks: int, tail_tokens: int, sizes: "Sizes", seconds: float) -> Header:
    """The header of a whole checkpoint: sink, the first `blocks` blocks, tail. seconds: of prefill that it took."""
    space = prefix.namespace
    return Header(
        namespace=space.root.hex(),
        parent="",
        end=prefix.keys[blocks - 1].hex() if blocks else "",
        first_block=0,
        sink_tokens=space.sink_tokens,
        tail_tokens=tail_tokens,
        tail_content=content(prefix, blocks, tail_tokens),
        record_bytes=sizes.records,
        sink_bytes=sizes.sink,
        tail_bytes=sizes.tail,
        summary_bytes=(0,) * len(sizes.records),
        seconds=seconds,
        created_by=CREATED_BY,
        about=space.told(),
        keys=tuple(prefix.keys[:blocks]),
        tokens=ids_of(prefix, 0, blocks, tail_tokens),
    )


def ids_of(prefix: Prefix, first: int, end: int, tail_tokens: int) -> bytes:
    """Token ids of blocks first to end; of the sink if they begin there; of the tail behind `end`."""
    space = prefix.namespace
    sink = prefix.sink[: space.sink_tokens * TOKEN_BYTES] if not first else b""
    blocks = b"".join(content[: space.block_tokens * TOKEN_BYTES] for content in prefix.contents[first:end])
    return sink + blocks + prefix.tail(end, tail_tokens)[: tail_tokens * TOKEN_BYTES]


def same_tokens(header: Header, prefix: Prefix, count: int, tail_tokens: int) -> bool:
    """Whether names and token ids of the first `count` blocks are those of `prefix`, and the tail's if asked."""
    first = header.first_block
    if list(header.keys[:count]) != prefix.keys[first : first + count]:
        return False
    if tail_tokens:
        return header.tail_tokens == tail_tokens and header.tokens == ids_of(prefix, first, first + count, tail_tokens)
    return header.tokens.startswith(ids_of(prefix, first, first + count, 0))


def behind(header: Header, first: int, parent: str) -> Header:
    """What is left of a whole checkpoint's header behind its first `first` blocks, which `parent` has."""
    if not first:
        return header
    every = len(header.tokens) // TOKEN_BYTES
    block = (every - header.sink_tokens - header.tail_tokens) // header.blocks
    before = header.sink_tokens + first * block
    return replace(
        header,
        parent=parent,
        first_block=first,
        sink_tokens=0,
        sink_bytes=(0,) * header.layers,
        seconds=header.seconds * (every - before) / every,
        keys=header.keys[first:],
        tokens=header.tokens[before * TOKEN_BYTES :],
    )


def fits(entry: Entry, prefix: Prefix, blocks: int, left: int) -> bool:
    """Whether the entry's tail stands behind `blocks` blocks of `prefix`, and `left` tokens or more behind it."""
    held = prefix.namespace.sink_tokens + blocks * prefix.namespace.block_tokens + entry.tail_tokens
    return held + left <= prefix.length and content(prefix, blocks, entry.tail_tokens) == entry.tail_content


def equal(found: Found, sums: list[list[bytes]]) -> bool:
    """Whether stored blocks, and the sink they stand on, have just these checksums."""
    for layer, own in enumerate(sums):
        first = found.chain[0][0]
        if first.head.sums[layer][first.header.blocks + 1] != own[-2]:
            return False
        held = [part for segment, count in found.chain for part in segment.head.sums[layer][1 : 1 + count]]
        if held != own[1 : 1 + len(held)]:
            return False
    return True
