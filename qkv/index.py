"""Published blocks by name: finds them again, proves a hit, makes room, tells what changed.

Every published block stands on the one before it, the first on its sink (`Start`), and a parent stays as long as its
children. Keys say where to look; namespace, contents and path, compared on every lookup, say whether it is a hit. So a
collision of keys costs a miss, never a wrong answer. Knows no reference counts; the pool's lock guards it.
"""

from collections import Counter, deque
from dataclasses import dataclass
from itertools import islice

from qkv.eviction import NONE, EvictionOrder
from qkv.prefix import TOKEN_BYTES, Namespace, Prefix
from qkv.reports import Event, EventLog, Kind, Row

GHOSTS = 1 << 16  # evicted keys remembered to see whether they are asked for again
COUNTS = ("queries", "query_tokens", "hit_tokens", "hit_blocks", "refused", "duplicates", "over_quota", "evictions")


@dataclass(slots=True)
class Start:
    """What first blocks stand on: one namespace and one sink."""

    key: bytes
    namespace: Namespace
    content: bytes
    children: int = 0


class PrefixIndex:
    """The published blocks of one pool, in columns by block id (qkv/eviction.py says why).

    free   the pool's free list; takes the ids of evicted blocks
    quota  most blocks of one namespace, unless `quotas` says otherwise
    """

    def __init__(self, free: deque[int], quota: int | None, events: int) -> None:
        self.order = EvictionOrder()
        self.by_key: dict[bytes, int] = {}  # a block stands behind the one before it
        self.keys: dict[int, bytes] = {}
        self.starts: dict[bytes, Start] = {}
        self.quota = quota
        self.quotas: dict[bytes, int | None] = {}  # by root
        self.published: dict[bytes, int] = {}  # by root
        self.log = EventLog(events)
        self.counts = dict.fromkeys((*COUNTS, "regretted"), 0)
        self.seconds_a_block = 0.0  # mean of all blocks ever published
        self._ever = 0
        self._free = free
        self._contents: dict[int, bytes] = {}
        self._start_of: dict[int, bytes] = {}
        self._tiers: dict[int, str] = {}  # where it is not the device
        self._ghosts: dict[bytes, None] = {}
        self.watched: set[bytes] = set()  # names of blocks and starts whose end is to be told, in `gone`
        self.gone: list[bytes] = []

    def find(self, prefix: Prefix, most: int | None = None) -> tuple[list[int], bool]:
        """The longest run of blocks that `prefix` may use, at most `most`; whether an equal key of another ended it."""
        start = self.starts.get(prefix.start) if prefix.start is not None else None
        if start is None:
            return [], False
        if not _is_start(start, prefix):
            return [], True
        blocks: list[int] = []
        up = NONE
        usable = prefix.usable if most is None else min(most, prefix.usable)
        for key, content in islice(zip(prefix.keys, prefix.contents, strict=True), usable):
            block = self.by_key.get(key)
            if block is None:
                break
            if not self._is_block(block, content, up, start):
                return blocks, True
            blocks.append(block)
            up = block
        return blocks, False

    def count_lookup(self, prefix: Prefix, blocks: list[int], refused: bool) -> None:
        """Note a lookup that is meant: what it found, and what it would have found but for an eviction."""
        counts = self.counts
        counts["queries"] += 1
        counts["query_tokens"] += prefix.length
        counts["hit_tokens"] += sum(self.hit_tokens(prefix, blocks).values())
        counts["hit_blocks"] += len(blocks)
        counts["refused"] += refused
        for key in islice(prefix.keys, len(blocks), prefix.usable):
            if key not in self._ghosts:
                break
            del self._ghosts[key]  # one eviction is regretted once
            counts["regretted"] += 1

    def hit_tokens(self, prefix: Prefix, blocks: list[int]) -> dict[str, int]:
        """Tokens of a hit by tier; the sink comes with the first block."""
        if not blocks:
            return {}
        found = {"device": prefix.namespace.sink_tokens + len(blocks) * prefix.namespace.block_tokens}
        for tier in filter(None, map(self._tiers.get, blocks)) if self._tiers else ():
            found[tier] = found.get(tier, 0) + prefix.namespace.block_tokens
            found["device"] -= prefix.namespace.block_tokens
        return found

    def add(self, prefix: Prefix, first: int, ids: list[int], seconds: float) -> int:
        """Publish held blocks as blocks `first`, first+1, ... of `prefix`, as far as `BlockPool.publish` says."""
        start = self._start(prefix, make=first == 0)
        up = self.by_key.get(prefix.keys[first - 1], NONE) if first else NONE
        if start is None or (first and up == NONE):
            return 0
        if first and (self._start_of[up] != start.key or self._contents[up] != prefix.contents[first - 1]):
            self.counts["refused"] += 1
            return 0
        added, each = 0, seconds / len(ids)
        for number, new in enumerate(ids, first):
            key, content = prefix.keys[number], prefix.contents[number]
            block = self.by_key.get(key)
            if block is None:
                if not self._publish(new, key, content, start, up, each):
                    self.counts["over_quota"] += 1
                    break
                block = new
                added += 1
            elif not self._is_block(block, content, up, start):
                self.counts["refused"] += 1
                break
            else:
                self.counts["duplicates"] += block != new
            up = block
        if not start.children:
            del self.starts[start.key]
        return added

    def move(self, block: int, tier: str) -> None:
        """Note where the block's records are."""
        if tier == self._tiers.get(block, "device"):
            return
        if tier == "device":
            del self._tiers[block]
        else:
            self._tiers[block] = tier
        self._tell("moved", block)

    def evict(self, namespace: bytes | None = None) -> bool:
        """Free the evictable block that goes first, of one namespace with a quota or of all; False: there is none."""
        block = self.order.pop(namespace)
        if block == NONE:
            return False
        self._tell("removed", block)
        key, start = self.keys[block], self.starts[self._start_of[block]]
        if self.order.up[block] == NONE:
            start.children -= 1
        self.order.detach(block)
        del self.by_key[key], self.keys[block], self._contents[block], self._start_of[block]
        self._tiers.pop(block, None)
        self._free.append(block)
        self._end(key)
        if not start.children:
            del self.starts[start.key]
            self._end(start.key)
        root = start.namespace.root
        self.published[root] -= 1
        if not self.published[root]:
            del self.published[root]
            if namespace is None:  # else it is about to publish again
                self.order.unwatch(root)
        self._ghosts[key] = None
        if len(self._ghosts) > GHOSTS:
            del self._ghosts[next(iter(self._ghosts))]
        self.counts["evictions"] += 1
        return True

    def _end(self, name: bytes) -> None:
        if name in self.watched:
            self.watched.discard(name)
            self.gone.append(name)

    def snapshot(self) -> list[Event]:
        """Every block as a stored event with the number of the next one, each behind its parent."""
        return [Event(self.log.next_number, *self._row("stored", block)) for block in self.by_key.values()]

    def check(self, held: set[int], pinned: set[int]) -> None:
        """Walk the whole state. AssertionError if anything disagrees."""
        order = self.order
        assert {block: key for key, block in self.by_key.items()} == self.keys, "keys and ids disagree"
        assert self.keys.keys() == self._contents.keys() == self._start_of.keys() >= self._tiers.keys()
        children: Counter[int | bytes] = Counter()
        ties: Counter[int] = Counter()
        behind: set[int] = set()
        for block in reversed(self.by_key.values()):
            name, up, start = f"block {block}", order.up[block], self._start_of[block]
            wanted = ties[block] + (block in held) + (block in pinned)
            assert order.ties[block] == wanted, f"{name}: {order.ties[block]} ties counted, {wanted} found"
            assert order.children[block] == children[block], f"{name}: children miscounted"
            assert start in self.starts, f"{name}: its start is gone"
            assert up == NONE or self._start_of.get(up) == start, f"{name}: its parent is gone or of another start"
            assert up not in behind, f"{name} stands before its parent"
            behind.add(block)
            children[start if up == NONE else up] += 1
            ties[up] += order.ties[block] > 0
        for key, its in self.starts.items():
            assert its.key == key
            assert its.children == children[key] > 0, "children of a start miscounted"
        roots = {block: self.starts[start].namespace.root for block, start in self._start_of.items()}
        assert dict(Counter(roots.values())) == self.published, "published blocks of a namespace miscounted"
        for root, count in self.published.items():
            quota = self.quotas.get(root, self.quota)
            assert quota is None or count <= quota, "a namespace is over its quota"
        assert not self._ghosts.keys() & self.by_key.keys(), "an evicted key is in the index"
        assert len(self._ghosts) <= min(GHOSTS, self.counts["evictions"])
        order.check(roots)

    def _is_block(self, block: int, content: bytes, up: int, start: Start) -> bool:
        """The proof of a hit: same content behind the same block. All of a path stand on the start of its first."""
        return (
            self._contents[block] == content
            and self.order.up[block] == up
            and (up != NONE or self._start_of[block] == start.key)
        )

    def _start(self, prefix: Prefix, make: bool) -> Start | None:
        """What the first block of `prefix` stands on; None: nothing does, or it is something else's."""
        assert prefix.start is not None, "a prefix with a block has a start"
        start = self.starts.get(prefix.start)
        if start is None and make:
            start = self.starts[prefix.start] = Start(prefix.start, prefix.namespace, prefix.sink)
        if start is not None and not _is_start(start, prefix):
            self.counts["refused"] += 1
            return None
        return start

    def _publish(self, block: int, key: bytes, content: bytes, start: Start, up: int, seconds: float) -> bool:
        """Take in a held block, if the quota of its namespace has room or can make some."""
        root = start.namespace.root
        quota = self.quotas.get(root, self.quota)
        if quota is not None and not self.order.is_watched(root):
            own = self._start_of.items() if root in self.published else ()
            self.order.watch(root, [block for block, key in own if self.starts[key].namespace.root == root])
        self.order.attach(block, up, seconds, root)  # from here on, eviction leaves alone what it stands on
        start.children += up == NONE
        while quota is not None and self.published.get(root, 0) >= quota:
            if not self.evict(root):
                self.order.detach(block)
                start.children -= up == NONE
                return False
        self.published[root] = self.published.get(root, 0) + 1
        self.by_key[key] = block
        self.keys[block], self._contents[block], self._start_of[block] = key, content, start.key
        self._ghosts.pop(key, None)
        self._ever += 1
        self.seconds_a_block += (seconds - self.seconds_a_block) / self._ever
        self._tell("stored", block)
        return True

    def _tell(self, kind: Kind, block: int) -> None:
        self.log.add(self._row(kind, block))

    def _row(self, kind: Kind, block: int) -> Row:
        up, start = self.order.up[block], self.starts[self._start_of[block]]
        parent = start.key if up == NONE else self.keys[up]
        tokens = self._contents[block][: start.namespace.block_tokens * TOKEN_BYTES]
        tier = self._tiers.get(block, "device")
        return kind, self.keys[block], parent, block, tier, start.namespace.root, tokens


def _is_start(start: Start, prefix: Prefix) -> bool:
    return start.content == prefix.sink and start.namespace == prefix.namespace
