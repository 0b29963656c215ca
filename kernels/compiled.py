"""`jit`: compile a function with numba and keep the result on disk, until any of the sources it may contain changes."""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba


@cache
def fingerprint() -> str:
    """A hash of every source file that ends up in compiled code."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*_*.py")):
        if file.stem.endswith(("_llvm", "_numba")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def jit(function: Callable[..., Any]) -> Any:
    """numba.njit without the GIL and without fast-math: a NaN must stay visible.

    numba compares the time stamp of the function's own file only. What it calls lies in other files, and a release or
    a checkout that changes one of those would go on with old code: so the stamp becomes the fingerprint of them all.
    """
    made: Any = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    kept = getattr(made._cache, "_cache_file", None)  # none where numba's cache is switched off
    if kept is not None:
        kept._source_stamp = fingerprint()
    return made
