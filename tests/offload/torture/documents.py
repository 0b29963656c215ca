"""Documents of made-up bytes for a store: what a name stands for can be computed again and compared."""

import contextlib
import random
from typing import NamedTuple

from qkv.offload.checkpoint import Found, Sizes, header_of
from qkv.offload.disk import DiskStore
from qkv.offload.segment import LayerBytes
from qkv.prefix import Namespace, Prefix

LAYERS, BLOCK, SINK, TAIL = 3, 128, 64, 70
SPACE = Namespace("w", ((2, 16, "float32"),) * LAYERS, "kivi2", 1, BLOCK, SINK)


class Document(NamedTuple):
    """Number `number`: every third one goes on where the one before it ends. record: bytes of one block's record."""

    number: int
    record: int = 2048

    @property
    def blocks(self) -> int:
        return 2 + self.number % 3 + (Document(self.number - 1).blocks if self._goes_on else 0)

    @property
    def _goes_on(self) -> bool:
        return self.number % 3 == 2

    def tokens(self) -> list[int]:
        before = Document(self.number - 1).tokens()[:-TAIL] if self._goes_on else []
        length = SINK + self.blocks * BLOCK + TAIL
        return before + random.Random(self.number).choices(range(1, 50_000), k=length - len(before))

    def prefix(self) -> Prefix:
        """Its tokens and one more."""
        return Prefix(SPACE, [*self.tokens(), 7], tail_tokens=BLOCK)

    def layer(self, layer: int) -> LayerBytes:
        """Bytes that depend on all that the run before them saw."""
        prefix = self.prefix()
        records = [self._bytes(key, layer, self.record) for key in prefix.keys[: self.blocks]]
        return LayerBytes(
            records, self._bytes(prefix.keys[0], 100 + layer, 96), self._bytes(prefix.keys[self.blocks - 1], 7, 80)
        )

    @staticmethod
    def _bytes(key: bytes, salt: int, size: int) -> bytes:
        return random.Random(key + bytes([salt])).randbytes(size)

    def put(self, store: DiskStore) -> str:
        sizes = Sizes((self.record,) * LAYERS, (96,) * LAYERS, (80,) * LAYERS)
        header = header_of(self.prefix(), self.blocks, TAIL, sizes, 1.0 + self.number % 5)
        return store.put(self.prefix(), self.blocks, header, self.layer)

    def holds(self, found: Found) -> bool:
        """Whether what was found is this document, byte for byte. Raises what reading raises."""
        with contextlib.closing(found):
            return all(self._read(found, layer) == self.layer(layer).parts() for layer in range(LAYERS))

    def _read(self, found: Found, layer: int) -> list[bytes]:
        sink, tail = bytearray(96), bytearray(80)
        records: list[bytes] = []
        for place, (segment, count) in enumerate(found.chain):
            rows = bytearray(count * self.record)
            last = place == len(found.chain) - 1
            segment.read_layer(layer, rows, sink=None if place else sink, tail=tail if last else None)
            records += [bytes(rows[at : at + self.record]) for at in range(0, len(rows), self.record)]
        return [b"", *records, bytes(sink), bytes(tail)]
