"""Every error qkv raises on purpose.

    QkvError
    |-- FormatError(ValueError)      unknown format, values a format cannot hold, a model a format cannot serve
    |-- ShapeError(ValueError)       wrong shape, dtype or device; wrong length or order of calls
    |-- InputError(ValueError)       a document, question or option a user gave that cannot be used
    |-- SequenceClosed               use of a sequence after close
    |-- OutOfBlocks                  no block left: (needed, free, evictable)
    |-- WrongBlock                   a block id in a state that the call cannot serve: (verb, block_id, found, wanted)
    |-- EventsLost                   events that are no longer kept: (asked, oldest, next_number)
    |-- CorruptSegment               a stored file's bytes are not those that were written: (path, offset)
    |-- ForeignSegment               a stored file is not ours to read: another program's, version or key: (path)
    |-- StoreLocked                  another process writes to this store: (path)
    |-- StoreFull                    no room in the store, even after evicting all that may go: (needed, limit)
    |-- LayerLost                    a layer's stored bytes could not be had in time; compute the tokens again: (layer)
    |-- ModelNotFound                no such model, or its weights cannot be had
    |-- UnsupportedModel             a kind of attention qkv cannot serve: (reason)
    `-- BackendUnavailable           no implementation of an op here: (op, tried)

A message says what, got, wanted, and what to do. `assert` is kept for our own invariants.
"""


class QkvError(Exception):
    """Root of the tree."""


class FormatError(QkvError, ValueError):
    """A format is unknown, or cannot encode these values."""


class ShapeError(QkvError, ValueError):
    """A tensor or a length does not fit the call."""


class InputError(QkvError, ValueError):
    """A document, question or option cannot be used."""


class SequenceClosed(QkvError):
    """A sequence was used after `close`."""


class OutOfBlocks(QkvError):
    """The pool is full; every sequence is as it was before the call."""

    def __init__(self, needed: int, free: int, evictable: int, what: str = "blocks") -> None:
        self.needed, self.free, self.evictable = needed, free, evictable
        super().__init__(
            f"out of {what}: needed {needed}, free {free}, evictable {evictable}; "
            "close a sequence, or give the manager a larger num_blocks or budget"
        )


class WrongBlock(QkvError):
    """A block id is unknown, or free where it should be held; the pool is as it was before the call."""

    def __init__(self, verb: str, block_id: int, found: str, wanted: str) -> None:
        self.verb, self.block_id, self.found, self.wanted = verb, block_id, found, wanted
        super().__init__(f"{verb}: block {block_id} is {found}, wanted {wanted}; use what allocate or acquire gave")


class EventsLost(QkvError):
    """A reader of events fell too far behind, or asks for what has not happened."""

    def __init__(self, asked: int, oldest: int, next_number: int) -> None:
        self.asked, self.oldest, self.next_number = asked, oldest, next_number
        super().__init__(
            f"events from {asked} on are not kept; got {oldest} to {next_number - 1}; start again from snapshot()"
        )


class CorruptSegment(QkvError):
    """A stored file is damaged. The store takes it out of use; what it held is computed again."""

    def __init__(self, path: str, offset: int, what: str) -> None:
        self.path, self.offset = path, offset
        super().__init__(f"{path}: at byte {offset} {what}; it is not used, and its tokens are computed again")


class ForeignSegment(QkvError):
    """A file in a store that this release, or this key, cannot read. It is left alone."""

    def __init__(self, path: str, what: str) -> None:
        self.path = path
        super().__init__(f"{path}: {what}; left alone")


class StoreLocked(QkvError):
    """A second writer; the first one is not disturbed."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"store {path}: another process writes to it; open it with readonly=True, or wait for that one"
        )


class StoreFull(QkvError):
    """Nothing was stored; the store is as it was, but for what was evicted to make room."""

    def __init__(self, needed: int, limit: int) -> None:
        self.needed, self.limit = needed, limit
        super().__init__(f"store: {needed} bytes do not fit in {limit}; raise the limit, or free space on the disk")


class LayerLost(QkvError):
    """Stored bytes of a layer are damaged or late. The sequence that needs them is closed; open it again."""

    def __init__(self, layer: int, why: str) -> None:
        self.layer = layer
        super().__init__(f"layer {layer} could not be loaded: {why}; open the sequence again, its tokens are computed")


class ModelNotFound(QkvError):
    """A model is not known, or its weights cannot be had here."""


class UnsupportedModel(QkvError):
    """The model's attention is of a kind qkv cannot serve."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"unsupported model: {reason}")


class BackendUnavailable(QkvError):
    """No implementation of an op fits this device, dtype or machine."""

    def __init__(self, op: str, tried: str) -> None:
        self.op, self.tried = op, tried
        super().__init__(f"no implementation of {op} is available here; tried {tried}")
