"""The block pool against a plain dictionary of counts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.errors import OutOfBlocks
from qkv.pool import BlockPool

STEPS = st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 9)), max_size=60)


@given(STEPS, st.one_of(st.none(), st.integers(1, 12)))
@settings(max_examples=300, deadline=None)
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


def test_check_can_fail() -> None:
    pool = BlockPool()
    ids = pool.allocate(2)
    for wrong in ({}, {ids[0]: 1}, {ids[0]: 2, ids[1]: 1}):
        with pytest.raises(AssertionError):
            pool.check(wrong)


def test_a_prompt_is_counted_exactly_and_growth_is_small() -> None:
    pool = BlockPool()
    pool.allocate(62)
    assert pool.capacity == 62
    pool.allocate(1)
    assert pool.capacity == 64
