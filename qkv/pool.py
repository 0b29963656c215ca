"""Block ids: who holds each, which may be found again by name, which goes first. Holds no tensors, imports no torch.

    free -> allocate -> held by 1 -> retain, acquire -> held by n -> release (n times) -> free
                          |                                             |
                          publish: found by its name from now on        `-> if published: evictable, until acquire
                                                                            revives it or its place is needed

A complete block is published under its key (qkv/prefix.py). qkv/index.py finds it again and proves the hit,
qkv/eviction.py says which one goes when its place is needed.

For one engine thread and any number of readers: one lock, short sections, nothing foreign is called under it.
"""

from collections import Counter, deque
from math import isfinite
from threading import Lock

from qkv.errors import OutOfBlocks, ShapeError, WrongBlock
from qkv.index import PrefixIndex
from qkv.prefix import Namespace, Prefix
from qkv.reports import Event, Match, Stats

EVENTS = 1 << 14  # events kept for readers


class BlockPool:
    """Ids 0 .. capacity-1 with reference counts, and an index of the published ones.

    limit        most ids; None: grows on demand and never evicts on its own
    quota        most published blocks of one namespace, held or not; None: no bound. See `set_quota`
    events       how many events are kept for readers; what: what the ids stand for, for errors
    block_bytes  bytes of one block in all layers, for `match`; set it when they are known
    Raises ShapeError.
    """

    def __init__(
        self, limit: int | None = None, *, quota: int | None = None, events: int = EVENTS, what: str = "blocks"
    ) -> None:
        for name, value in (("limit", limit), ("quota", quota), ("events", events)):
            if value is not None and value < 0:
                raise ShapeError(f"{name}: got {value}, wanted at least 0")
        self.limit, self.what = limit, what
        self.capacity = 0
        self.block_bytes = 0
        self._lock = Lock()
        self._references: list[int] = []
        self._free: deque[int] = deque()
        self._held = 0  # ids with a holder
        self._pins: dict[int, int] = {}
        self._index = PrefixIndex(self._free, quota, events)

    # ---- holders ----

    @property
    def num_free(self) -> int:
        """Ids that can be handed out without growing or evicting."""
        return len(self._free)

    @property
    def available(self) -> int | None:
        """Most ids that `allocate` could give now, evicting all it may; None: no bound."""
        with self._lock:
            if self.limit is None:
                return None
            return self.limit - self.capacity + len(self._free) + self._index.order.evictable

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def allocate(self, count: int) -> list[int]:
        """`count` ids, each held once: free ones, then new ones, then those of evicted blocks.

        Raises OutOfBlocks, ShapeError (negative); then nothing has changed and nothing is evicted.
        """
        if count < 0:
            raise ShapeError(f"allocate: got {count} blocks, wanted at least 0")
        with self._lock:
            missing = count - len(self._free)
            if missing > 0:
                room = None if self.limit is None else self.limit - self.capacity
                evictable = self._index.order.evictable
                if room is not None and missing > room + evictable:
                    raise OutOfBlocks(count, len(self._free) + room, evictable, self.what)
                # A prompt's blocks are counted exactly. Token by token, a little slack saves copying on every block.
                slack = max(missing, 2, self.capacity // 32) if count == 1 else missing
                self._grow(slack if room is None else min(slack, room))
                self._evict(count - len(self._free))
            ids = [self._free.popleft() for _ in range(count)]
            for block_id in ids:
                self._references[block_id] = 1
            self._held += count
        return ids

    def retain(self, ids: list[int]) -> None:
        """One more holder for each id. Raises WrongBlock for one that nobody holds; then nothing has changed."""
        with self._lock:
            self._need_held("retain", ids)
            for block_id in ids:
                self._references[block_id] += 1

    def release(self, ids: list[int]) -> None:
        """One holder fewer for each id. Without holders, a published block is evictable and any other is free.

        Raises WrongBlock for an id that nobody holds, or listed more often than held; then nothing has changed.
        """
        with self._lock:
            self._need_held("release", ids)
            let_go = []
            for done, block_id in enumerate(ids):
                if not self._references[block_id]:
                    for undo in ids[:done]:
                        self._references[undo] += 1
                    raise WrongBlock("release", block_id, "listed more often than held", "one holder for each mention")
                self._references[block_id] -= 1
                if not self._references[block_id]:
                    let_go.append(block_id)
            self._held -= len(let_go)
            order = self._index.order
            for block_id in let_go:
                if block_id in self._index.keys:
                    order.touch(block_id)
                    order.untie(block_id)
                else:
                    self._free.append(block_id)

    # ---- names ----

    def publish(self, prefix: Prefix, first: int, ids: list[int], seconds: float = 0.0) -> int:
        """Let blocks `first`, first+1, ... of a sequence be found; `ids` hold them, complete in every layer.

        `seconds`: prefill time of all of them together. Returns how many are found from now on that were not before.
        A block stays private if an equal one is published (those after it are published behind that one), and so do
        it and those after it if its key is taken by other content, if the quota is used up by blocks in use, or if the
        block before it is not published. Raises WrongBlock (not held, or published under another name), ShapeError;
        then nothing has changed.
        """
        if not 0 <= first <= first + len(ids) <= len(prefix.keys):
            raise ShapeError(f"publish: got blocks {first} to {first + len(ids)}, wanted 0 to {len(prefix.keys)}")
        if not (isfinite(seconds) and seconds >= 0):
            raise ShapeError(f"publish: got {seconds} seconds, wanted a time")
        with self._lock:
            self._need_held("publish", ids)
            names: dict[int, bytes] = {}
            for block_id, key in zip(ids, prefix.keys[first : first + len(ids)], strict=True):
                if names.setdefault(block_id, self._index.keys.get(block_id, key)) != key:
                    raise WrongBlock("publish", block_id, "published under another name", "a block without a name")
            return self._index.add(prefix, first, ids, seconds) if ids else 0

    def acquire(self, prefix: Prefix, most: int | None = None) -> list[int]:
        """The longest run of published blocks that `prefix` may use, from its first, each held once more. Counted.

        most: take no more than so many of them.
        """
        with self._lock:
            ids, refused = self._index.find(prefix)
            ids = ids[:most]
            for block_id in ids:
                if not self._references[block_id]:
                    self._index.order.tie(block_id)
                    self._held += 1
                self._references[block_id] += 1
            self._index.count_lookup(prefix, ids, refused)
        return ids

    def match(self, prefix: Prefix, most: int | None = None) -> Match:
        """What `acquire` would find. Changes nothing, not even recency or counts."""
        with self._lock:
            ids, _ = self._index.find(prefix, most)
            found = self._index.hit_tokens(prefix, ids)
            seconds = sum(self._index.order.seconds[block_id] for block_id in ids)
            a_block = self._index.seconds_a_block
        left = prefix.length - sum(found.values())
        size = len(ids) * self.block_bytes
        return Match(found, left, len(ids), size, seconds, a_block * left / prefix.namespace.block_tokens)

    def children(self, start: bytes) -> int:
        """Published first blocks that stand on this sink (`Prefix.start`). Its exact K and V must live while any do."""
        with self._lock:
            found = self._index.starts.get(start)
            return found.children if found else 0

    def named(self, prefix: Prefix, count: int) -> list[int]:
        """The published blocks among the first `count` of `prefix`, up to the first that is not. Changes nothing."""
        with self._lock:
            return self._index.find(prefix, count)[0]

    def watch(self, name: bytes) -> None:
        """Have the end of a published block, or of a start, told by `gone`. Nothing happens if it is not there."""
        with self._lock:
            if name in self._index.by_key or name in self._index.starts:
                self._index.watched.add(name)

    def gone(self) -> list[bytes]:
        """Watched names that have ended since the last call."""
        if not self._index.gone:
            return []
        with self._lock:
            names, self._index.gone = self._index.gone, []
        return names

    # ---- pressure ----

    def pin(self, ids: list[int]) -> None:
        """Keep these published blocks, and so what leads to them, until as many `unpin`. Raises WrongBlock.

        Pin what is held (`acquire` first): an id that nobody holds may name another block by the time of the call.
        """
        with self._lock:
            self._need_published("pin", ids)
            for block_id in ids:
                self._pins[block_id] = self._pins.get(block_id, 0) + 1
                if self._pins[block_id] == 1:
                    self._index.order.tie(block_id)

    def unpin(self, ids: list[int]) -> None:
        """Take back one `pin` for each mention. Raises WrongBlock if there are fewer; then nothing has changed."""
        with self._lock:
            self._need_published("unpin", ids)
            for block_id, count in Counter(ids).items():
                if self._pins.get(block_id, 0) < count:
                    raise WrongBlock("unpin", block_id, "pinned less often", "one pin for each mention")
            for block_id in ids:
                self._pins[block_id] -= 1
                if not self._pins[block_id]:
                    del self._pins[block_id]
                    self._index.order.untie(block_id)

    def evict(self, count: int) -> int:
        """Free up to `count` evictable blocks; returns how many. Raises ShapeError (negative)."""
        if count < 0:
            raise ShapeError(f"evict: got {count} blocks, wanted at least 0")
        with self._lock:
            return self._evict(min(count, self._index.order.evictable))

    def set_quota(self, namespace: Namespace, quota: int | None) -> None:
        """Most published blocks of this namespace. To publish beyond it, it gives up its own evictable blocks first.

        None: no bound. Raises ShapeError if it is negative or less than is published; then nothing has changed.
        """
        with self._lock:
            published = self._index.published.get(namespace.root, 0)
            if quota is not None and quota < published:
                raise ShapeError(f"quota: got {quota}, wanted at least {published}, the blocks published now")
            self._index.quotas[namespace.root] = quota

    # ---- what is told ----

    def move(self, ids: list[int], tier: str) -> None:
        """The records of these published blocks are in `tier` now. Raises WrongBlock; then nothing has changed."""
        with self._lock:
            self._need_published("move", ids)
            for block_id in ids:
                self._index.move(block_id, tier)

    def events(self, since: int = 0) -> list[Event]:
        """Events from number `since` on, oldest first. Raises EventsLost: start again from `snapshot`."""
        with self._lock:
            return self._index.log.since(since)

    def snapshot(self) -> tuple[int, list[Event]]:
        """The number to read `events` from, and every published block as a stored event, each behind its parent."""
        with self._lock:
            return self._index.log.next_number, self._index.snapshot()

    def stats(self) -> Stats:
        """Blocks by state, and counts since the pool was made."""
        with self._lock:
            free, evictable = len(self._free), self._index.order.evictable
            return Stats(
                capacity=self.capacity,
                free=free,
                held=self._held,
                evictable=evictable,
                kept=self.capacity - free - self._held - evictable,
                published=len(self._index.by_key),
                pinned=len(self._pins),
                **self._index.counts,
            )

    def check(self, holders: dict[int, int]) -> None:
        """Walk the whole state. `holders`: how many owners hold each id. AssertionError if anything disagrees."""
        with self._lock:
            assert self.limit is None or self.capacity <= self.limit
            assert len(self._references) == self.capacity
            free = set(self._free)
            assert len(free) == len(self._free), "an id is free twice"
            assert free | holders.keys() | self._index.keys.keys() <= set(range(self.capacity)), "an unknown id is used"
            for block_id, count in enumerate(self._references):
                held = holders.get(block_id, 0)
                assert count == held, f"block {block_id}: counted {count}, held {held}"
                is_free = count == 0 and block_id not in self._index.keys
                assert is_free == (block_id in free), f"block {block_id}: disagrees with the free list"
            owned = {block_id for block_id, count in enumerate(self._references) if count}
            assert self._held == len(owned), f"{self._held} held counted, {len(owned)} found"
            assert self._pins.keys() <= self._index.keys.keys(), "a pin on nothing"
            assert all(count > 0 for count in self._pins.values()), "an empty pin"
            self._index.check(owned, set(self._pins))

    # ---- inside; the lock is held ----

    def _need_held(self, verb: str, ids: list[int]) -> None:
        for block_id in ids:
            if not 0 <= block_id < self.capacity:
                raise WrongBlock(verb, block_id, "unknown", f"0 to {self.capacity - 1}")
            if not self._references[block_id]:
                found = "held by nobody" if block_id in self._index.keys else "free"
                raise WrongBlock(verb, block_id, found, "a block that is held")

    def _need_published(self, verb: str, ids: list[int]) -> None:
        for block_id in ids:
            if block_id not in self._index.keys:
                raise WrongBlock(verb, block_id, "not published", "a published block")

    def _evict(self, count: int) -> int:
        """Free `count` blocks; that many are evictable."""
        for _ in range(count):
            found = self._index.evict()
            assert found, "an evictable block is missing in the order"
        return count

    def _grow(self, count: int) -> None:
        self._free.extend(range(self.capacity, self.capacity + count))
        self._references.extend([0] * count)
        self._index.order.grow(count)
        self.capacity += count
