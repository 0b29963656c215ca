"""How fast this machine reads bytes: the limit that any attention over dense K and V runs into.

Several ways to read are tried at the thread count in use and the fastest is kept. What is read is summed, so that
nothing is left out. Also pushes everything else out of the last-level cache: a decode step of a real model finds its
K and V cold, because the weights and the other layers have streamed through since the last token.
"""

import importlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from qkv.bench.timing import Stats, interleave

Read = Callable[[torch.Tensor], int]
PROBE_BYTES = 1 << 28
MOST_EVICTED = 1 << 29


def buffer(nbytes: int) -> torch.Tensor:
    """`nbytes`, rounded up to 64, of touched memory: int64 [n]."""
    return torch.arange(-(-nbytes // 64) * 8, dtype=torch.int64)


def cache_bytes() -> int:
    """Bytes of the last-level cache as the system states them (a virtual machine shares it); 64 MiB if it does not."""
    found = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(path.read_text().strip().rstrip("K")) << 10 for path in found), default=1 << 26)


@cache
def _summing() -> Any:
    """numba's sum of int64 [n], four streams at once (a fifth faster than one here); None: no numba."""
    try:
        numba = importlib.import_module("numba")
    except ImportError:
        return None

    def total(values: Any) -> Any:
        n = values.shape[0] // 4
        p, q, r, s = values[:n], values[n : 2 * n], values[2 * n : 3 * n], values[3 * n : 4 * n]
        a = b = c = d = 0
        for i in range(n):
            a += p[i]
            b += q[i]
            c += r[i]
            d += s[i]
        for i in range(4 * n, values.shape[0]):
            a += values[i]
        return a + b + c + d

    return numba.njit("int64(int64[::1])", nogil=True)(total)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="qkv-bench-read")


def _shared(one: Callable[[Any], int], threads: int) -> Read:
    """`one` over equal parts, the caller's thread included."""
    if threads == 1:
        return lambda values: one(values.numpy())

    def read(values: torch.Tensor) -> int:
        parts = torch.tensor_split(values, threads)
        others = [_pool(threads - 1).submit(one, part.numpy()) for part in parts[1:]]
        return int(one(parts[0].numpy())) + sum(int(other.result()) for other in others)

    return read


def readers(threads: int) -> dict[str, Read]:
    """Every way to sum int64 [n] on `threads` threads, which torch must be set to already."""
    ways: dict[str, Read] = {
        "torch": lambda values: int(values.sum()),
        "numpy": _shared(lambda part: part.sum(), threads),
    }
    if (total := _summing()) is not None:
        ways["numba"] = _shared(total, threads)
    return ways


class Reader:
    """The fastest way to read on torch's current number of threads. `name` says which; `bytes_per_second` how fast."""

    def __init__(self, probe_bytes: int = PROBE_BYTES, rounds: int = 5) -> None:
        values = buffer(probe_bytes)
        ways = readers(torch.get_num_threads())
        times = interleave({name: partial(way, values) for name, way in ways.items()}, rounds, warmup=1)
        self.name = min(times, key=lambda name: Stats.of(times[name]).median)
        self._read = ways[self.name]
        self._best = values.nbytes / min(times[self.name])

    @property
    def bytes_per_second(self) -> float:
        """The highest rate seen, so that no share of it flatters."""
        return self._best

    def __call__(self, values: torch.Tensor) -> None:
        """Read all of int64 [n]; the rate counts if it is the highest so far and n is large."""
        start = time.perf_counter()
        self._read(values)
        if values.nbytes >= MOST_EVICTED // 8:
            self._best = max(self._best, values.nbytes / (time.perf_counter() - start))

    def evictor(self, nbytes: int | None) -> Callable[[str], None] | None:
        """For `before` of `interleave`: reads that many bytes (None: last-level cache, at most 512 MiB). 0: None."""
        size = min(cache_bytes(), MOST_EVICTED) if nbytes is None else nbytes
        if not size:
            return None
        values = buffer(size)
        return lambda name: self(values)
