"""Options of a measurement, refused with one line before anything long runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from qkv.bench.data import Geometry
from qkv.errors import InputError
from qkv.formats import get_format
from qkv.spec import LayerSpec, RecordLayout

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MOST_THREADS = 1024


def at_least(name: str, value: int, least: int) -> None:
    """Raises InputError if `value` is below `least`."""
    if value < least:
        raise InputError(f"{name}: got {value}, wanted at least {least}")


def each_at_least(name: str, values: Sequence[int], least: int) -> None:
    """As `at_least`, for a list that may not be empty."""
    if not values:
        raise InputError(f"{name}: got none, wanted at least one")
    for value in values:
        at_least(name, value, least)


def formats(names: Sequence[str]) -> tuple[str, ...]:
    """The canonical ids. Raises FormatError for an unknown one, InputError for none."""
    if not names:
        raise InputError("format: got none, wanted at least one; see `qkv formats`")
    return tuple(dict.fromkeys(get_format(name).id for name in names))


def dtype(name: str) -> torch.dtype:
    """Raises InputError."""
    if name not in DTYPES:
        raise InputError(f"dtype: got {name!r}, wanted one of {', '.join(DTYPES)}")
    return DTYPES[name]


def thread_count(count: int | None) -> None:
    """Raises InputError."""
    if count is not None and not 1 <= count <= MOST_THREADS:
        raise InputError(f"threads: got {count}, wanted 1 to {MOST_THREADS}; leave it out to use torch's own number")


@contextmanager
def threads(count: int | None) -> Iterator[int]:
    """torch on that many threads (None: as it is), put back afterwards. Raises InputError."""
    thread_count(count)
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def geometry(shape: Geometry, names: Sequence[str]) -> None:
    """Raises InputError for sizes below 1, FormatError if a format cannot hold heads of that many channels."""
    for name in ("kv_heads", "group", "head_dim"):
        at_least(name, getattr(shape, name), 1)
    for format in formats(names):
        RecordLayout(get_format(format), LayerSpec(shape.kv_heads, shape.head_dim, shape.dtype))
