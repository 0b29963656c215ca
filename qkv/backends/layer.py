"""QKVLayer: one layer of a transformers cache, between `update` and attention."""

import warnings
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from qkv.backends.handle import KVHandle
from qkv.backends.rows import Rows
from qkv.errors import UnsupportedModel


class QKVLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """`pending` is the K, V of a step that `update` has taken and attention has not committed yet."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, rows: Rows, index: int) -> None:
        super().__init__()
        self.rows, self.index = rows, index
        rows.layers.append(self)
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        self.rows.open(key_states.shape[0])
        self.is_initialized = True

    def fork(self, rows: Rows) -> "QKVLayer":
        """The same layer over other rows. Nothing may be pending."""
        twin = QKVLayer(rows, self.index)
        twin.is_initialized = self.is_initialized
        return twin

    def update(self, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """New K, V [B, H, T, D] -> handles for all K, V [B, H, stored + T, D]. Attention commits it."""
        if k.shape != v.shape:
            raise UnsupportedModel(
                f"keys {list(k.shape)} and values {list(v.shape)} differ in shape; use transformers' own cache for it"
            )
        if not self.index:
            self.rows.recover()
        self.settle()
        self.lazy_initialization(k)
        self.pending = (k, v)
        self.rows.waiting[self.index] = k.shape[2]
        shape = (k.shape[0], k.shape[1], self.rows.widths[self.index] + k.shape[2], k.shape[3])
        return KVHandle(self, shape, k, lambda: self._dequantised(0)), KVHandle(
            self, shape, v, lambda: self._dequantised(1)
        )

    def commit(self, new: torch.Tensor | None) -> None:
        """Append the pending step; `new` bool [B, T] says which of it are tokens (None: all)."""
        assert self.pending is not None
        k, v = self.pending
        try:
            self.rows.write(self.index, new, k, v)
        except BaseException:
            self.drop()
            raise
        self.committed(new)

    def drop(self) -> None:
        """Forget the pending step."""
        self.pending = None
        self.rows.waiting.pop(self.index, None)

    def committed(self, new: torch.Tensor | None) -> None:
        """The pending step is stored."""
        assert self.pending is not None
        tokens = self.pending[0].shape[2]
        self.drop()
        self.rows.advance(self.index, new, tokens)

    def settle(self) -> None:
        """Commit what another attention has read dense; all of it counts as tokens, for no mask came with it."""
        if self.pending is not None:
            self.commit(None)

    def dense(self, side: int) -> torch.Tensor:
        """K (0) or V (1) [B, H, stored + pending, D] as transformers pads it. Allocates all of it."""
        stored = self.rows.dense(self.index)[side] if self.rows.widths[self.index] else None
        pending = self.pending[side] if self.pending is not None else None
        return torch.cat([part for part in (stored, pending) if part is not None], dim=2)

    def _dequantised(self, side: int) -> torch.Tensor:
        if self.rows.widths[self.index]:
            warnings.warn(
                "qkv: an attention other than qkv's reads this cache; every step dequantises all of it. "
                "Call qkv.backends.transformers.enable(model) first",
                stacklevel=2,
            )
        return self.dense(side)

    def get_seq_length(self, *args: Any) -> int:
        """What a forward pass may build on: a step that has not reached every layer does not count."""
        return self.rows.length()

    def get_mask_sizes(self, query: int | torch.Tensor) -> tuple[int, int]:
        """(keys that attention will see, position of the first); 4.57 passes positions, later releases a count."""
        return self.get_seq_length() + (query if isinstance(query, int) else query.shape[0]), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.16
