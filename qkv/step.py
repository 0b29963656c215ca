"""Step: some tokens more for some sequences, in every layer, or nothing at all.

    with manager.plan(sequences, tokens) as step:      # every id that the step needs, or OutOfBlocks
        for layer in model: out = step.attend(layer.index, q, k, v, options)

The sequences are longer when the last layer is done. Before that, an error or `abort` leaves them as they were.
"""

from time import perf_counter
from typing import Any

import torch

from qkv import ops
from qkv.errors import OutOfBlocks, ShapeError
from qkv.layers import AXES, Layers
from qkv.sequence import Growth, Holding, Sequence, arrive
from qkv.shapes import check
from qkv.sharing import Sharing
from qkv.spec import AttendOptions


def check_plan(sequences: list[Sequence], tokens: list[int]) -> None:
    """Raises ShapeError unless each sequence is there once, has a count, and is in no other step."""
    if len(sequences) != len(tokens) or len({sequence.id for sequence in sequences}) != len(sequences):
        raise ShapeError(
            f"plan: got {len(sequences)} sequences and {len(tokens)} counts, wanted each sequence once and a count "
            "for each"
        )
    for sequence, count in zip(sequences, tokens, strict=True):
        if count < 0:
            raise ShapeError(f"plan: got {count} tokens, wanted at least 0")
        if sequence.growth is not None:
            raise ShapeError(f"sequence {sequence.id} is in a step already; finish that, or abort it")


class Step:
    """Made by `KVManager.plan`. `tokens[i]` new tokens of `sequences[i]`; `done`: layers that have them."""

    def __init__(self, sharing: Sharing, layers: Layers, sequences: list[Sequence], tokens: list[int]) -> None:
        ledger = sharing.ledger
        self.sequences, self.tokens = sequences, tokens
        self.done: set[int] = set()
        self.open = True
        self._ledger, self._layers, self._sharing, self._began = ledger, layers, sharing, perf_counter()
        self._before: list[Holding] = [sequence.holding for sequence in sequences]
        self._growths: list[Growth] = []
        try:
            for sequence, count in zip(sequences, tokens, strict=True):
                self._begin(sequence, count)
                assert sequence.growth is not None
                sequence.growth.done = self.done
                self._growths.append(sequence.growth)
        except BaseException:
            for sequence in sequences[: len(self._growths) + 1]:
                ledger.abort(sequence)
            raise

    def __enter__(self) -> "Step":
        return self

    def __exit__(self, *error: Any) -> None:
        self.abort()

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttendOptions
    ) -> torch.Tensor:
        """Store the layer's k, v [T, H, D] and attend: q [T, H*G, D], all sequences' new tokens in a row -> as q.

        Each new token sees its own sequence. One alone (a decode step) is stored first, so sees itself as it is kept;
        of more (a chunk of a prompt), all see one another exactly. Sequences of either kind go to one call.
        Raises ShapeError, FormatError (inf, NaN); then the step is aborted.
        """
        try:
            self._check(layer)
            total = sum(self.tokens)
            if not q.dim() == k.dim() == v.dim() == 3 or not len(q) == len(k) == len(v) == total:
                check("T H D", {"T": total}, k=k, v=v)
                check("T * D", {"T": total, "D": k.shape[2]}, q=q)
            out = self._attend(layer, q, k, v, options)
        except BaseException:
            self.abort()
            raise
        self.finish(layer)
        return out

    def write(self, layer: int, row: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store one sequence's k, v [H, T, D] of a layer. `finish` the layer when all have theirs.

        Raises ShapeError, FormatError (inf, NaN); the step stays open.
        """
        self._check(layer)
        if k.shape[1] != self.tokens[row]:
            raise ShapeError(
                f"append: layer {layer} got {k.shape[1]} tokens, wanted {self.tokens[row]}, as the step says; append "
                "as many, or abort the step"
            )
        self.sequences[row].arrive(layer)
        capacity = self._ledger.blocks.capacity, self._ledger.pieces.capacity
        self._layers.write(layer, self._before[row], self._growths[row], k, v, capacity)

    def finish(self, layer: int) -> None:
        """The layer has all its tokens. After the last layer the step is over."""
        self._check(layer)
        self.done.add(layer)
        if len(self.done) == self._layers.count:
            self.open = False
            if not self._ledger.blocks.block_bytes:
                self._ledger.blocks.block_bytes = self._layers.row_bytes[0]  # every layer is bound now
            each = (perf_counter() - self._began) / max(1, sum(self.tokens))
            for sequence, count in zip(self.sequences, self.tokens, strict=True):
                self._ledger.commit(sequence)
                sequence.seconds += each * count
                sequence.spent += each * count
                self._sharing.publish(sequence)

    def abort(self) -> None:
        """Give the step up, unless it is over: the sequences are as they were before it."""
        if self.open:
            self.open = False
            for sequence in self.sequences:
                self._ledger.abort(sequence)

    def _begin(self, sequence: Sequence, tokens: int) -> None:
        """Checkpoints make room before a step is refused."""
        while True:
            try:
                self._ledger.begin(sequence, tokens)
                return
            except OutOfBlocks:
                if not self._sharing.forget():
                    raise

    def _check(self, layer: int) -> None:
        if not self.open:
            raise ShapeError("step: it is over, or was aborted; plan the next one")
        if self._layers.index(layer) in self.done:
            waiting = sorted(set(range(self._layers.count)) - self.done)
            raise ShapeError(
                f"append: layer {layer} has its tokens of this step already, layers {waiting} have not; append to "
                "those, or abort the step"
            )

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttendOptions
    ) -> torch.Tensor:
        arrive(self.sequences, layer)
        queries, views, chunks = [], [], []
        first = 0
        for row, count in enumerate(self.tokens):
            run = slice(first, first + count)
            first += count
            whole = len(self.tokens) == 1
            own_q, own_k, own_v = ((x if whole else x[run]).transpose(0, 1) for x in (q, k, v))
            queries.append(own_q)
            if count == 1:
                self.write(layer, row, own_k, own_v)
                layout = self._layers.layouts[layer]
                assert layout is not None
                views.append(self._layers.view(layer, layout, self._growths[row].after))
            else:
                layout = self._layers.bind(layer, own_k, own_v)
                for name, x in (("k", own_k), ("v", own_v)):
                    ops.check_finite(name, x, AXES)
                views.append(self._layers.view(layer, layout, self._before[row], (own_k, own_v)))
                chunks.append((row, own_k, own_v))
        made = ops.attend_many(queries, views, options, need_lse=False)
        for row, own_k, own_v in chunks:
            self.write(layer, row, own_k, own_v)
        outs = [out.transpose(0, 1) for out, _ in made]
        return outs[0] if len(outs) == 1 else torch.cat(outs)
