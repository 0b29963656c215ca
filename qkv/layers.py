"""The tensors of every layer: records and exact pieces, and how a step's tokens come to lie in them.

Knows where bytes go, not who holds them (qkv/ledger.py does).
"""

from collections import abc

import torch

from qkv import ops
from qkv.budget import Budget
from qkv.errors import ShapeError
from qkv.ledger import Ledger
from qkv.offload.device import DeviceTier
from qkv.sequence import Growth, Holding, Sequence
from qkv.shapes import check, check_like
from qkv.spec import BLOCK_TOKENS, PIECE_TOKENS, Format, KVView, LayerSpec, RecordLayout

SEAL_BLOCKS = 16  # blocks encoded at once: bounds the scratch of a long prompt
AXES = ("head", "token", "channel")


class Layers:
    """One row a block in `records`, one row a piece in `exact`, of every layer; made at a layer's first tokens.

    records: where records lie; None: on the device.
    """

    def __init__(
        self,
        count: int,
        format: Format,
        declared: list[LayerSpec] | None = None,
        budget: Budget | None = None,
        records: DeviceTier | None = None,
    ) -> None:
        self.count, self.format, self.declared, self.budget = count, format, declared, budget
        self.records, self.exact = records or DeviceTier(count), DeviceTier(count)
        self.layouts: list[RecordLayout | None] = [None] * count
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by layer: its pieces as bytes, and typed
        self._empty: dict[RecordLayout, torch.Tensor] = {}

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of one block and of one exact piece, in all layers bound so far."""
        layouts = [layout for layout in self.layouts if layout is not None]
        pieces = PIECE_TOKENS * sum(layout.layer.token_bytes for layout in layouts)
        return sum(layout.record_bytes for layout in layouts), pieces

    def index(self, layer: int) -> int:
        """The layer's number. Raises ShapeError."""
        if not 0 <= layer < self.count:
            raise ShapeError(f"layer: got {layer}, wanted 0 to {self.count - 1}")
        return layer

    def bind(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> RecordLayout:
        """The layer's layout, or what a first append of k, v [H, T, D] would fix. Raises ShapeError, FormatError."""
        held = self.layouts[self.index(layer)]
        if held is None:
            sizes = check("H T D", k=k, v=v)
            held = RecordLayout(self.format, LayerSpec(sizes["H"], sizes["D"], k.dtype, k.device))
            check_like("v", v, k.dtype, k.device)
            if self.declared is not None and held.layer != self.declared[layer]:
                raise ShapeError(f"layer {layer}: got {held.layer}, wanted {self.declared[layer]}, as was declared")
            return next((other for other in self.layouts if other == held), held)  # one object: quick to compare
        spec = held.layer
        if k.shape != v.shape or k.dim() != 3 or k.shape[::2] != (spec.kv_heads, spec.head_dim):
            check("H T D", {"H": spec.kv_heads, "D": spec.head_dim}, k=k, v=v)
        check_like("k", k, spec.dtype, spec.device)
        check_like("v", v, spec.dtype, spec.device)
        return held

    def view(
        self, layer: int, layout: RecordLayout, holding: Holding, new: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> KVView:
        """Where a holding's K and V of one layer lie, `new` [H, T, D] behind them. Copies only `new`."""
        records, device = self.records.records(layer), layout.layer.device
        return KVView(
            layout,
            torch.zeros(0, layout.record_bytes, dtype=torch.uint8, device=device) if records is None else records,
            self._pieces(layer, layout),
            holding.table(device),
            self._none(layout) if new is None else torch.stack(new),
        )

    def write(
        self, layer: int, before: Holding, growth: Growth, k: torch.Tensor, v: torch.Tensor, capacity: tuple[int, int]
    ) -> None:
        """One layer's part of a step: k, v [H, T, D] to sink, records and tail. Changes nothing that `before` has.

        capacity: blocks and pieces that the pools may name. Raises FormatError (inf, NaN).
        """
        layout = self.bind(layer, k, v)
        self.layouts[layer] = layout
        spec, start = layout.layer, before.counts.tail
        table = growth.after.table(spec.device)
        if self.budget is not None:  # at full size at once: growing would hold old and new for a moment
            capacity = self.budget.num_blocks, self.budget.num_pieces
        self.exact.reserve(layer, capacity[1], PIECE_TOKENS * spec.token_bytes, spec.device)
        for source, target in growth.copies:
            self.exact.copy_row(layer, source, target)
        pieces = self._pieces(layer, layout)
        if growth.to_sink or growth.to_seal:  # rarely in decoding
            for name, x in (("k", k), ("v", v)):
                ops.check_finite(name, x, AXES)
            if joins := growth.to_sink:
                ops.store_tokens(k[:, :joins], v[:, :joins], pieces, table.sink_ids, before.counts.sink)
                k, v = k[:, joins:], v[:, joins:]
            if growth.to_seal:
                self.records.reserve(layer, capacity[0], layout.record_bytes, spec.device)
                k, v = self._seal_oldest(layer, layout, before, growth, k, v)
                start = max(0, start - growth.to_seal * BLOCK_TOKENS)
        if k.shape[1]:
            ops.store_tokens(k, v, pieces, table.tail_ids, start)

    def reserve(
        self, layer: int, layout: RecordLayout, capacity: tuple[int, int]
    ) -> tuple[RecordLayout, torch.Tensor | None]:
        """Room for stored rows of a layer; its layout and its records, if those stay where they are.

        capacity: blocks and pieces that the pools may name. Raises ShapeError (a layer of other geometry).
        """
        held = self.layouts[self.index(layer)]
        if held is not None and held != layout:
            raise ShapeError(f"layer {layer}: got stored {layout.layer}, wanted {held.layer}")
        layout = held or next((other for other in self.layouts if other == layout), layout)
        self.layouts[layer] = layout
        spec = layout.layer
        if self.budget is not None:
            capacity = self.budget.num_blocks, self.budget.num_pieces
        self.exact.reserve(layer, capacity[1], PIECE_TOKENS * spec.token_bytes, spec.device)
        records = self.records.reserve(layer, capacity[0], layout.record_bytes, spec.device)
        return layout, records if self.records.resident(layer) else None

    def place(
        self,
        layer: int,
        layout: RecordLayout,
        holding: Holding,
        parts: tuple[torch.Tensor, ...],
        capacity: tuple[int, int],
        landed: torch.Tensor | None,
    ) -> None:
        """Bytes of a stored layer to where `holding` says: parts are sink [2, H, T, D], records, tail, as uint8.

        landed: where its records have been written already. Else as `reserve`.
        """
        layout, _ = self.reserve(layer, layout, capacity)
        spec, sink, tail = layout.layer, holding.counts.sink, holding.counts.tail
        table, records = holding.table(spec.device), self.records.records(layer)
        assert records is not None
        if records is not landed:  # the pool has grown since: to other memory
            land(records, holding.block_ids, parts[1])
            self.records.wrote(layer, list(holding.block_ids))
        for data, ids, tokens in ((parts[0], table.sink_ids, sink), (parts[2], table.tail_ids, tail)):
            if tokens:
                k, v = data.clone().view(spec.dtype).view(2, spec.kv_heads, tokens, spec.head_dim).to(spec.device)
                ops.store_tokens(k, v, self._pieces(layer, layout), ids, 0)

    def _seal_oldest(
        self, layer: int, layout: RecordLayout, before: Holding, growth: Growth, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Seal the step's blocks: the oldest tokens of the tail and of k, v [H, T, D] behind it.

        Blocks that lie in k and v whole are read there. Returns what is left of k and v.
        """
        count = growth.to_seal * BLOCK_TOKENS
        from_tail = min(before.counts.tail, count)
        joined = -(-from_tail // BLOCK_TOKENS) * BLOCK_TOKENS - from_tail  # new tokens that complete the tail's blocks
        first = (from_tail + joined) // BLOCK_TOKENS
        if from_tail:
            old = self.view(layer, layout, before).tail[:, :, :from_tail]
            both = (torch.cat([old[i], x[:, :joined]], 1) for i, x in enumerate((k, v)))
            self._seal(layer, layout, growth.fresh[:first], *both)
        end = max(joined, count - from_tail)
        self._seal(layer, layout, growth.fresh[first:], k[:, joined:end], v[:, joined:end])
        return k[:, end:], v[:, end:]

    def _seal(self, layer: int, layout: RecordLayout, ids: list[int], k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k, v [H, n*128, D] into the records `ids` of this layer."""
        records = self.records.records(layer)
        assert records is not None
        if not ids:
            return
        blocks = [torch.unflatten(x, 1, (-1, BLOCK_TOKENS)).transpose(0, 1) for x in (k, v)]  # [n, H, 128, D]
        for first in range(0, len(ids), SEAL_BLOCKS):
            run = slice(first, first + SEAL_BLOCKS)
            ops.seal(blocks[0][run], blocks[1][run], layout, records, ids[run], checked=True)
        self.records.wrote(layer, ids)

    def check(self, sequences: list[Sequence], ledger: Ledger) -> None:
        """Every id that a sequence holds has a row in every layer. AssertionError if not."""
        for layer in range(self.count):
            for tier, blocks in ((self.records, True), (self.exact, False)):
                rows = tier.records(layer)
                have = 0 if rows is None else rows.shape[0]
                pool = ledger.blocks if blocks else ledger.pieces
                assert have <= max(pool.capacity, pool.limit or 0)
                for sequence in sequences:
                    if sequence.loading is None:
                        holding = sequence.layer_holding(layer)
                        ids = holding.block_ids if blocks else holding.piece_ids
                        assert all(number < have for number in ids)

    def _pieces(self, layer: int, layout: RecordLayout) -> torch.Tensor:
        """The layer's pieces [num_pieces, 2, H, 16, D] in its dtype; no copy."""
        rows, known = self.exact.records(layer), self._views.get(layer)
        spec = layout.layer
        shape = (2, spec.kv_heads, PIECE_TOKENS, spec.head_dim)
        if rows is None:
            return torch.zeros(0, *shape, dtype=spec.dtype, device=spec.device)
        if known is None or known[0] is not rows:
            known = self._views[layer] = rows, rows.view(spec.dtype).view(-1, *shape)
        return known[1]

    def _none(self, layout: RecordLayout) -> torch.Tensor:
        """No new tokens [2, H, 0, D]."""
        made = self._empty.get(layout)
        if made is None:
            spec = layout.layer
            with torch.inference_mode(False):
                made = torch.zeros(2, spec.kv_heads, 0, spec.head_dim, dtype=spec.dtype, device=spec.device)
            self._empty[layout] = made
        return made


def land(records: torch.Tensor, ids: abc.Sequence[int], data: torch.Tensor) -> None:
    """Copy bytes of whole records, one after another, to rows `ids` of records uint8 [N, R], in place."""
    rows, at = data.view(-1, records.shape[1]), 0
    while at < len(ids):
        end = at + 1
        while end < len(ids) and ids[end] == ids[end - 1] + 1:
            end += 1
        records[ids[at] : ids[at] + end - at].copy_(rows[at:end])
        at = end
