"""A pool of threads for compiled code that releases the GIL, and the rule for how many a piece of work gets."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from numba import config


@cache
def _workers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="qkv")


# threads do not survive a fork: a child that kept the executor would wait for them for ever
if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_workers.cache_clear)


def threads_for(pieces: int, fewest: int) -> int:
    """Threads worth having: as many as torch and NUMBA_NUM_THREADS allow, with at least `fewest` pieces each."""
    most = int(config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]  # set when numba reads its environment
    return max(1, min(torch.get_num_threads(), most, pieces // fewest))


def share(run: Callable[[int], None], threads: int) -> None:
    """run(0) here and run(1) ... run(threads - 1) on other threads; returns when all have, raises what one raised."""
    others = [_workers(threads - 1).submit(run, index) for index in range(1, threads)]
    try:
        run(0)
    finally:
        # their work space must outlive them, whatever happened here
        done = [other.exception() for other in others]
    for error in done:
        if error is not None:
            raise error
