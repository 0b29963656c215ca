"""Bytes that a call allocates on the way: the highest sum of live numpy arrays and torch tensors that it made."""

import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts storages that ops return and that nothing held before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                self._hold(tensor)
        return made

    def _hold(self, tensor: torch.Tensor) -> None:
        size = tensor.untyped_storage().nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(tensor, self._drop, size)

    def _drop(self, size: int) -> None:
        self.live -= size


def peak(call: Callable[[], object]) -> int:
    """Of one call, its result included. torch tensors made on other threads, or inside one torch op, are not seen."""
    _watched(call)  # what is imported and kept at a first call is not workspace
    return _watched(call)


def _watched(call: Callable[[], object]) -> int:
    watch = _Watch()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        with watch:
            call()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return watch.peak + most - before
