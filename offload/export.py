"""A chain of segments as one file of its own: the checkpoint that its last segment stands for."""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from qkv.offload.header import Header
from qkv.offload.io import FileIO
from qkv.offload.segment import LayerBytes, Segment, create, publish


def joined(chain: Sequence[Segment]) -> Header:
    """The header of one file with what the whole chain has. A segment gives the blocks before the next one's first."""
    headers = [segment.header for segment in chain]
    first, last = headers[0], headers[-1]
    keys: tuple[bytes, ...] = ()
    tokens, seconds = b"", 0.0
    for header, after in zip(headers, [*headers[1:], None], strict=True):
        count = header.blocks if after is None else after.first_block - header.first_block
        of_block = (len(header.tokens) // 4 - header.sink_tokens - header.tail_tokens) // max(1, header.blocks)
        held = header.sink_tokens + count * of_block + (header.tail_tokens if after is None else 0)
        keys, tokens = keys + header.keys[:count], tokens + header.tokens[: 4 * held]
        seconds += header.seconds * (count / header.blocks if header.blocks else 0.0)
    return replace(
        last,
        parent="",
        first_block=0,
        sink_tokens=first.sink_tokens,
        sink_bytes=first.sink_bytes,
        seconds=seconds,
        keys=keys,
        tokens=tokens,
    )


def join(io: FileIO, chain: Sequence[Segment], path: str, key: bytes | None, progress: Callable[[int], None]) -> int:
    """Write the chain to a new file. Returns its bytes. Raises CorruptSegment, OSError; then there is no file."""
    header = joined(chain)
    counts = [after.header.first_block - one.header.first_block for one, after in itertools.pairwise(chain)]

    def layers() -> Iterator[LayerBytes]:
        for layer in range(header.layers):
            records: list[memoryview] = []
            sink, tail = bytearray(header.sink_bytes[layer]), bytearray(header.tail_bytes[layer])
            for segment, count in zip(chain, [*counts, chain[-1].header.blocks], strict=True):
                size = segment.header.record_bytes[layer]
                mine = memoryview(bytearray(count * size))
                segment.read_layer(
                    layer, mine, sink=sink if segment is chain[0] else None, tail=tail if segment is chain[-1] else None
                )
                records += [mine[at : at + size] for at in range(0, len(mine), size)]
            yield LayerBytes(records, sink, tail)
            progress(header.extent)

    return write_file(io, path, header, layers(), key)


def write_file(io: FileIO, path: str, header: Header, layers: Iterable[LayerBytes], key: bytes | None = None) -> int:
    """A segment under a name that somebody chose: written beside it, then moved there, durably. Returns its bytes.

    Raises OSError (FileExistsError: the name is taken); then nothing has changed.
    """
    path = os.path.abspath(path)  # its folder has a name then
    if os.path.lexists(path):
        raise FileExistsError(17, "the file exists", path)
    beside = f"{path}.{os.getpid()}.part"
    head = create(io, beside, header, layers, key)
    if not publish(io, beside, path):
        raise FileExistsError(17, "the file exists", path)
    return head.file_bytes
