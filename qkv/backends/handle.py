"""KVHandle: what `cache.update()` returns in place of K or V. True shape, no storage.

qkv's attention reads the records behind it. Anything else that touches it gets the dequantised tensor, so a consumer
that does not know qkv is slow, never wrong.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map


class KVHandle(torch.Tensor):
    """Stands for K or V [B, H, T, D] of one layer: everything stored and what the current step adds.

    `owner` is the layer that made it; `dense` returns the real tensor and may be called more than once.
    """

    owner: Any
    _dense: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(
        cls, owner: Any, shape: tuple[int, ...], like: torch.Tensor, dense: Callable[[], torch.Tensor]
    ) -> "KVHandle":
        handle: KVHandle = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        handle.owner = owner
        handle._dense = dense
        return handle

    def dense(self) -> torch.Tensor:
        """The dequantised tensor. Allocates all of it."""
        return self._dense()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        return f"KVHandle(shape={list(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types the disabled default, not the protocol
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def plain(value: Any) -> Any:
            return value.dense() if isinstance(value, KVHandle) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
