"""Block ids: who holds each, and which are free. Holds no tensors and imports no torch.

free -> allocate -> held by 1 -> retain -> held by n -> release (n times) -> free
"""

from collections import deque

from qkv.errors import OutOfBlocks


class BlockPool:
    """Ids 0 .. capacity-1 with reference counts. Capacity never passes `limit`; None: it grows on demand."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.capacity = 0
        self._references: list[int] = []
        self._free: deque[int] = deque()

    @property
    def num_free(self) -> int:
        """Ids that can be handed out without growing."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` ids, each held once. Raises OutOfBlocks and changes nothing if the limit is in the way."""
        missing = count - len(self._free)
        if missing > 0:
            room = None if self.limit is None else self.limit - self.capacity
            if room is not None and missing > room:
                raise OutOfBlocks(count, len(self._free) + room, 0)
            # A prompt's blocks are counted exactly. Token by token, a little slack saves copying on every block.
            slack = max(missing, 2, self.capacity // 32) if count == 1 else missing
            self._grow(slack if room is None else min(slack, room))
        ids = [self._free.popleft() for _ in range(count)]
        for block_id in ids:
            self._references[block_id] = 1
        return ids

    def retain(self, ids: list[int]) -> None:
        """One more holder for each id."""
        for block_id in ids:
            assert self._references[block_id] > 0, f"block {block_id} is free"
            self._references[block_id] += 1

    def release(self, ids: list[int]) -> None:
        """One holder fewer for each id; an id without holders is free."""
        for block_id in ids:
            assert self._references[block_id] > 0, f"block {block_id} is free"
            self._references[block_id] -= 1
            if not self._references[block_id]:
                self._free.append(block_id)

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def check(self, holders: dict[int, int]) -> None:
        """Walk the whole state. `holders`: how many owners hold each id. AssertionError if anything disagrees."""
        assert len(self._references) == self.capacity
        free = set(self._free)
        assert len(free) == len(self._free), "an id is free twice"
        for block_id, count in enumerate(self._references):
            assert count == holders.get(block_id, 0), (
                f"block {block_id}: counted {count}, held {holders.get(block_id, 0)}"
            )
            assert (count == 0) == (block_id in free), f"block {block_id}: count {count} disagrees with the free list"

    def _grow(self, count: int) -> None:
        self._free.extend(range(self.capacity, self.capacity + count))
        self._references.extend([0] * count)
        self.capacity += count
