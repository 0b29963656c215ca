"""KVManager: sequences that append exact K and V, keep them in sealed blocks, and attend to those blocks.

Life of a block: append -> exact tail -> seal (once) -> read by attend, shared by fork -> released with its last owner.
A sealed block is never encoded again, so results do not depend on how tokens arrived. Knows no model and no engine.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from qkv import ops
from qkv.errors import SequenceClosed, ShapeError
from qkv.formats import get_format
from qkv.offload.device import DeviceTier
from qkv.pool import BlockPool
from qkv.sequence import Exact, Sequence
from qkv.shapes import check, check_like
from qkv.spec import BLOCK_TOKENS, AttendOptions, Format, KVView, LayerSpec, RecordLayout

SEAL_BLOCKS = 16  # blocks encoded at once: bounds the scratch of a long prompt


@dataclass(frozen=True)
class Memory:
    """Bytes that the manager's tensors occupy, all layers and sequences."""

    records: int
    exact: int

    @property
    def total(self) -> int:
        return self.records + self.exact


class KVManager:
    """The KV cache of one model on one device.

    format       a name, `K/V`, or a Format; what is not exact is sealed in blocks of 128 tokens
    sink_tokens, tail_tokens  first and newest tokens kept exact; None: the format's default
    num_blocks   most blocks ever held; None: grows
    A layer's heads, head_dim, dtype and device are fixed by its first append. Not thread-safe.
    Raises FormatError, ShapeError.
    """

    def __init__(
        self,
        num_layers: int,
        format: str | Format = "kivi4",
        *,
        sink_tokens: int | None = None,
        tail_tokens: int | None = None,
        num_blocks: int | None = None,
    ) -> None:
        self.format = get_format(format)
        self.sink_tokens = self.format.sink_tokens if sink_tokens is None else sink_tokens
        self.tail_tokens = self.format.tail_tokens if tail_tokens is None else tail_tokens
        for name, value, least in (
            ("num_layers", num_layers, 1),
            ("sink_tokens", self.sink_tokens, 0),
            ("tail_tokens", self.tail_tokens, 0),
            ("num_blocks", 1 if num_blocks is None else num_blocks, 1),
        ):
            if not isinstance(value, int) or value < least:
                raise ShapeError(f"{name}: got {value!r}, wanted a whole number of at least {least}")
        self.num_layers = num_layers
        self._pool = BlockPool(num_blocks)
        self._tier = DeviceTier(num_layers)
        self._layouts: list[RecordLayout | None] = [None] * num_layers
        self._sequences: dict[int, Sequence] = {}
        self._ids = itertools.count()

    def open(self) -> Sequence:
        """A new, empty sequence."""
        sequence = Sequence(next(self._ids), [None] * self.num_layers)
        self._sequences[sequence.id] = sequence
        return sequence

    def length(self, sequence: Sequence) -> int:
        """Tokens stored in every layer (the least, in the middle of a step)."""
        self._mine(sequence)
        return min(sequence.layer_length(layer) for layer in range(self.num_layers))

    @torch.no_grad()
    def append(self, sequence: Sequence, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v [H, T, D] (K after RoPE) behind the layer's tokens; seals every full block older than the tail.

        All layers of a step append the same T. Copies what it keeps.
        Raises ShapeError, FormatError (inf, NaN), OutOfBlocks, SequenceClosed; then nothing has changed.
        """
        layout = self._bind(layer, k, v)
        self._mine(sequence)
        exact = sequence.layers[layer]
        if exact is None:
            exact = Exact.empty(layout.layer, self.sink_tokens, self.tail_tokens)
        # a sink that a crop has shortened fills up again, unless blocks already stand behind it
        to_sink = 0 if exact.sealed or exact.tail_used else min(self.sink_tokens - exact.sink_used, k.shape[1])
        waiting = exact.tail_used + k.shape[1] - to_sink
        to_seal = max(0, (waiting - self.tail_tokens) // BLOCK_TOKENS)
        if not to_sink and not to_seal:  # nearly every decode step
            ops.store_tokens(k, v, exact.tail, exact.tail_used)
            self._layouts[layer], sequence.layers[layer], exact.tail_used = layout, exact, waiting
            return
        for name, x in (("k", k), ("v", v)):
            ops.check_finite(name, x, ("head", "token", "channel"))
        missing = exact.sealed + to_seal - len(sequence.block_ids)
        if missing > 0:
            sequence.block_ids += self._pool.allocate(missing)
            sequence.block_lengths += [BLOCK_TOKENS] * missing
        self._layouts[layer] = layout
        sequence.layers[layer] = exact
        if to_sink:
            for side, x in enumerate((k, v)):
                exact.sink[side, :, exact.sink_used : exact.sink_used + to_sink] = x[:, :to_sink]
            exact.sink_used += to_sink
            k, v = k[:, to_sink:], v[:, to_sink:]
        if to_seal:
            k, v = self._seal_oldest(sequence, layer, exact, k, v, to_seal * BLOCK_TOKENS)
        for side, x in enumerate((k, v)):
            exact.tail[side, :, exact.tail_used : exact.tail_used + x.shape[1]] = x
        exact.tail_used += k.shape[1]

    def attend(
        self,
        sequence: Sequence,
        layer: int,
        q: torch.Tensor,
        options: AttendOptions,
        *,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
        need_lse: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of q [H*G, Q, D], the last Q positions, over all stored tokens and then `new`.

        `new` k, v [H, T, D] take part exactly, as a prompt's own pass should see them; `append` them afterwards.
        Returns out [H*G, Q, D] and the log-sum-exp float32 [H*G, Q] (None: not asked and not at hand).
        Changes nothing. Raises ShapeError, SequenceClosed.
        """
        return ops.attend(q, self.view(sequence, layer, new), options, need_lse)

    def attend_many(
        self,
        sequences: list[Sequence],
        layer: int,
        queries: list[torch.Tensor],
        options: AttendOptions,
        *,
        new: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
        need_lse: bool = True,
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """`attend` for many sequences in one go; their lengths and query counts may differ. Decode steps share threads.

        Changes nothing. Raises ShapeError, SequenceClosed.
        """
        steps: list[Any] = new or [None] * len(sequences)
        views = [self.view(sequence, layer, step) for sequence, step in zip(sequences, steps, strict=True)]
        return ops.attend_many(queries, views, options, need_lse)

    def view(self, sequence: Sequence, layer: int, new: tuple[torch.Tensor, torch.Tensor] | None = None) -> KVView:
        """Where the sequence's K and V of one layer lie, `new` [H, T, D] behind them. Copies only `new`."""
        self._mine(sequence)
        if new is not None:
            layout = self._bind(layer, *new)
        else:
            bound = self._layouts[self._in_range(layer)]
            if bound is None:
                raise ShapeError(f"layer {layer}: nothing appended yet; append, or pass `new`")
            layout = bound
        spec = layout.layer
        exact = sequence.layers[layer] or Exact.empty(spec, 0, 0)
        records, table = self._tier.records(layer), sequence.table(spec.device)
        return KVView(
            layout,
            torch.zeros(0, layout.record_bytes, dtype=torch.uint8, device=spec.device) if records is None else records,
            table[0, : exact.sealed],
            table[1, : exact.sealed],
            exact.sink[:, :, : exact.sink_used],
            exact.tail[:, :, : exact.tail_used],
            exact.tail[:, :, :0] if new is None else torch.stack(list(new)),
            sum(sequence.block_lengths[: exact.sealed]),
        )

    def gather(self, sequence: Sequence, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense dequantised k, v [H, T, D] in the model dtype, for consumers that cannot read records. Allocates."""
        view = self.view(sequence, layer)
        spec, first = view.layout.layer, view.sink.shape[2]
        dense = torch.empty(2, spec.kv_heads, view.tokens, spec.head_dim, dtype=spec.dtype, device=spec.device)
        dense[:, :, :first] = view.sink
        largest = torch.finfo(spec.dtype).max
        for block_id, length in zip(view.block_ids.tolist(), view.block_lengths.tolist(), strict=True):
            for side, values in enumerate(ops.unseal(view.records[block_id].unsqueeze(0), view.layout)):
                # scale * code + minimum may round past the dtype's largest value
                dense[side, :, first : first + length] = values[0, :, :length].clamp(-largest, largest)
            first += length
        dense[:, :, first:] = view.tail
        return dense[0], dense[1]

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same tokens: shares every record, copies sink and tail."""
        self._mine(sequence)
        self._settled(sequence, "fork")
        twin = self.open()
        twin.layers = [exact.copy() if exact else None for exact in sequence.layers]
        twin.block_ids, twin.block_lengths = list(sequence.block_ids), list(sequence.block_lengths)
        self._pool.retain(twin.block_ids)
        return twin

    def crop(self, sequence: Sequence, length: int) -> None:
        """Keep the first `length` tokens. Records are never rewritten: the last one kept may count fewer tokens.

        Raises ShapeError if `length` is negative or beyond the sequence; then nothing has changed.
        """
        self._mine(sequence)
        have = self._settled(sequence, "crop")
        if not 0 <= length <= have:
            raise ShapeError(f"crop: got length {length}, wanted 0 to {have}, the tokens stored")
        layers = [exact for exact in sequence.layers if exact]
        if not layers:
            return
        sink, tail = layers[0].sink_used, layers[0].tail_used
        surplus = have - length
        from_tail = min(surplus, tail)
        surplus -= from_tail
        while surplus and sequence.block_ids:
            taken = min(surplus, sequence.block_lengths[-1])
            sequence.block_lengths[-1] -= taken
            surplus -= taken
            if not sequence.block_lengths[-1]:
                sequence.block_lengths.pop()
                self._pool.release([sequence.block_ids.pop()])
        for exact in layers:
            exact.tail_used = tail - from_tail
            exact.sealed = len(sequence.block_ids)
            exact.sink_used = sink - surplus

    def close(self, sequence: Sequence) -> None:
        """Give back the sequence's blocks and buffers; any later use of it raises SequenceClosed."""
        self._mine(sequence)
        self._pool.release(sequence.block_ids)
        sequence.closed, sequence.layers, sequence.block_ids = True, [], []
        del self._sequences[sequence.id]

    def memory(self) -> Memory:
        """Bytes of all tensors held, counted from the sizes that were asked for."""
        records = sum(
            self._pool_rows(layer) * layout.record_bytes
            for layer, layout in enumerate(self._layouts)
            if layout is not None
        )
        exact = sum(held.nbytes for sequence in self._sequences.values() for held in sequence.layers if held)
        return Memory(records, exact)

    def check(self) -> None:
        """Walk the whole state; AssertionError if anything disagrees."""
        holders: dict[int, int] = {}
        for sequence in self._sequences.values():
            assert not sequence.closed
            assert len(sequence.block_ids) == len(sequence.block_lengths)
            assert len(set(sequence.block_ids)) == len(sequence.block_ids)
            assert all(0 < length <= BLOCK_TOKENS for length in sequence.block_lengths)
            for block_id in sequence.block_ids:
                holders[block_id] = holders.get(block_id, 0) + 1
            for layer, exact in enumerate(sequence.layers):
                if exact is None:
                    continue
                assert 0 <= exact.sink_used <= exact.sink.shape[2] == self.sink_tokens
                assert 0 <= exact.tail_used <= exact.tail.shape[2]
                assert exact.sealed <= len(sequence.block_ids)
                assert all(block_id < self._pool_rows(layer) for block_id in sequence.block_ids[: exact.sealed])
        self._pool.check(holders)
        assert self._tier.nbytes == self.memory().records

    def layout(self, layer: int) -> RecordLayout | None:
        """The layer's record layout; None before its first append."""
        return self._layouts[self._in_range(layer)]

    def _pool_rows(self, layer: int) -> int:
        records = self._tier.records(layer)
        return 0 if records is None else records.shape[0]

    def _seal_oldest(
        self, sequence: Sequence, layer: int, exact: Exact, k: torch.Tensor, v: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Seal the `count` oldest tokens of the tail and k, v [H, T, D] behind it; returns what is left of k and v.

        Blocks that lie in k and v whole are read there. The tail keeps what is newer than `count`.
        """
        from_tail = min(exact.tail_used, count)
        joined = -(-from_tail // BLOCK_TOKENS) * BLOCK_TOKENS - from_tail  # new tokens that complete the tail's blocks
        if from_tail:
            old = exact.tail[:, :, :from_tail]
            self._seal(sequence, layer, exact, *(torch.cat([old[i], x[:, :joined]], 1) for i, x in enumerate((k, v))))
            exact.tail_used -= from_tail
            exact.tail[:, :, : exact.tail_used] = exact.tail[:, :, from_tail : from_tail + exact.tail_used].clone()
        end = max(joined, count - from_tail)
        self._seal(sequence, layer, exact, k[:, joined:end], v[:, joined:end])
        return k[:, end:], v[:, end:]

    def _seal(self, sequence: Sequence, layer: int, exact: Exact, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k, v [H, n*128, D] into the table's next n records of this layer."""
        layout = self._layouts[layer]
        assert layout is not None
        if not k.shape[1]:
            return
        records = self._tier.reserve(layer, self._pool.capacity, layout.record_bytes, layout.layer.device)
        blocks = [torch.unflatten(x, 1, (-1, BLOCK_TOKENS)).transpose(0, 1) for x in (k, v)]  # [n, H, 128, D]
        ids = sequence.block_ids[exact.sealed : exact.sealed + len(blocks[0])]
        for first in range(0, len(ids), SEAL_BLOCKS):
            run = slice(first, first + SEAL_BLOCKS)
            ops.seal(blocks[0][run], blocks[1][run], layout, records, ids[run], checked=True)
        exact.sealed += len(ids)

    def _bind(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> RecordLayout:
        """The layer's layout, or what a first append of these K and V would fix. Raises ShapeError, FormatError."""
        held = self._layouts[self._in_range(layer)]
        if held is None:
            sizes = check("H T D", k=k, v=v)
            held = RecordLayout(self.format, LayerSpec(sizes["H"], sizes["D"], k.dtype, k.device))
            check_like("v", v, k.dtype, k.device)
            return held
        if k.shape != v.shape or k.dim() != 3 or k.shape[::2] != (held.layer.kv_heads, held.layer.head_dim):
            check("H T D", {"H": held.layer.kv_heads, "D": held.layer.head_dim}, k=k, v=v)
        check_like("k", k, held.layer.dtype, held.layer.device)
        check_like("v", v, held.layer.dtype, held.layer.device)
        return held

    def _in_range(self, layer: int) -> int:
        if not 0 <= layer < self.num_layers:
            raise ShapeError(f"layer: got {layer}, wanted 0 to {self.num_layers - 1}")
        return layer

    def _mine(self, sequence: Sequence) -> None:
        if sequence.closed:
            raise SequenceClosed(f"sequence {sequence.id} is closed; open a new one")
        if self._sequences.get(sequence.id) is not sequence:
            raise ShapeError(f"sequence {sequence.id} belongs to another KVManager")

    def _settled(self, sequence: Sequence, verb: str) -> int:
        """The length, if all layers agree on it."""
        lengths = {sequence.layer_length(layer) for layer in range(self.num_layers)}
        if len(lengths) > 1:
            raise ShapeError(
                f"{verb}: layers hold {min(lengths)} to {max(lengths)} tokens; finish the step in every layer first"
            )
        return lengths.pop()
