"""A budget in bytes: how many blocks and exact pieces it holds, and whether work fits before it starts."""

from collections.abc import Sequence
from dataclasses import dataclass

from qkv.errors import InputError, ShapeError
from qkv.sequence import pieces_for
from qkv.spec import BLOCK_TOKENS, PIECE_TOKENS, Format, LayerSpec, RecordLayout

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
        total = parse_bytes(budget) if isinstance(budget, str) else budget
        if not isinstance(total, int) or isinstance(total, bool) or not 0 < total < 2**63:
            raise InputError(f"budget: got {budget!r}, wanted a positive size such as 512MiB or 4GiB")
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


def check_declared(num_layers: int, num_blocks: int | None, layers: Sequence[LayerSpec] | None) -> None:
    """Raises ShapeError unless a budget can be split: every layer's geometry is there, and no count of blocks."""
    if num_blocks is not None or layers is None or len(layers) != num_layers:
        raise ShapeError(
            f"budget: got num_blocks {num_blocks} and {len(layers or [])} layers, wanted no num_blocks and the "
            f"geometry of all {num_layers} layers"
        )


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
