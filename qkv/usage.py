"""What a manager's sequences hold and what it would cost to drop one. Reads only; any thread may ask."""

from collections.abc import Iterable

from qkv.ledger import Ledger
from qkv.pool import BlockPool
from qkv.reports import Cost, Usage
from qkv.sequence import Holding, Sequence
from qkv.sharing import Sharing
from qkv.spec import BLOCK_TOKENS, PIECE_TOKENS


def usage(sharing: Sharing, sequences: list[Sequence], row_bytes: tuple[int, int], allocated: tuple[int, int]) -> Usage:
    """row_bytes: of one block and one piece in all layers; allocated: bytes of all blocks and all pieces."""
    ledger, kept = sharing.ledger, sharing.checkpoints()
    holdings = [part for sequence in sequences for part in _parts(sequence)] + kept
    sinks = {piece for holding in holdings for piece in holding.sink_ids} | set(sharing.sink_pieces())
    blocks, pieces = _in_use(ledger.blocks), _in_use(ledger.pieces)
    tails = max(0, pieces - len(sinks))
    empty = _empty(holdings)
    slots = blocks * BLOCK_TOKENS + pieces * PIECE_TOKENS
    return Usage(
        sequences=len(sequences),
        checkpoints=len(kept),
        tokens=sum(sequence.holding.tokens for sequence in sequences),
        records=blocks * row_bytes[0],
        sink=len(sinks) * row_bytes[1],
        tail=tails * row_bytes[1],
        records_free=max(0, allocated[0] - blocks * row_bytes[0]),
        exact_free=max(0, allocated[1] - (len(sinks) + tails) * row_bytes[1]),
        slots=slots,
        filled=max(0, slots - empty),
    )


def cost(ledger: Ledger, sequence: Sequence, row_bytes: tuple[int, int]) -> Cost:
    """What closing the sequence would give back, and the seconds of work that would be lost with it."""
    held = sequence.holding
    blocks = [block for block in held.block_ids if ledger.blocks.references(block) == 1]
    pieces = [piece for piece in held.piece_ids if ledger.pieces.references(piece) == 1]
    alone = len(blocks) * BLOCK_TOKENS + len(pieces) * PIECE_TOKENS
    every = len(held.block_ids) * BLOCK_TOKENS + len(held.piece_ids) * PIECE_TOKENS
    size = len(blocks) * row_bytes[0] + len(pieces) * row_bytes[1]
    return Cost(size, sequence.spent * alone / every if every else 0.0)


def _parts(sequence: Sequence) -> Iterable[Holding]:
    growth = sequence.growth
    return (sequence.holding,) if growth is None else (sequence.holding, growth.after)


def _in_use(pool: BlockPool) -> int:
    stats = pool.stats()
    return stats.capacity - stats.free


def _empty(holdings: list[Holding]) -> int:
    """Places without a token in blocks that a crop has shortened and in last pieces."""
    filled: dict[tuple[str, int], tuple[int, int]] = {}
    for holding in holdings:
        for block, length in zip(holding.block_ids, holding.block_lengths, strict=True):
            _most(filled, ("block", block), length, BLOCK_TOKENS)
        for ids, tokens in ((holding.sink_ids, holding.counts.sink), (holding.tail_ids, holding.counts.tail)):
            for place, piece in enumerate(ids):
                _most(filled, ("piece", piece), min(PIECE_TOKENS, tokens - place * PIECE_TOKENS), PIECE_TOKENS)
    return sum(size - most for most, size in filled.values())


def _most(filled: dict[tuple[str, int], tuple[int, int]], key: tuple[str, int], tokens: int, size: int) -> None:
    if filled.get(key, (-1, size))[0] < tokens:
        filled[key] = tokens, size
