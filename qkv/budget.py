"""Budgets and tiers in bytes: how many blocks and exact pieces they hold, and whether work fits before it starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from qkv.errors import InputError, ShapeError
from qkv.offload.tier import Device, Disk, Host, most_blocks
from qkv.sequence import pieces_for
from qkv.spec import BLOCK_TOKENS, PIECE_TOKENS, Format, LayerSpec, RecordLayout

if TYPE_CHECKING:
    from qkv.offload.tiered import TieredRecords

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str) -> int:
    """'1.5GiB' -> bytes. Raises InputError."""
    number = text.strip().rstrip("BbIiKkMmGgTt").strip()
    unit = text.strip()[len(number) :].strip().upper()
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if unit not in _UNITS or not 0 < value * _UNITS[unit] < 2**63:  # NaN fails too
        raise InputError(f"budget: got {text!r}, wanted a positive size such as 512MiB or 4GiB")
    return int(value * _UNITS[unit])


def _bytes_of(name: str, size: str | int) -> int:
    total = parse_bytes(size) if isinstance(size, str) else size
    if not isinstance(total, int) or isinstance(total, bool) or not 0 < total < 2**63:
        raise InputError(f"{name}: got {size!r}, wanted a positive size such as 512MiB or 4GiB")
    return total


@dataclass(frozen=True)
class Budget:
    """Rows that are allocated once, so that no moment of growing takes more: num_blocks, num_pieces, in every layer."""

    num_blocks: int
    num_pieces: int
    bytes: int

    @classmethod
    def split(
        cls, budget: str | int, format: Format, layers: Sequence[LayerSpec], window: tuple[int, int], sequences: int
    ) -> "Budget":
        """What a budget holds: the exact pieces of `sequences` at a time, the rest in blocks.

        window: sink_tokens, tail_tokens. Raises InputError, ShapeError (not one block fits; says what would).
        """
        total = _bytes_of("budget", budget)
        block = sum(RecordLayout(format, layer).record_bytes for layer in layers)
        piece = sum(PIECE_TOKENS * layer.token_bytes for layer in layers)
        pieces = sequences * pieces_most(*window)
        blocks = (total - pieces * piece) // block
        if blocks < 1:
            raise ShapeError(
                f"budget: got {total} bytes, wanted at least {pieces * piece + block}: {pieces} exact pieces of "
                f"{piece} bytes for {sequences} sequences and one block of {block}; raise it, or lower max_sequences"
            )
        return cls(blocks, pieces, blocks * block + pieces * piece)


class Limits(NamedTuple):
    """What a manager may hold, as it was asked for. window: sink_tokens, tail_tokens."""

    budget: str | int | None
    tiers: Sequence[Device | Host | Disk] | None
    num_blocks: int | None
    max_sequences: int
    window: tuple[int, int]

    def room(
        self, format: Format, num_layers: int, layers: Sequence[LayerSpec] | None
    ) -> tuple[Budget | None, "TieredRecords | None", int | None]:
        """The budget, split; where records lie if not all on the device; the most blocks.

        Raises InputError, ShapeError (no geometry, or nothing fits).
        """
        if self.tiers is not None:
            if self.budget is not None:
                raise InputError("tiers: got a budget too, wanted one of them; a tier has its own limit")
            return None, *self._tiered(self.tiers, format, num_layers, layers)
        if self.budget is None:
            return None, None, self.num_blocks
        if self.num_blocks is not None or layers is None or len(layers) != num_layers:
            raise ShapeError(
                f"budget: got num_blocks {self.num_blocks} and {len(layers or [])} layers, wanted no num_blocks and "
                f"the geometry of all {num_layers} layers"
            )
        budget = Budget.split(self.budget, format, layers, self.window, self.max_sequences)
        return budget, None, budget.num_blocks

    def _tiered(
        self,
        tiers: Sequence[Device | Host | Disk],
        format: Format,
        num_layers: int,
        layers: Sequence[LayerSpec] | None,
    ) -> tuple["TieredRecords", int]:
        kinds = [type(tier) for tier in tiers]
        if kinds not in ([Device], [Device, Host], [Device, Disk], [Device, Host, Disk]):
            raise InputError(f"tiers: got {list(tiers)}, wanted Device, then Host or Disk or both, in this order")
        if layers is None or len(layers) != num_layers:
            raise ShapeError(f"tiers: got {len(layers or [])} layers, wanted the geometry of all {num_layers}")
        from qkv.offload.tiered import TieredRecords  # needs xxhash, which only tiers and stores do

        limits = {type(tier): _bytes_of(type(tier).__name__, tier.limit) for tier in tiers}
        rows = [RecordLayout(format, layer).record_bytes for layer in layers]
        sizes = limits[Device], limits.get(Host, 0), limits.get(Disk, 0)
        most = most_blocks(rows, *sizes)
        if most < (self.num_blocks or 1):
            raise ShapeError(
                f"tiers: got room for {most} blocks of {sum(rows)} bytes, wanted {self.num_blocks or 1}; raise a limit "
                f"(the device needs two layers' records: {2 * max(rows)} bytes a block)"
            )
        folder = next((tier.path for tier in tiers if isinstance(tier, Disk)), ".")
        return TieredRecords(rows, sizes, folder), self.num_blocks or most


def check_least(**values: tuple[object, int]) -> None:
    """Raises ShapeError unless each value is a whole number of at least so much."""
    for name, (value, least) in values.items():
        if not isinstance(value, int) or value < least:
            raise ShapeError(f"{name}: got {value!r}, wanted a whole number of at least {least}")


def pieces_most(sink_tokens: int, tail_tokens: int) -> int:
    """Exact pieces that one sequence can hold at most; one more while a step copies a shared one."""
    return pieces_for(sink_tokens) + pieces_for(tail_tokens + BLOCK_TOKENS - 1) + 1


@dataclass(frozen=True)
class Admission:
    """Whether sequences of some lengths fit beside what is held now, evicting all that may be. None: no bound."""

    blocks_needed: int
    blocks_available: int | None
    pieces_needed: int
    pieces_available: int | None

    @property
    def fits(self) -> bool:
        pairs = (self.blocks_needed, self.blocks_available), (self.pieces_needed, self.pieces_available)
        return all(have is None or need <= have for need, have in pairs)
