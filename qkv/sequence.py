"""One sequence: its block table, and its exact sink and tail in each layer.

position  0 ..... sink_tokens | block 0 | block 1 | ... | tail, oldest first
held by   Exact.sink          | Sequence.block_ids      | Exact.tail
"""

from dataclasses import dataclass, field

import torch

from qkv.spec import BLOCK_TOKENS, LayerSpec


@dataclass
class Exact:
    """Exact tokens of one sequence in one layer: buffers [2, H, capacity, D], K then V, and how much is used."""

    sink: torch.Tensor
    tail: torch.Tensor
    sink_used: int = 0
    tail_used: int = 0
    sealed: int = 0  # blocks of the table that this layer has written

    @classmethod
    def empty(cls, layer: LayerSpec, sink_tokens: int, tail_tokens: int) -> "Exact":
        # a buffer made under inference_mode could not be written outside it
        @torch.inference_mode(False)
        def buffer(tokens: int) -> torch.Tensor:
            return torch.zeros(2, layer.kv_heads, tokens, layer.head_dim, dtype=layer.dtype, device=layer.device)

        return cls(buffer(sink_tokens), buffer(tail_tokens + BLOCK_TOKENS - 1))

    def copy(self) -> "Exact":
        with torch.inference_mode(False):
            return Exact(self.sink.clone(), self.tail.clone(), self.sink_used, self.tail_used, self.sealed)

    @property
    def nbytes(self) -> int:
        return self.sink.nbytes + self.tail.nbytes


@dataclass(eq=False)
class Sequence:
    """A handle from `KVManager.open` or `fork`; only the manager changes it."""

    id: int
    layers: list[Exact | None]
    block_ids: list[int] = field(default_factory=list)
    block_lengths: list[int] = field(default_factory=list)  # below 128 only after a crop
    closed: bool = False
    _table: tuple[list[int], list[int], torch.Tensor] | None = None

    def table(self, device: torch.device) -> torch.Tensor:
        """Block ids and lengths as int64 [2, N] on a device. Made anew only when the table has changed."""
        held = self._table
        if held is None or held[0] != self.block_ids or held[1] != self.block_lengths or held[2].device != device:
            ids, lengths = list(self.block_ids), list(self.block_lengths)
            with torch.inference_mode(False):
                held = self._table = (ids, lengths, torch.tensor([ids, lengths], dtype=torch.int64, device=device))
        return held[2]

    def layer_length(self, layer: int) -> int:
        """Tokens stored in one layer."""
        exact = self.layers[layer]
        if exact is None:
            return 0
        return exact.sink_used + sum(self.block_lengths[: exact.sealed]) + exact.tail_used
