"""Batch rows over the manager: what transformers pads, qkv stores without padding.

A row is one sequence of the manager. `valid` remembers which padded positions hold tokens, so padding never enters a
group, a record or a softmax, and dense tensors can be laid out as transformers expects them.
"""

from typing import Any

import torch

from qkv.errors import ShapeError
from qkv.manager import KVManager
from qkv.sequence import Sequence
from qkv.step import Step


class Rows:
    """The rows of one cache. `widths[layer]`: padded positions that a layer has stored; they differ only mid-step.

    alone: no layer of the model stays with transformers, so a step that fails can be taken back in all of them.
    """

    def __init__(self, manager: KVManager, alone: bool = True) -> None:
        self.manager, self.alone = manager, alone
        self.layers: list[Any] = []  # QKVLayer, each by itself
        self.sequences: list[Sequence] = []
        self.widths = [0] * manager.num_layers
        self.waiting: dict[int, int] = {}  # layer -> positions that its update has taken and no attention has committed
        self.step: Step | None = None  # under way: some layers have its tokens, others have not
        self.leaders: list[int] = []  # of the step under way: who stores a row's tokens, it or an equal row
        self.valid: torch.Tensor | None = None  # bool [B, max(widths)] on the CPU; None: no padding anywhere

    def open(self, count: int) -> None:
        """Open `count` empty rows, or hold the open ones to that count. Raises ShapeError."""
        if not self.sequences:
            self.sequences = [self.manager.open() for _ in range(count)]
        if len(self.sequences) != count:
            raise ShapeError(
                f"batch: got {count} rows, wanted the {len(self.sequences)} of this cache; use one cache a batch"
            )

    def adopt(self, sequence: Sequence) -> None:
        """The sequence is the only row; there was none."""
        self.sequences = [sequence]
        self.widths = [sequence.holding.tokens] * len(self.widths)

    def recover(self) -> None:
        """Between steps: take back one that never reached every layer.

        Raises ShapeError where that cannot be: layers that stay with transformers have kept it.
        """
        reached = self._reached()
        start = min(reached)
        if max(reached) > start and not self.alone:
            raise ShapeError(
                f"cache: an earlier step failed half way, layers hold {start} to {max(reached)} tokens; "
                "reset() it and start again"
            )
        for held in self.layers:
            if reached[held.index] > start:
                held.drop()
        if self.step is not None and self.step.open and (max(self.widths) > start or not self.step.done):
            self.step.abort()
            self.leaders = []
            self.widths = [min(width, start) for width in self.widths]
            if self.valid is not None:
                self.valid = self.valid[:, :start]

    def length(self) -> int:
        """Padded positions that every layer has, or has taken."""
        return min(self._reached())

    def _reached(self) -> list[int]:
        waiting = self.waiting
        return [width + waiting.get(index, 0) for index, width in enumerate(self.widths)] if waiting else self.widths

    def step_mask(self, layer: int, mask: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
        """The new part, bool [B, tokens], of a 2-D padding mask over stored and new tokens; None: all are tokens.

        Raises ShapeError if the mask takes back, or adds, a token that is stored.
        """
        if mask is None:
            if self.valid is not None and not bool(self.valid[:, : self.widths[layer]].all()):
                raise ShapeError(
                    "attention_mask: got none, or ones only, but this cache was begun with padding; pass it on"
                )
            return None
        width = self.widths[layer]
        mask = mask.to("cpu", torch.bool)[:, -(width + tokens) :]
        if mask.shape != (len(self.sequences), width + tokens):
            raise ShapeError(
                f"attention_mask: got shape {list(mask.shape)}, wanted {[len(self.sequences), width + tokens]}, "
                "stored and new tokens of every row"
            )
        history = mask[:, :width]
        stored = torch.ones_like(history) if self.valid is None else self.valid[:, :width]
        if not torch.equal(history, stored):
            row, column = (history != stored).nonzero()[0].tolist()
            raise ShapeError(
                f"attention_mask: row {row} changes position {column}, which is stored already; "
                "pass the mask that earlier calls passed, with the new tokens behind it"
            )
        new = mask[:, width:]
        return None if bool(new.all()) else new

    def planned(self, new: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor) -> Step:
        """The step under way, or one that begins with k, v [B, H, T, D] of its first layer; `new` bool [B, T]: tokens.

        Rows that hold the same and get the same (`generate` repeats a prompt for every beam and every sample before it
        is read) are stored once: the step has only the first of them.
        """
        if self.step is None or not self.step.open:
            self.leaders = self._equals(new, k, v)
            own = [row for row, leader in enumerate(self.leaders) if row == leader]
            counts = [k.shape[2] if new is None else int(new[row].sum()) for row in own]
            self.step = self.manager.plan([self.sequences[row] for row in own], counts)
        return self.step

    def write(self, layer: int, new: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor) -> None:
        """One layer's part of the step: k, v [B, H, T, D], of which `new` bool [B, T] says what are tokens."""
        step = self.planned(new, k, v)
        own = [row for row, leader in enumerate(self.leaders) if row == leader]
        for place, row in enumerate(own):
            keep = slice(None) if new is None else new[row].to(k.device)
            step.write(layer, place, k[row][:, keep], v[row][:, keep])
        step.finish(layer)
        if not step.open and len(own) < len(self.leaders):
            for row, leader in enumerate(self.leaders):
                if row != leader:
                    self.manager.close(self.sequences[row])
                    self.sequences[row] = self.manager.fork(self.sequences[leader])

    def source(self, row: int) -> Sequence:
        """The sequence that has a row's tokens, in the middle of a step too."""
        following = self.step is not None and self.step.open and self.leaders
        return self.sequences[self.leaders[row] if following else row]

    def _equals(self, new: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor) -> list[int]:
        """For each row the first that holds and gets the same. Single tokens are not compared: beams part there."""
        leaders: list[int] = []
        for row, sequence in enumerate(self.sequences):
            found = row
            for leader in sorted(set(leaders)) if k.shape[2] > 1 else ():
                other = self.sequences[leader]
                if (
                    (other.holding is sequence.holding or not other.holding.tokens + sequence.holding.tokens)
                    and (new is None or torch.equal(new[row], new[leader]))
                    and torch.equal(k[row], k[leader])
                    and torch.equal(v[row], v[leader])
                ):
                    found = leader
                    break
            leaders.append(found)
        return leaders

    def advance(self, layer: int, new: torch.Tensor | None, tokens: int) -> None:
        """Record that a layer has stored `tokens` more padded positions, valid where `new` bool [B, tokens] says."""
        width, count = self.widths[layer], len(self.sequences)
        if self.valid is None and new is not None:
            self.valid = torch.ones(count, width, dtype=torch.bool)
        if self.valid is not None and self.valid.shape[1] < width + tokens:  # the first layer of a step says it
            added = torch.ones(count, tokens, dtype=torch.bool) if new is None else new
            self.valid = torch.cat([self.valid, added], dim=1)
        self.widths[layer] = width + tokens

    def crop(self, width: int) -> None:
        """Keep the first `width` padded positions of every row. Raises ShapeError beyond them."""
        have = min(self.widths)
        if not 0 <= width <= have:
            raise ShapeError(f"crop: got length {width}, wanted 0 to {have}, the tokens stored")
        lengths = [width] * len(self.sequences) if self.valid is None else self.valid[:, :width].sum(1).tolist()
        for sequence, length in zip(self.sequences, lengths, strict=True):
            self.manager.check_crop(sequence, length)
        for sequence, length in zip(self.sequences, lengths, strict=True):
            self.manager.crop(sequence, length)
        self.widths = [width] * len(self.widths)
        if self.valid is not None:
            self.valid = self.valid[:, :width]

    def select(self, indices: torch.Tensor) -> None:
        """Row i becomes what row indices[i] was (or the rows that a bool mask picks); records are shared, never copied.

        Raises ShapeError for rows that do not exist, or for none.
        """
        have = torch.arange(len(self.sequences))
        try:
            order = have[indices.to("cpu")].tolist()
        except IndexError as error:
            raise ShapeError(f"rows: got {indices.tolist()}, wanted rows of the {len(have)} in this cache") from error
        if not order:
            raise ShapeError("rows: got no row, wanted at least one; reset() the cache to empty it")
        taken: set[int] = set()
        chosen = []
        for index in order:
            source = self.sequences[index]
            chosen.append(self.manager.fork(source) if index in taken else source)
            taken.add(index)
        for index, sequence in enumerate(self.sequences):
            if index not in taken:
                self.manager.close(sequence)
        self.sequences = chosen
        if self.valid is not None:
            self.valid = self.valid[order]

    def fork(self) -> "Rows":
        """The same rows once more, sharing every record."""
        twin = Rows(self.manager, self.alone)
        twin.sequences = [self.manager.fork(sequence) for sequence in self.sequences]
        twin.widths, twin.valid = list(self.widths), self.valid
        return twin

    def reset(self) -> None:
        """Close every row."""
        if self.step is not None:
            self.step.abort()
        for sequence in self.sequences:
            self.manager.close(sequence)
        self.sequences, self.widths, self.valid = [], [0] * len(self.widths), None
        self.waiting, self.step, self.leaders = {}, None, []

    def dense(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantised k, v [B, H, width, D] as transformers pads them, zeros where padding was. Allocates it all."""
        rows = []
        for row in range(len(self.sequences)):
            pair = torch.stack(self.manager.gather(self.source(row), layer))
            if self.valid is not None:
                width = self.widths[layer]
                padded = pair.new_zeros(*pair.shape[:2], width, pair.shape[3])
                padded[:, :, self.valid[row, :width].to(pair.device)] = pair
                pair = padded
            rows.append(pair)
        both = torch.stack(rows, dim=1)
        return both[0], both[1]
