"""One checkpoint in a file of its own, with the `find` and `put` of a store. What is wrong with the file is raised."""

import os
from collections import Counter
from collections.abc import Callable

from qkv.offload.checkpoint import Found, Promise, content, same_tokens
from qkv.offload.export import write_file
from qkv.offload.header import Header
from qkv.offload.io import FileIO
from qkv.offload.segment import LayerBytes, Segment
from qkv.prefix import Prefix


class OneFile:
    """A file made by `put`, or by `qkv store export`. key: as for DiskStore."""

    readonly = False

    def __init__(self, path: str, *, key: bytes | None = None, io: FileIO | None = None) -> None:
        self.path, self.key, self.io = os.path.abspath(path), key, io or FileIO()
        self.counts: Counter[str] = Counter()

    def header(self) -> Header:
        """What the file says of itself. Raises CorruptSegment, ForeignSegment, OSError."""
        with Segment.open(self.path, key=self.key, io=self.io) as segment:
            return segment.header

    def find(self, prefix: Prefix, deadline: float | None = None, left: int = 1) -> Found | None:
        """The file, if it stands for the first tokens of `prefix`, `left` or more behind it; else None.

        Raises CorruptSegment, ForeignSegment, OSError.
        """
        segment = Segment.open(self.path, key=self.key, io=self.io, deadline=deadline)
        header, blocks = segment.header, segment.header.blocks
        space = prefix.namespace
        tokens = space.sink_tokens + blocks * space.block_tokens + header.tail_tokens
        if (
            header.namespace == space.root.hex()
            and not header.parent
            and header.sink_tokens == space.sink_tokens
            and tokens + left <= prefix.length
            and same_tokens(header, prefix, blocks, header.tail_tokens)
            and header.tail_content == content(prefix, blocks, header.tail_tokens)
        ):
            return Found(((segment, blocks),), blocks, header.tail_tokens, header.seconds)
        segment.close()
        return None

    def promised(self, prefix: Prefix, left: int = 1) -> Promise | None:
        """Never anything: one file is not looked for by name."""
        return None

    def put(self, prefix: Prefix, blocks: int, header: Header, layer: Callable[[int], LayerBytes]) -> str:
        """Make the file. Returns its path. Raises OSError (FileExistsError: it is there); then nothing has changed."""
        write_file(self.io, self.path, header, map(layer, range(header.layers)), self.key)
        return self.path

    def damaged(self, namespace: str, name: str) -> None:
        """It is the user's file: nothing is moved."""
        self.counts["corrupt"] += 1
