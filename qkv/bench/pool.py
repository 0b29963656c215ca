"""What a block costs in a large pool: named, allocated, published, found again, released."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import quantiles
from typing import Any

from qkv.bench import checks
from qkv.bench.rows import Row, Shape
from qkv.pool import BlockPool
from qkv.prefix import Namespace, Prefix
from qkv.spec import BLOCK_TOKENS

SUITE = "pool"
SINK = 4
STEPS = ("hash", "allocate", "publish", "lookup", "release")
LAYERS = 32


@dataclass(frozen=True)
class PoolOptions:
    """blocks in the pool; prompt: blocks of each prompt; rounds: samples of a match."""

    blocks: int = 100_000
    prompt: int = 1024
    rounds: int = 20

    def check(self) -> None:
        """Raises InputError."""
        checks.at_least("prompt", self.prompt, 1)
        checks.at_least("blocks", self.blocks, self.prompt)
        checks.at_least("rounds", self.rounds, 3)


def run(options: PoolOptions, say: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Microseconds a block by step, prompt after prompt until the pool is full; milliseconds to match one prompt.

    Each prompt is named, allocated, published, found again and released; all stay in the pool. The baseline is SHA-256
    over as many bytes as a block's name takes, in the same process: what naming cannot be cheaper than.
    """
    options.check()
    space = Namespace("w", ((8, 128, "bfloat16"),) * LAYERS, "kivi4", 1, BLOCK_TOKENS, SINK)
    pool, samples = BlockPool(options.blocks), {step: list[float]() for step in (*STEPS, "sha256")}
    tokens = list(range(SINK + options.prompt * BLOCK_TOKENS + 1))
    prompts = options.blocks // options.prompt
    for number in range(prompts):
        if not number % max(1, prompts // 8):
            say(f"  {number * options.prompt:,} of {options.blocks:,} blocks")
        tokens[0] = number
        for step, seconds in _prompt(pool, space, tokens, options.prompt).items():
            samples[step].append(seconds / options.prompt * 1e6)
    shape = Shape(1, 8, 1, 128, options.prompt * BLOCK_TOKENS, 0)
    case = f"{options.blocks:,} blocks"
    floor = _spread(samples["sha256"])[0]
    samples["total"] = [sum(each) for each in zip(*(samples[step] for step in STEPS), strict=True)]
    rows = []
    for step in (*STEPS, "total", "sha256"):
        value, p20, p80 = _spread(samples[step])
        baseline = {"baseline": "sha256", "ratio": floor / value} if step == "total" else {}
        made = dict[str, Any](p20=p20, p80=p80, n=prompts, **baseline)
        rows.append(Row(SUITE, case, "-", "qkv" if step != "sha256" else "hashlib", step, value, "us", shape, **made))
    times = []
    for _ in range(options.rounds):
        began = time.perf_counter()
        found = pool.match(Prefix(space, tokens, tail_tokens=0)).blocks
        times.append((time.perf_counter() - began) * 1e3)
        assert found == options.prompt
    value, p20, p80 = _spread(times)
    note = f"{options.prompt * BLOCK_TOKENS:,} tokens, naming included"
    return [*rows, Row(SUITE, case, "-", "qkv", "match", value, "ms", shape, p20=p20, p80=p80, n=len(times), note=note)]


def _prompt(pool: BlockPool, space: Namespace, tokens: list[int], blocks: int) -> dict[str, float]:
    spent: dict[str, float] = dict.fromkeys((*STEPS, "sha256"), 0.0)

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = call()
        spent[name] += time.perf_counter() - begin
        return result

    content = bytes(4 * BLOCK_TOKENS)
    timed("sha256", lambda: [hashlib.sha256(bytes(32) + content).digest() for _ in range(blocks)])
    prefix = timed("hash", lambda: Prefix(space, tokens, tail_tokens=0))
    ids = timed("allocate", partial(pool.allocate, blocks))
    timed("publish", partial(pool.publish, prefix, 0, ids, 1.0))
    assert timed("lookup", partial(pool.acquire, prefix)) == ids
    timed("release", partial(pool.release, ids))
    timed("release", partial(pool.release, ids))
    return spent


def _spread(values: list[float]) -> tuple[float, float, float]:
    """Mean, p20, p80: the mean, because a rare slow block counts too."""
    fifths = quantiles(values, n=5) if len(values) > 1 else [values[0]] * 4
    return sum(values) / len(values), fifths[0], fifths[3]
