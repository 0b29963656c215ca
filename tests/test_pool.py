"""The block pool: holders, names, eviction, collisions, readers, and what `check` sees."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.errors import EventsLost, OutOfBlocks, ShapeError, WrongBlock
from qkv.pool import BlockPool
from qkv.prefix import Namespace, Prefix

SPACE = Namespace("w", ((8, 128, "bfloat16"),), "kivi4", 1, block_tokens=2, sink_tokens=1)
SPACES = (SPACE, replace(SPACE, salt="tenant"), replace(SPACE, sink_tokens=0))


def make(tokens: Any, space: Namespace = SPACE, tail: int = 0) -> Prefix:
    return Prefix(space, tokens, tail_tokens=tail)


def published(pool: BlockPool, tokens: Any, seconds: float = 0.0, space: Namespace = SPACE) -> list[int]:
    """Ids, still held, of a sequence whose blocks are all published."""
    prefix = make(tokens, space)
    ids = pool.allocate(len(prefix.keys))
    pool.publish(prefix, 0, ids, seconds)
    return ids


# ---- holders ----

STEPS = st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 9)), max_size=60)


@given(STEPS, st.one_of(st.none(), st.integers(1, 12)))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_order_of_calls(steps: list[tuple[str, int]], limit: int | None) -> None:
    pool, held = BlockPool(limit), dict[int, int]()
    for verb, number in steps:
        if verb == "allocate":
            before = (pool.capacity, pool.num_free)
            if limit is not None and number > limit - len(held):
                with pytest.raises(OutOfBlocks) as caught:
                    pool.allocate(number)
                assert (caught.value.needed, caught.value.free) == (number, limit - len(held))
                assert (pool.capacity, pool.num_free) == before
            else:
                ids = pool.allocate(number)
                assert len(set(ids)) == number
                assert not set(ids) & held.keys()
                held |= dict.fromkeys(ids, 1)
        elif held:
            block_id = sorted(held)[number % len(held)]
            getattr(pool, verb)([block_id])
            held[block_id] += 1 if verb == "retain" else -1
            if not held[block_id]:
                del held[block_id]
        pool.check(held)
        assert limit is None or pool.capacity <= limit


def test_a_prompt_is_counted_exactly_and_growth_is_small() -> None:
    pool = BlockPool()
    pool.allocate(62)
    assert pool.capacity == 62
    pool.allocate(1)
    assert pool.capacity == 64


def test_bad_numbers_are_refused() -> None:
    for name in ("limit", "quota", "events"):
        with pytest.raises(ShapeError, match=f"{name}: got -1"):
            BlockPool(**{name: -1})
    pool = BlockPool(4)
    ids, prefix = pool.allocate(2), make([0] * 5)
    calls: list[Callable[[], Any]] = [
        lambda: pool.allocate(-1),
        lambda: pool.evict(-1),
        lambda: pool.publish(prefix, -1, ids),
        lambda: pool.publish(prefix, 1, ids),
        lambda: pool.publish(prefix, 3, []),
        lambda: pool.publish(prefix, 0, ids, -1.0),
        lambda: pool.publish(prefix, 0, ids, float("nan")),
    ]
    for call in calls:
        with pytest.raises(ShapeError):
            call()
    for wrong in ([ids[0], ids[0]], [ids[0], 3], [ids[0], -1]):
        with pytest.raises(WrongBlock):
            pool.publish(prefix, 0, wrong)
    assert pool.publish(make([]), 0, []) == 0
    assert pool.stats().published == 0
    pool.check(dict.fromkeys(ids, 1))


def test_a_block_has_one_name() -> None:
    pool = BlockPool()
    ids = published(pool, [0] * 3)
    with pytest.raises(WrongBlock, match="published under another name"):
        pool.publish(make([1] * 3), 0, ids)
    assert pool.publish(make([0] * 3), 0, ids) == 0
    assert pool.stats().duplicates == 0
    pool.check({ids[0]: 1})


# ---- names, eviction ----


def test_a_released_block_is_found_until_its_place_is_needed() -> None:
    pool = BlockPool(2)
    ids = published(pool, [7] * 5)
    pool.release(ids)
    asked = make([7] * 6)
    assert pool.match(asked).hit_tokens == {"device": 5}
    assert pool.acquire(asked) == ids
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate(1)
    assert (caught.value.free, caught.value.evictable) == (0, 0)
    pool.release(ids)
    assert pool.allocate(1) == [ids[1]], "the leaf goes first"
    assert pool.match(asked).blocks == 1
    assert pool.acquire(asked) == ids[:1]
    assert pool.stats().regretted == 1


def test_dear_blocks_stay_but_not_for_ever() -> None:
    pool = BlockPool(3)
    pool.release(published(pool, [0] * 3, seconds=3.5))
    pool.release(published(pool, [1] * 3, seconds=1.0))
    survived = 0
    for token in range(2, 12):
        pool.release(published(pool, [token] * 3, seconds=1.0))
        survived += pool.match(make([0] * 4)).blocks
    # two cheap places pass in turn; the clock rises by one second for each two blocks
    assert survived == 7


def test_equal_cost_is_least_recently_used() -> None:
    pool = BlockPool(3)
    for token in range(3):
        pool.release(published(pool, [token] * 3, seconds=2.0))
    pool.release(pool.acquire(make([0] * 4)))
    pool.match(make([1] * 4))
    pool.release(published(pool, [3] * 3, seconds=2.0))
    assert [pool.match(make([token] * 4)).blocks for token in range(4)] == [1, 0, 1, 1]


def test_tenants_never_share() -> None:
    pool = BlockPool()
    published(pool, [5] * 7)
    for other in SPACES[1:]:
        assert pool.match(make([5] * 9, other)).blocks == 0
        assert pool.acquire(make([5] * 9, other)) == []
    assert pool.acquire(make([6] + [5] * 8)) == [], "another sink"
    assert len(pool.acquire(make([5] * 9))) == 3


def test_a_tenant_gives_up_its_own_blocks_first() -> None:
    pool = BlockPool(quota=2)
    pool.release(published(pool, [0] * 3, space=SPACES[1]))
    pool.release(published(pool, [1] * 5))
    ids = published(pool, [2] * 5)
    assert [pool.match(make([token] * 6)).blocks for token in (1, 2)] == [0, 2]
    assert pool.match(make([0] * 4, SPACES[1])).blocks == 1
    private = published(pool, [3] * 3)
    assert pool.match(make([3] * 4)).blocks == 0, "both places are in use"
    assert pool.stats().over_quota == 1
    pool.check(dict.fromkeys(ids + private, 1))


def test_state_does_not_grow_with_what_has_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.index.GHOSTS", 8)
    pool = BlockPool(4, quota=3, events=5)
    space = replace(SPACE, salt="0")
    for number in range(400):
        space = replace(SPACE, salt=str(number // 4))
        pool.release(published(pool, [number % 3] * 5, space=space))
        pool.release(pool.acquire(make([number % 3] * 6, space)))
        pool.move([pool.snapshot()[1][0].block_id], "host")
    pool.check({})
    index, order = pool._index, pool._index.order
    assert len(order._all) <= 64 + 4 * 4
    assert len(order._watched) == len(index.published) <= 4
    assert 1 <= len(index._ghosts) <= 8
    assert len(index._tiers) <= 4
    assert len(pool.events(pool.snapshot()[0] - 5)) == 5


def test_used_again_and_again() -> None:
    """Stale entries are dropped from the order, live ones are not."""
    pool = BlockPool(4)
    for token in range(4):
        pool.release(published(pool, [token] * 3))
    for number in range(400):
        pool.release(pool.acquire(make([number % 4] * 4)))
        pool.check({})
    assert len(pool._index.order._all) <= 64 + 4 * 4
    assert pool.evict(4) == 4


def test_a_quota_of_one() -> None:
    pool = BlockPool(quota=1)
    for token in range(3):
        pool.release(published(pool, [token] * 3))
        pool.check({})
        assert pool.match(make([token] * 4)).blocks == pool.stats().published == 1


def test_the_sink_lives_as_long_as_blocks_stand_on_it() -> None:
    pool = BlockPool()
    first, second = make([0, 1, 1]), make([0, 2, 2])
    assert first.start == second.start is not None
    ids = [pool.allocate(1), pool.allocate(1)]
    for one, prefix in zip(ids, (first, second), strict=True):
        pool.publish(prefix, 0, one)
    assert pool.children(first.start) == 2
    pool.release(ids[0])
    pool.evict(1)
    assert pool.children(first.start) == 1
    assert pool.events(2)[0].parent == first.start
    pool.release(ids[1])
    pool.evict(1)
    assert pool.children(first.start) == 0


# ---- collisions ----


def weak_link(parent: bytes, content: bytes) -> bytes:
    return hashlib.sha256(parent + content).digest()[:1]


def test_a_collision_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.prefix.link", lambda parent, content: b"same" + content[4:5])
    pool = BlockPool()
    ids = published(pool, [1, 5, 5])
    victim = make([1, 6, 5, 0])
    victim.keys = make([1, 5, 5]).keys
    for refused, prefix in enumerate((victim, make([2, 5, 5, 0]), make([1, 5, 5, 0], SPACES[1])), 1):
        assert pool.match(prefix).blocks == 0
        assert pool.stats().refused == refused - 1, "match changes nothing"
        assert pool.acquire(prefix) == []
        assert pool.stats().refused == refused
    assert pool.acquire(make([1, 5, 5, 0])) == ids
    other = pool.allocate(1)
    assert pool.publish(victim, 0, other) == 0
    assert pool.stats().refused == 4
    pool.check({ids[0]: 2, other[0]: 1})


def test_equal_content_elsewhere_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.prefix.link", lambda parent, content: content)
    pool = BlockPool()
    ids = published(pool, [1, 5, 5, 6, 6])
    ids += published(pool, [2, 7, 7])
    ids += published(pool, [1, 8, 8])
    assert pool.acquire(make([2, 5, 5, 0])) == [], "behind another sink"
    assert pool.acquire(make([1, 8, 8, 6, 6, 0])) == ids[3:], "behind another block"
    wrong = make([1, 9, 9, 0, 0])
    wrong.keys[0] = make([1, 8, 8]).keys[0]
    new = pool.allocate(1)
    assert pool.publish(wrong, 1, new) == 0, "what it would stand on is something else"
    assert pool.stats().refused == 3
    pool.check(dict.fromkeys(ids + new, 1) | {ids[3]: 2})


# ---- events ----


def test_events_that_are_gone() -> None:
    pool = BlockPool(events=3)
    ids = published(pool, [0] * 9)
    with pytest.raises(EventsLost) as caught:
        pool.events(0)
    assert (caught.value.asked, caught.value.oldest, caught.value.next_number) == (0, 1, 4)
    assert [event.number for event in pool.events(1)] == [1, 2, 3]
    assert pool.events(4) == []
    with pytest.raises(EventsLost):
        pool.events(5)
    number, stored = pool.snapshot()
    assert (number, [event.block_id for event in stored]) == (4, ids)
    assert [event.parent for event in stored[1:]] == [event.key for event in stored[:-1]]
    assert BlockPool(events=0).events() == []


# ---- check ----


def test_check_can_fail() -> None:
    pool = BlockPool()
    ids = pool.allocate(2)
    for wrong in ({}, {ids[0]: 1}, {ids[0]: 2, ids[1]: 1}, {ids[0]: 1, ids[1]: 1, 9: 1}):
        with pytest.raises(AssertionError):
            pool.check(wrong)


def damage(pool: BlockPool, what: str) -> None:
    index, order = pool._index, pool._index.order
    root, first = SPACE.root, next(iter(index.starts))
    changes: dict[str, Callable[[], Any]] = {
        "references": lambda: pool._references.__setitem__(0, 5),
        "held": lambda: setattr(pool, "_held", 9),
        "free": lambda: pool._free.append(0),
        "free twice": lambda: pool._free.append(pool._free[0]),
        "pins": lambda: pool._pins.__setitem__(2, 1),
        "a pin on nothing": lambda: pool._pins.__setitem__(5, 1),
        "limit": lambda: setattr(pool, "limit", 1),
        "key": lambda: index.keys.__setitem__(1, b"x"),
        "lost key": lambda: index.by_key.popitem(),
        "order of keys": lambda: index.by_key.update({index.keys[0]: index.by_key.pop(index.keys[0])}),
        "up": lambda: order.up.__setitem__(1, -1),
        "children": lambda: order.children.__setitem__(1, 3),
        "ties": lambda: order.ties.__setitem__(1, 3),
        "start": lambda: index.starts.pop(first),
        "start's children": lambda: setattr(index.starts[first], "children", 7),
        "published": lambda: index.published.__setitem__(root, 9),
        "quota": lambda: index.quotas.__setitem__(root, 1),
        "ghosts": lambda: index._ghosts.__setitem__(index.keys[0], None),
        "evictable": lambda: setattr(order, "evictable", 0),
        "leaves": lambda: order._leaves.clear(),
        "all": lambda: order._all.clear(),
        "watched": lambda: order._watched[root].clear(),
        "watched by": lambda: order._watched_by.popitem(),
        "priority": lambda: order._priority.__setitem__(2, 5.0),
        "heap": lambda: order._all.insert(0, (9.0, 9, 9)),
    }
    changes[what]()


DAMAGES = (
    "references, held, free, free twice, pins, a pin on nothing, limit, key, lost key, order of keys, up, children, "
    "ties, start, start's children, published, quota, ghosts, evictable, leaves, all, watched, watched by, "
    "priority, heap"
)


@pytest.mark.parametrize("what", DAMAGES.split(", "))
def test_check_sees(what: str) -> None:
    pool = BlockPool(8, quota=6)
    ids = published(pool, [0] * 5) + published(pool, [1] * 3)
    pool.pin(ids[1:2])
    pool.release(ids[1:])
    pool.allocate(2)
    pool.release([3])
    holders = {ids[0]: 1, 4: 1}
    pool.check(holders)
    damage(pool, what)
    with pytest.raises(AssertionError):
        pool.check(holders)
