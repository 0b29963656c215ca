"""What a pool tells others: what a lookup would find, counts, and what happened to published blocks, in order."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

from qkv.errors import EventsLost

Kind = Literal["stored", "removed", "moved"]
Row = tuple[Kind, bytes, bytes, int, str, bytes, bytes]  # an Event without its number


@dataclass(frozen=True)
class Memory:
    """Bytes that a manager's tensors occupy, all layers and sequences.

    records, exact  on the device; total: their sum. host, disk: records that lie in those tiers
    """

    records: int
    exact: int
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.records + self.exact


@dataclass(frozen=True)
class Match:
    """What `acquire` would find now. Sink tokens count with the first block, as exact K and V on the device.

    bytes                 of the blocks hit
    seconds_to_recompute  prefill seconds that the blocks hit took when they were made
    seconds_left          estimate for `tokens_left`, at the mean rate of all blocks published so far
    """

    hit_tokens: Mapping[str, int]  # by tier
    tokens_left: int
    blocks: int
    bytes: int
    seconds_to_recompute: float
    seconds_left: float


@dataclass(frozen=True)
class Stats:
    """Blocks by state now (free, held, evictable and kept add up to capacity), and counts since the pool was made.

    kept        held by nobody, but pinned or continued by a block that is pinned or held
    refused     lookups or publications that met an equal key of other content
    duplicates  blocks not published because an equal one already was; over_quota: because the quota was used up
    regretted   evicted blocks that were asked for again while their key was remembered
    """

    capacity: int
    free: int
    held: int
    evictable: int
    kept: int
    published: int
    pinned: int
    queries: int
    query_tokens: int
    hit_tokens: int
    hit_blocks: int
    refused: int
    duplicates: int
    over_quota: int
    evictions: int
    regretted: int

    @property
    def hit_rate(self) -> float:
        """Share of all tokens asked for that were found."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


@dataclass(frozen=True)
class Usage:
    """What a manager holds now; what is shared counts once.

    tokens           in all sequences
    records, sink, tail  bytes in use, by sequences, checkpoints, or to be found again
    records_free, exact_free  bytes allocated for the next sequence
    slots, filled    token places in blocks and pieces in use, and how many hold a token
    """

    sequences: int
    checkpoints: int
    tokens: int
    records: int
    sink: int
    tail: int
    records_free: int
    exact_free: int
    slots: int
    filled: int

    @property
    def fragmentation(self) -> float:
        """Share of the places in use that hold nothing."""
        return 1 - self.filled / self.slots if self.slots else 0.0


class Cost(NamedTuple):
    """What closing a sequence now would give, and cost: bytes that only it holds, seconds that its tokens took."""

    bytes: int
    seconds: float


class Event(NamedTuple):
    """One change. Numbers rise by one, so a gap cannot go unseen.

    kind     stored: `key` can be found from now on; removed: no longer; moved: its records are in `tier` now
    parent   key of the block before it; for a first block, of the sink, or the namespace's root
    tokens   token ids as little-endian uint32
    """

    number: int
    kind: Kind
    key: bytes
    parent: bytes
    block_id: int
    tier: str
    namespace: bytes
    tokens: bytes


class EventLog:
    """The last `size` events. The owner's lock guards it."""

    def __init__(self, size: int) -> None:
        # plain tuples of everything but the number: quicker to make, and nothing for the garbage collector to walk
        self._ring: deque[Row] = deque(maxlen=size)
        self.next_number = 0

    def add(self, row: Row) -> None:
        self._ring.append(row)
        self.next_number += 1

    def since(self, number: int) -> list[Event]:
        """Events from `number` on. Raises EventsLost if some of them are gone, or if no such number was ever given."""
        oldest = self.next_number - len(self._ring)
        if not oldest <= number <= self.next_number:
            raise EventsLost(number, oldest, self.next_number)
        rows = islice(self._ring, number - oldest, None)
        return [Event(count, *row) for count, row in enumerate(rows, number)]
