"""The block pool against plain models that know no hashes, no heaps and no counts kept on the side."""

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from qkv.errors import EventsLost, OutOfBlocks, ShapeError, WrongBlock
from qkv.pool import BlockPool
from qkv.prefix import Namespace, Prefix
from qkv.reports import Event

SPACE = Namespace("w", ((8, 128, "bfloat16"),), "kivi4", 1, block_tokens=2, sink_tokens=1)
SPACES = (SPACE, replace(SPACE, salt="tenant"), replace(SPACE, sink_tokens=0))
# What is known of a block without any key: namespace, and all tokens up to its end.
Path = tuple[Namespace, tuple[int, ...]]


def make(tokens: Any, space: Namespace = SPACE, tail: int = 0) -> Prefix:
    return Prefix(space, tokens, tail_tokens=tail)


# ---- the model ----


@dataclass
class Block:
    id: int
    seconds: float
    tier: str = "device"
    priority: float = 0.0
    stamp: int = 0


class Model:
    """Says by brute force what the pool must do. Blocks are named by their path itself."""

    def __init__(self, limit: int | None, quota: int | None) -> None:
        self.limit, self.quota = limit, quota
        self.quotas: dict[Namespace, int | None] = {}
        self.references: Counter[int] = Counter()
        self.pins: Counter[int] = Counter()
        self.blocks: dict[Path, Block] = {}
        self.evicted: dict[Path, None] = {}
        self.counts: Counter[str] = Counter()
        self.clock, self.stamp = 0.0, 0
        self.seconds: list[float] = []

    def children(self, path: Path) -> list[Path]:
        space, tokens = path
        return [p for p in self.blocks if p[0] == space and p[1][: -space.block_tokens] == tokens]

    def evictable(self, path: Path) -> bool:
        block = self.blocks[path]
        busy = self.references[block.id] or self.pins[block.id]
        return not busy and all(map(self.evictable, self.children(path)))

    def count_evictable(self) -> int:
        return sum(map(self.evictable, self.blocks))

    def used(self) -> int:
        return len(set(+self.references) | {block.id for block in self.blocks.values()})

    def available(self) -> int | None:
        return None if self.limit is None else self.limit - self.used() + self.count_evictable()

    def evict(self, space: Namespace | None = None, spare: Path | None = None) -> bool:
        leaves = [
            (self.blocks[path].priority, self.blocks[path].stamp, path)
            for path in self.blocks
            if self.evictable(path) and not self.children(path) and space in (None, path[0]) and path != spare
        ]
        if not leaves:
            return False
        priority, _, path = min(leaves, key=lambda leaf: leaf[:2])
        self.clock = max(self.clock, priority)  # a block that waited for its children, or for its namespace, is older
        del self.blocks[path]
        self.evicted[path] = None
        self.counts["evictions"] += 1
        return True

    def allocate(self, count: int) -> None:
        if self.limit is not None:
            for _ in range(count - (self.limit - self.used())):
                assert self.evict()

    def release(self, block_id: int) -> None:
        self.references[block_id] -= 1
        for block in self.blocks.values():
            if block.id == block_id and not self.references[block_id]:
                self.stamp += 1
                block.stamp, block.priority = self.stamp, self.clock + block.seconds

    def publish(self, paths: list[Path], first: int, ids: list[int], seconds: float) -> int:
        added = 0
        for number, block_id in enumerate(ids, first):
            space, parent = paths[number][0], paths[number - 1] if number else None
            if number and parent not in self.blocks:
                break
            if paths[number] in self.blocks:
                self.counts["duplicates"] += self.blocks[paths[number]].id != block_id
                continue
            quota = self.quotas.get(space, self.quota)
            while quota is not None and sum(path[0] == space for path in self.blocks) >= quota:
                if not self.evict(space, spare=parent):
                    self.counts["over_quota"] += 1
                    return added
            self.blocks[paths[number]] = Block(block_id, seconds / len(ids))
            self.evicted.pop(paths[number], None)
            self.seconds.append(seconds / len(ids))
            added += 1
        return added

    def find(self, paths: list[Path]) -> list[Block]:
        found = []
        for path in paths:
            if path not in self.blocks:
                break
            found.append(self.blocks[path])
        return found

    def count(self, paths: list[Path], length: int) -> None:
        hits = len(self.find(paths))
        space = paths[0][0] if paths else SPACE
        self.counts["queries"] += 1
        self.counts["query_tokens"] += length
        self.counts["hit_blocks"] += hits
        self.counts["hit_tokens"] += hits * space.block_tokens + (space.sink_tokens if hits else 0)
        for path in paths[hits:]:
            if path not in self.evicted:
                break
            del self.evicted[path]
            self.counts["regretted"] += 1


