"""One sequence: which pieces and blocks hold its tokens, now and behind the step that is under way.

    position  0 ..... sink_tokens | block 0 | block 1 | ... | tail, oldest first
    held by   sink_ids (pieces)   | block_ids               | tail_ids (pieces)

Ids are the same in every layer. A step leaves what the sequence has as it is until every layer has written its part:
until then `Growth` holds what will be, and dropping it undoes the step.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from qkv.prefix import Prefix
from qkv.spec import BLOCK_TOKENS, PIECE_TOKENS, Table

PIECES_A_BLOCK = BLOCK_TOKENS // PIECE_TOKENS


class Counts(NamedTuple):
    """Tokens in the sink, blocks sealed, tokens in the tail."""

    sink: int = 0
    sealed: int = 0
    tail: int = 0


def pieces_for(tokens: int) -> int:
    return -(-tokens // PIECE_TOKENS)


class Holding:
    """The ids and counts of one state of a sequence. Immutable.

    dropped  oldest tokens, sink included, that a sliding window has passed: they count, but nothing holds them
    """

    def __init__(
        self,
        counts: Counts = Counts(),  # noqa: B008  # immutable
        sink_ids: tuple[int, ...] = (),
        tail_ids: tuple[int, ...] = (),
        block_ids: tuple[int, ...] = (),
        block_lengths: tuple[int, ...] = (),
        dropped: int = 0,
    ) -> None:
        self.counts, self.sink_ids, self.tail_ids = counts, sink_ids, tail_ids
        self.block_ids, self.block_lengths = block_ids, block_lengths
        self.dropped = dropped
        self.sealed_tokens = sum(block_lengths)
        self.tokens = dropped + counts.sink + self.sealed_tokens + counts.tail
        self._tables: dict[torch.device, Table] = {}

    @property
    def piece_ids(self) -> tuple[int, ...]:
        return self.sink_ids + self.tail_ids

    def table(self, device: torch.device) -> Table:
        """The same as tensors on a device; made once."""
        made = self._tables.get(device)
        if made is None:
            with torch.inference_mode(False):
                ids = [
                    torch.tensor(numbers, dtype=torch.int64, device=device)
                    for numbers in (self.block_ids, self.block_lengths, self.sink_ids, self.tail_ids)
                ]
            made = Table(ids[0], ids[1], self.sealed_tokens, ids[2], self.counts.sink, ids[3], self.counts.tail)
            self._tables[device] = made
        return made


@dataclass
class Growth:
    """A step under way: `tokens` more in every layer.

    after      what the sequence holds when the last layer is done
    to_sink, to_seal  of the new tokens, how many join the sink; how many blocks each layer seals
    fresh, fresh_pieces  ids that this step has allocated
    dropped, dropped_pieces  ids that `after` does without
    copies     pieces whose bytes each layer copies to another before it writes
    done       layers that have written their part; the step's own set
    """

    tokens: int
    after: Holding
    to_sink: int
    to_seal: int
    fresh: list[int]
    fresh_pieces: list[int]
    dropped: list[int]
    dropped_pieces: list[int]
    copies: list[tuple[int, int]]
    done: set[int] = field(default_factory=set)


class Arrivals(Protocol):
    """What a sequence knows of a load (qkv/storing.py)."""

    complete: bool

    def arrive(self, layer: int) -> None: ...
    def arrive_all(self) -> None: ...
    def share(self) -> None: ...
    def leave(self) -> None: ...


@dataclass(eq=False)
class Sequence:
    """A handle from `KVManager.open` or `fork`; only the manager changes it."""

    id: int
    holding: Holding = field(default_factory=Holding)
    growth: Growth | None = None
    closed: bool = False
    prefix: Prefix | None = None  # names of its blocks; None: it shares nothing by name
    published: int = 0  # blocks that have been offered under their names
    seconds: float = 0.0  # that steps have taken since
    loading: "Arrivals | None" = None  # layers that are on their way from a store
    spent: float = 0.0  # that steps have taken for what it holds

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Blocks sealed in every layer, oldest first."""
        return self.holding.block_ids

    def arrive(self, layer: int | None = None) -> None:
        """Wait for a layer that is on its way from a store; None: for all. Raises LayerLost."""
        if self.loading is not None:
            if layer is None:
                self.loading.arrive_all()
            else:
                self.loading.arrive(layer)
            if self.loading.complete:
                self.loading = None

    def layer_holding(self, layer: int) -> Holding:
        """What the sequence holds in one layer, in the middle of a step too."""
        growth = self.growth
        return growth.after if growth is not None and layer in growth.done else self.holding


def arrive(sequences: list[Sequence], layer: int) -> None:
    """Wait for a layer of all of these: before any is viewed, for what arrives may take a streamed layer's slab."""
    for sequence in sequences:
        sequence.arrive(layer)
