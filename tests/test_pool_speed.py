"""What a block costs in a large pool. The full size is heavy; the measure itself is tried small."""

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from qkv.pool import BlockPool
from qkv.prefix import Namespace, Prefix


def measure_pool(blocks: int, run: int = 1024) -> dict[str, float]:
    """Mean microseconds a block, step by step, in a pool of `blocks`; milliseconds to match a prompt of `run` blocks.

    Each of blocks // run prompts is named, allocated, published, found again and released; all stay in the pool.
    """
    space = Namespace("w", ((8, 128, "bfloat16"),) * 32, "kivi4", 1, block_tokens=128, sink_tokens=4)
    pool, spent = BlockPool(blocks), Counter[str]()
    tokens = list(range(4 + run * 128 + 1))

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = call()
        spent[name] += time.perf_counter() - begin
        return result

    for number in range(blocks // run):
        tokens[0] = number
        prefix = timed("hash", lambda: Prefix(space, tokens, tail_tokens=0))
        ids = timed("allocate", partial(pool.allocate, run))
        timed("publish", partial(pool.publish, prefix, 0, ids, 1.0))
        assert timed("lookup", partial(pool.acquire, prefix)) == ids
        timed("release", partial(pool.release, ids))
        timed("release", partial(pool.release, ids))
    done = blocks // run * run
    result = {name: seconds / done * 1e6 for name, seconds in spent.items()}
    result["total"] = sum(result.values())
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        assert pool.match(Prefix(space, tokens, tail_tokens=0)).blocks == run
        times.append(time.perf_counter() - begin)
    return result | {"match_ms": sorted(times)[len(times) // 2] * 1e3}


def test_the_measure_works() -> None:
    assert measure_pool(64, run=8).keys() == {"hash", "allocate", "publish", "lookup", "release", "total", "match_ms"}


@pytest.mark.heavy
def test_a_million_blocks() -> None:
    found = measure_pool(1_000_000)
    print(found)
    assert found["total"] < 10
    assert found["match_ms"] < 5