def paths_of(prefix: Prefix, tokens: list[int]) -> list[Path]:
    space = prefix.namespace
    ends = range(space.sink_tokens + space.block_tokens, len(tokens) + 1, space.block_tokens)
    return [(space, tuple(tokens[:end])) for end in ends]


def replay(events: list[Event], index: dict[bytes, Event]) -> None:
    """What a reader of events does."""
    for event in events:
        if event.kind == "stored":
            assert event.key not in index
            assert event.parent in index or event.parent not in {known.key for known in index.values()}
            index[event.key] = event
        elif event.kind == "removed":
            assert index.pop(event.key).block_id == event.block_id
        else:
            index[event.key] = index[event.key]._replace(tier=event.tier)


@dataclass
class Run:
    """A sequence that holds blocks."""

    prefix: Prefix
    paths: list[Path]
    ids: list[int]


class PoolMachine(RuleBasedStateMachine):
    @initialize(
        limit=st.sampled_from([None, 0, 3, 5, 5, 8, 8]),
        quota=st.sampled_from([None, None, None, 0, 1, 3]),
        prompts=st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=9), min_size=3, max_size=6),
    )
    def begin(self, limit: int | None, quota: int | None, prompts: list[list[int]]) -> None:
        self.prompts = [[], *prompts]
        self.pool, self.model = BlockPool(limit, quota=quota), Model(limit, quota)
        self.pool.block_bytes = 10
        self.runs: list[Run] = []
        self.seen, self.index = 0, dict[bytes, Event]()

    def pick(self, number: int) -> Run:
        return self.runs[number % len(self.runs)]

    def open(self, number: int, space: Namespace, tail: int) -> None:
        tokens = self.prompts[number % len(self.prompts)]
        prefix = make(tokens, space, tail)
        paths = paths_of(prefix, tokens)
        match, hits = self.pool.match(prefix), self.model.find(paths[: prefix.usable])
        self.model.count(paths[: prefix.usable], len(tokens))
        ids = self.pool.acquire(prefix)
        assert ids == [block.id for block in hits]
        self.model.references.update(ids)
        tiers = Counter({"device": space.sink_tokens if hits else 0})
        for block in hits:
            tiers[block.tier] += space.block_tokens
        assert Counter(match.hit_tokens) == +tiers
        assert match.tokens_left == len(tokens) - tiers.total()
        assert (match.blocks, match.bytes) == (len(hits), 10 * len(hits))
        assert match.seconds_to_recompute == sum(block.seconds for block in hits)
        rate = sum(self.model.seconds) / max(1, len(self.model.seconds)) / space.block_tokens
        assert match.seconds_left == pytest.approx(match.tokens_left * rate)
        new = self.allocate(len(paths) - len(ids))
        if new is None:
            self.release(ids)
        else:
            self.runs.append(Run(prefix, paths, ids + new))

    @rule(number=st.integers(0), space=st.sampled_from(SPACES), tail=st.integers(0, 2))
    def enter(self, number: int, space: Namespace, tail: int) -> None:
        self.open(number, space, tail)

    @rule(number=st.integers(0), space=st.sampled_from((SPACE, *SPACES)), seconds=st.sampled_from([0.0, 1.0, 4.0]))
    def visit(self, number: int, space: Namespace, seconds: float) -> None:
        """All of a sequence's life."""
        before = len(self.runs)
        self.open(number, space, 0)
        if len(self.runs) > before:
            self.publish(before, 0, seconds)
            self.close(before, False)

    def allocate(self, count: int) -> list[int] | None:
        available = self.model.available()
        assert self.pool.available == available
        if available is not None and count > available:
            with pytest.raises(OutOfBlocks) as caught:
                self.pool.allocate(count)
            evictable = self.model.count_evictable()
            found = caught.value
            assert (found.needed, found.free, found.evictable) == (count, available - evictable, evictable)
            return None
        self.model.allocate(count)
        ids = self.pool.allocate(count)
        assert len(set(ids)) == count
        assert not set(ids) & (set(+self.model.references) | {block.id for block in self.model.blocks.values()})
        self.model.references.update(ids)
        return ids

    def release(self, ids: list[int]) -> None:
        self.pool.release(ids)
        for block_id in ids:
            self.model.release(block_id)

    @precondition(lambda self: self.runs)
    @rule(number=st.integers(0), first=st.integers(0, 2), seconds=st.sampled_from([0.0, 1.0, 4.0]))
    def some(self, number: int, first: int, seconds: float) -> None:
        self.publish(number, first, seconds)

    def publish(self, number: int, first: int, seconds: float) -> None:
        run = self.pick(number)
        first = min(first, len(run.ids))
        names = {block.id: path for path, block in self.model.blocks.items()}
        if any(names.get(i, p) != p for i, p in zip(run.ids, run.paths, strict=True)):
            raise AssertionError("a run holds another run's block")
        assert self.pool.publish(run.prefix, first, run.ids[first:], seconds) == self.model.publish(
            run.paths, first, run.ids[first:], seconds
        )

    @precondition(lambda self: self.runs)
    @rule(number=st.integers(0))
    def fork(self, number: int) -> None:
        run = self.pick(number)
        self.pool.retain(run.ids)
        self.model.references.update(run.ids)
        self.runs.append(Run(run.prefix, run.paths, run.ids))

    @precondition(lambda self: self.runs)
    @rule(number=st.integers(0), backwards=st.booleans())
    def leave(self, number: int, backwards: bool) -> None:
        self.close(number, backwards)

    def close(self, number: int, backwards: bool) -> None:
        run = self.runs.pop(number % len(self.runs))
        self.release(run.ids[::-1] if backwards else run.ids)

    @precondition(lambda self: self.model.blocks)
    @rule(number=st.integers(0), twice=st.booleans())
    def pin(self, number: int, twice: bool) -> None:
        ids = [list(self.model.blocks.values())[number % len(self.model.blocks)].id] * (1 + twice)
        self.pool.pin(ids)
        self.model.pins.update(ids)

    @precondition(lambda self: +self.model.pins)
    @rule(number=st.integers(0))
    def unpin(self, number: int) -> None:
        pinned = sorted(self.model.pins.elements())
        block_id = pinned[number % len(pinned)]
        with pytest.raises(WrongBlock):
            self.pool.unpin([*pinned, block_id])
        self.pool.unpin([block_id])
        self.model.pins[block_id] -= 1

    @rule(count=st.integers(0, 3))
    def evict(self, count: int) -> None:
        wanted = min(count, self.model.count_evictable())
        for _ in range(wanted):
            assert self.model.evict()
        assert self.pool.evict(count) == wanted

    @rule(space=st.sampled_from(SPACES), quota=st.one_of(st.none(), st.integers(-1, 5)))
    def set_quota(self, space: Namespace, quota: int | None) -> None:
        if quota is not None and quota < sum(path[0] == space for path in self.model.blocks):
            with pytest.raises(ShapeError, match="wanted at least"):
                self.pool.set_quota(space, quota)
        elif quota is None or quota >= 0:
            self.pool.set_quota(space, quota)
            self.model.quotas[space] = quota

    @precondition(lambda self: self.model.blocks)
    @rule(number=st.integers(0), tier=st.sampled_from(["device", "host", "disk"]))
    def move(self, number: int, tier: str) -> None:
        block = list(self.model.blocks.values())[number % len(self.model.blocks)]
        self.pool.move([block.id], tier)
        block.tier = tier

    @rule(block_id=st.integers(-1, 20))
    def misuse(self, block_id: int) -> None:
        """One good id first: a call that fails must not have done half of its work."""
        good = [run.ids[0] for run in self.runs if run.ids][:1]
        if not self.model.references[block_id]:
            for verb in (self.pool.retain, self.pool.release):
                with pytest.raises(WrongBlock) as caught:
                    verb([*good, block_id])
                assert caught.value.block_id == block_id
        held = [*good] * (self.model.references[good[0]] + 1) if good else []
        if held:
            with pytest.raises(WrongBlock, match="listed more often than held"):
                self.pool.release(held)
        if all(block.id != block_id for block in self.model.blocks.values()):
            for verb in (self.pool.pin, self.pool.unpin, partial(self.pool.move, tier="disk")):
                with pytest.raises(WrongBlock, match="not published"):
                    verb([block_id])

    @invariant()
    def agree(self) -> None:
        model, stats = self.model, self.pool.stats()
        self.pool.check(dict(+model.references))
        assert {name: getattr(stats, name) for name in model.counts} == dict(model.counts)
        held, used, evictable = len(+model.references), model.used(), model.count_evictable()
        assert (stats.held, stats.evictable, stats.kept) == (held, evictable, used - held - evictable)
        assert (stats.free, stats.published) == (stats.capacity - used, len(model.blocks))
        assert (stats.pinned, stats.refused) == (len(+model.pins), 0)
        assert self.pool.num_free == stats.free
        number, stored = self.pool.snapshot()
        assert {(e.block_id, e.tier, e.namespace, e.tokens) for e in stored} == {
            (b.id, b.tier, p[0].root, b"".join(t.to_bytes(4, "little") for t in p[1][-p[0].block_tokens :]))
            for p, b in model.blocks.items()
        }
        replay(self.pool.events(self.seen), self.index)
        self.seen = number
        assert {e[1:] for e in stored} == {e._replace(kind="stored")[1:] for e in self.index.values()}


