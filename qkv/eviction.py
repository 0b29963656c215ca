"""Which published block goes first. Knows ids and their order, not who holds them.

Leaf first: a block goes only after the published blocks that continue it. Among leaves the lowest `clock + seconds`
goes, where `seconds` is the prefill time that the block saves (all blocks of a pool have the same bytes, so it is also
the order of seconds per byte) and `clock` rises to what the last evicted block had. This is GreedyDual (Young 1994; Cao
and Irani 1997): dear blocks stay longer but not for ever, and where all cost the same it is least recently used.
"""

from array import array
from heapq import heapify, heappop, heappush

NONE = -1  # in place of a block id
Rank = tuple[float, int, int]  # priority, stamp, block id: the lowest goes first


class EvictionOrder:
    """Counts evictable blocks (those without ties) and hands out their leaves, least valuable first.

    A block's ties are the reasons to keep it: it is held; it is pinned; each child that has ties itself.
    There is a heap for all blocks, and one for each namespace under `watch`. Heaps keep stale entries, skip them on the
    way out and drop them when they are the most part: O(log n) amortised. The owner's lock guards it.

    State is in columns by block id, because the garbage collector would walk a million objects again and again.
    """

    def __init__(self) -> None:
        self.evictable = 0
        self.clock = 0.0
        self.up = array("q")  # the block before it, or NONE
        self.children = array("q")  # published blocks that continue it
        self.ties = array("q")
        self.seconds = array("d")
        self._priority = array("d")  # this and the next are set when the last holder lets go
        self._stamp = array("q")
        self._last_stamp = 0
        self._leaves: dict[int, Rank] = {}  # evictable blocks without children
        self._all: list[Rank] = []
        self._watched: dict[bytes, list[Rank]] = {}  # by root
        self._watched_by: dict[int, bytes] = {}  # block -> root, for blocks of a namespace under watch

    def grow(self, count: int) -> None:
        """Room for `count` more ids."""
        for column in (self.up, self.children, self.ties, self._stamp):
            column.frombytes(bytes(8 * count))
        for times in (self.seconds, self._priority):
            times.frombytes(bytes(8 * count))

    def attach(self, block: int, up: int, seconds: float, root: bytes) -> None:
        """A newly published block, held: it keeps the one before it."""
        self.up[block], self.children[block], self.ties[block], self.seconds[block] = up, 0, 1, seconds
        if root in self._watched:
            self._watched_by[block] = root
        if up != NONE:
            self.children[up] += 1
            self.tie(up)

    def detach(self, block: int) -> None:
        """Take away a block without children, with or without ties."""
        up = self.up[block]
        self._watched_by.pop(block, None)
        if self.ties[block]:
            self.untie(up)
        else:
            self.evictable -= 1
            del self._leaves[block]
        if up != NONE:
            self.children[up] -= 1
            if not self.children[up] and not self.ties[up]:
                self._push(up)

    def touch(self, block: int) -> None:
        """The block's last holder lets go now: what counts as its last use."""
        self._last_stamp += 1
        self._stamp[block], self._priority[block] = self._last_stamp, self.clock + self.seconds[block]

    def tie(self, block: int) -> None:
        """One more reason to keep the block, and so all before it. O(1) where the one before it has ties already."""
        while block != NONE:
            self.ties[block] += 1
            if self.ties[block] > 1:
                return
            self.evictable -= 1
            self._leaves.pop(block, None)
            block = self.up[block]

    def untie(self, block: int) -> None:
        """One reason fewer. Without any the block is evictable, and is no reason to keep the one before it."""
        while block != NONE:
            self.ties[block] -= 1
            if self.ties[block]:
                return
            self.evictable += 1
            if not self.children[block]:
                self._push(block)
            block = self.up[block]

    def pop(self, root: bytes | None = None) -> int:
        """The evictable leaf that goes first, of all blocks or of a namespace under watch; NONE if there is none.

        The caller detaches it.
        """
        heap = self._all if root is None else self._watched[root]
        while heap:
            rank = heappop(heap)
            if self._leaves.get(rank[2]) == rank:
                self.clock = max(self.clock, rank[0])
                return rank[2]
        return NONE

    def watch(self, root: bytes, blocks: list[int]) -> None:
        """Keep an order of this namespace's own; `blocks` are those that it has published."""
        self._watched[root] = sorted(self._leaves[block] for block in blocks if block in self._leaves)
        self._watched_by.update(dict.fromkeys(blocks, root))

    def unwatch(self, root: bytes) -> None:
        """Drop the order of a namespace that has nothing published."""
        self._watched.pop(root, None)

    def is_watched(self, root: bytes) -> bool:
        return root in self._watched

    def check(self, roots: dict[int, bytes]) -> None:
        """Walk the whole state. `roots`: of every published block. AssertionError if anything disagrees."""
        loose = {block for block in roots if not self.ties[block]}
        assert self.evictable == len(loose), f"{self.evictable} evictable counted, {len(loose)} found"
        leaves = {block: self._rank(block) for block in loose if not self.children[block]}
        assert self._leaves == leaves, "the evictable leaves are not those of the index"
        assert set(leaves.values()) <= set(self._all), "an evictable leaf is missing in the order"
        watched = {block: root for block, root in roots.items() if root in self._watched}
        assert self._watched_by == watched, "a namespace's blocks are not those under watch"
        for root, heap in self._watched.items():
            own = {rank for block, rank in leaves.items() if roots[block] == root}
            assert own <= set(heap), "a namespace's order has a gap"
        for heap in (self._all, *self._watched.values()):
            assert all(heap[(i - 1) // 2] <= heap[i] for i in range(1, len(heap))), "an order is not a heap"

    def _rank(self, block: int) -> Rank:
        return self._priority[block], self._stamp[block], block

    def _push(self, block: int) -> None:
        rank = self._leaves[block] = self._rank(block)
        root = self._watched_by.get(block)
        for heap in (self._all,) if root is None else (self._all, self._watched[root]):
            heappush(heap, rank)
            if len(heap) > 64 + 4 * len(self._leaves):
                heap[:] = {rank for rank in heap if self._leaves.get(rank[2]) == rank}
                heapify(heap)