def test_the_pool_does_what_the_model_says() -> None:
    run_state_machine_as_test(
        PoolMachine, settings=settings(max_examples=700, stateful_step_count=40, deadline=None, derandomize=True)
    )


# ---- keys that collide, and readers ----


def weak_link(parent: bytes, content: bytes) -> bytes:
    return hashlib.sha256(parent + content).digest()[:1]


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=4, max_size=9), st.integers(0, 2)), max_size=40))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_keys_of_eight_bits_never_give_a_wrong_block(runs: list[tuple[list[int], int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qkv.prefix.link", weak_link)
        pool, truth = BlockPool(12), dict[int, Path]()
        for tokens, which in runs:
            prefix = make(tokens, SPACES[which])
            paths = paths_of(prefix, tokens)
            ids = pool.acquire(prefix)
            assert [truth[block_id] for block_id in ids] == paths[: len(ids)]
            new = pool.allocate(len(paths) - len(ids))
            truth |= zip(new, paths[len(ids) :], strict=True)
            pool.publish(prefix, 0, ids + new)
            pool.check(dict.fromkeys(ids + new, 1))
            pool.release(ids + new)


def test_readers_while_an_engine_works() -> None:
    pool, stop, troubles = BlockPool(64, events=256), threading.Event(), list[BaseException]()

    def read() -> Iterator[None]:
        index, seen = dict[bytes, Event](), 0
        while not stop.is_set():
            stats = pool.stats()
            assert stats.free + stats.held + stats.evictable + stats.kept == stats.capacity <= 64
            match = pool.match(make([0] * 21))
            assert match.tokens_left + sum(match.hit_tokens.values()) == 21
            try:
                fresh = pool.events(seen)
                replay(fresh, index)
                seen += len(fresh)
            except EventsLost:
                seen, stored = pool.snapshot()
                index = {event.key: event for event in stored}
            yield
        replay(pool.events(seen) if seen >= pool.snapshot()[0] - 256 else [], index)

    def reader() -> None:
        try:
            for _ in read():
                time.sleep(0.001)
        except BaseException as e:
            troubles.append(e)

    threads = [threading.Thread(target=reader) for _ in range(3)]
    for thread in threads:
        thread.start()
    end, number = time.monotonic() + 0.7, 0
    while time.monotonic() < end and not troubles:
        number += 1
        prefix = make([number % 3, *[number % 7] * 20])
        ids = pool.acquire(prefix)
        ids += pool.allocate(len(prefix.keys) - len(ids))
        pool.publish(prefix, 0, ids, 1.0)
        pool.release(ids)
    stop.set()
    for thread in threads:
        thread.join()
    assert not troubles, troubles[0]
    pool.check({})
