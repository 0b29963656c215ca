"""Which ids a sequence holds: what a step, a fork or a crop changes about it. No tensors but the tables of ids.

Everything is worked out and allocated before a step writes its first byte, so a step that finds no room has changed
nothing, and a step that is given up leaves the sequence as it was.
"""

from collections import Counter

from qkv.errors import ShapeError
from qkv.pool import BlockPool
from qkv.sequence import PIECES_A_BLOCK, Counts, Growth, Holding, Sequence, pieces_for
from qkv.spec import BLOCK_TOKENS, PIECE_TOKENS

WINDOW_SLACK = BLOCK_TOKENS  # tokens kept behind a window, so that a rejected draft can be cropped


class Ledger:
    """The ids of all sequences of one manager: `blocks` for sealed tokens, `pieces` for exact ones.

    window  no query sees further back than this; the sink and blocks wholly behind it are given back. None: all is kept
    """

    def __init__(
        self, blocks: BlockPool, pieces: BlockPool, sink_tokens: int, tail_tokens: int, window: int | None = None
    ) -> None:
        self.blocks, self.pieces = blocks, pieces
        self.sink_tokens, self.tail_tokens, self.window = sink_tokens, tail_tokens, window

    def counts_after(self, holding: Holding, tokens: int) -> tuple[Counts, int, int]:
        """What `tokens` more make of the counts; how many of them join the sink; how many blocks are sealed."""
        sink, sealed, tail = holding.counts
        # a sink that a crop has shortened fills up again, unless something already stands behind it
        to_sink = 0 if sealed or tail or holding.dropped else min(self.sink_tokens - sink, tokens)
        waiting = tail + tokens - to_sink
        to_seal = max(0, (waiting - self.tail_tokens) // BLOCK_TOKENS)
        return Counts(sink + to_sink, sealed + to_seal, waiting - to_seal * BLOCK_TOKENS), to_sink, to_seal

    def begin(self, sequence: Sequence, tokens: int) -> None:
        """Open a step of `tokens` in every layer with the ids it needs. Raises OutOfBlocks; then nothing changed."""
        held = self._slide(sequence.holding)
        after, to_sink, to_seal = self.counts_after(held, tokens)
        sinks, tails = list(held.sink_ids), list(held.tail_ids[to_seal * PIECES_A_BLOCK :])
        written: list[list[int]] = []  # tables whose last piece, partly filled, is written to
        if to_sink and held.counts.sink % PIECE_TOKENS:
            written.append(sinks)
        if after.tail and tails and held.counts.tail % PIECE_TOKENS and tokens > to_sink:
            written.append(tails)
        shared = [table for table in written if self.pieces.references(table[-1]) > 1]
        more = pieces_for(after.sink) - len(sinks), pieces_for(after.tail) - len(tails)
        fresh = self.blocks.allocate(to_seal)
        try:
            pieces = self.pieces.allocate(len(shared) + sum(more))
        except BaseException:
            self.blocks.release(fresh)
            raise
        rest = iter(pieces)
        copies = []
        for table in shared:
            copies.append((table[-1], next(rest)))
            table[-1] = copies[-1][1]
        sinks += [next(rest) for _ in range(more[0])]
        tails += rest
        ids, lengths = (*held.block_ids, *fresh), held.block_lengths + (BLOCK_TOKENS,) * to_seal
        holding = Holding(after, tuple(sinks), tuple(tails), ids, lengths, held.dropped)
        before, kept = sequence.holding, set(holding.piece_ids)
        dropped = list(before.block_ids[: len(before.block_ids) - len(held.block_ids)])
        dropped_pieces = [piece for piece in before.piece_ids if piece not in kept]
        sequence.growth = Growth(tokens, holding, to_sink, to_seal, fresh, pieces, dropped, dropped_pieces, copies)

    def commit(self, sequence: Sequence) -> None:
        """The last layer is done: the sequence holds what the step made."""
        growth = sequence.growth
        assert growth is not None
        self.blocks.release(growth.dropped)
        self.pieces.release(growth.dropped_pieces)
        sequence.holding, sequence.growth = growth.after, None

    def abort(self, sequence: Sequence) -> None:
        """Drop a step under way; the sequence is as before it."""
        growth, sequence.growth = sequence.growth, None
        if growth is not None:
            self.blocks.release(growth.fresh)
            self.pieces.release(growth.fresh_pieces)

    def share(self, source: Sequence, twin: Sequence) -> None:
        """`twin`, empty, holds what `source` holds. Pieces are copied when one of them writes to them."""
        self.blocks.retain(list(source.holding.block_ids))
        self.pieces.retain(list(source.holding.piece_ids))
        twin.holding = source.holding

    def crop(self, sequence: Sequence, length: int) -> None:
        """Keep the first `length` tokens: 0, or `shortest` to as many as there are. Records are never rewritten."""
        held = sequence.holding
        sink, _, tail = held.counts
        dropped = held.dropped if length else 0
        surplus = held.tokens - held.dropped - (length - dropped)
        from_tail = min(surplus, tail)
        surplus -= from_tail
        lengths = list(held.block_lengths)
        while surplus and lengths:
            taken = min(surplus, lengths[-1])
            lengths[-1] -= taken
            surplus -= taken
            if not lengths[-1]:
                lengths.pop()
        counts = Counts(sink - surplus, len(lengths), tail - from_tail)
        sinks, tails = held.sink_ids[: pieces_for(counts.sink)], held.tail_ids[: pieces_for(counts.tail)]
        sequence.holding = Holding(counts, sinks, tails, held.block_ids[: len(lengths)], tuple(lengths), dropped)
        self.blocks.release(list(held.block_ids[len(lengths) :]))
        self.pieces.release([*held.sink_ids[len(sinks) :], *held.tail_ids[len(tails) :]])

    def shortest(self, sequence: Sequence) -> int:
        """Fewest tokens, other than none, that a crop can keep: what a query behind them sees must still be there."""
        dropped = sequence.holding.dropped
        return dropped + self.window - 1 if dropped and self.window else 0

    def needs(self, tokens: int) -> tuple[int, int]:
        """Blocks and pieces that a sequence of so many tokens holds between steps."""
        after = self.counts_after(Holding(), tokens)[0]
        return self.most_blocks(tokens), pieces_for(after.sink) + pieces_for(after.tail)

    def most_blocks(self, tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds between steps."""
        sealed = self.counts_after(Holding(), tokens)[0].sealed
        # behind the window's last block: the slack, a block begun before it, and one the last step has sealed
        return sealed if self.window is None else min(sealed, -(-(self.window + WINDOW_SLACK) // BLOCK_TOKENS) + 2)

    def _slide(self, held: Holding) -> Holding:
        """Without the sink and blocks that neither the next query nor a crop by WINDOW_SLACK will need."""
        if self.window is None:
            return held
        surplus = held.tokens - self.window + 1 - WINDOW_SLACK - held.dropped
        counts, first, dropped = held.counts, 0, held.dropped
        if counts.sink:
            if surplus < counts.sink:
                return held
            surplus, dropped = surplus - counts.sink, dropped + counts.sink
        while first < counts.sealed and surplus >= held.block_lengths[first]:
            surplus, dropped = surplus - held.block_lengths[first], dropped + held.block_lengths[first]
            first += 1
        if dropped == held.dropped:
            return held
        counts = Counts(0, counts.sealed - first, counts.tail)
        return Holding(counts, (), held.tail_ids, held.block_ids[first:], held.block_lengths[first:], dropped)

    def close(self, sequence: Sequence) -> None:
        """Let go of everything."""
        self.blocks.release(list(sequence.holding.block_ids))
        self.pieces.release(list(sequence.holding.piece_ids))
        sequence.holding = Holding()

    def check(self, sequences: list[Sequence], kept: tuple[list[int], list[int]]) -> None:
        """Walk the whole state; AssertionError if anything disagrees. kept: blocks and pieces held by others."""
        blocks, pieces = (dict(Counter(ids)) for ids in kept)
        for sequence in sequences:
            growth = sequence.growth
            for holding in (sequence.holding, *([growth.after] if growth else [])):
                counts = holding.counts
                assert counts.sealed == len(holding.block_ids) == len(holding.block_lengths)
                assert len(set(holding.block_ids)) == len(holding.block_ids)
                assert all(0 < length <= BLOCK_TOKENS for length in holding.block_lengths)
                assert len(set(holding.piece_ids)) == len(holding.piece_ids)
                assert 0 <= counts.sink <= self.sink_tokens
                assert 0 <= counts.tail < self.tail_tokens + BLOCK_TOKENS
                assert len(holding.sink_ids) == pieces_for(counts.sink)
                assert len(holding.tail_ids) == pieces_for(counts.tail)
            for held, more, count in (
                (sequence.holding.block_ids, growth.fresh if growth else [], blocks),
                (sequence.holding.piece_ids, growth.fresh_pieces if growth else [], pieces),
            ):
                for number in (*held, *more):
                    count[number] = count.get(number, 0) + 1
        self.blocks.check(blocks)
        self.pieces.check(pieces)


def settled(sequence: Sequence, verb: str, arrive: bool = True) -> int:
    """The length, between steps and, if `arrive`, with every layer in place. Raises ShapeError in the middle of one."""
    held, growth = sequence.holding.tokens, sequence.growth
    if arrive:
        sequence.arrive()
    if growth is not None:
        raise ShapeError(
            f"{verb}: layers hold {held} to {growth.after.tokens} tokens; finish the step in every layer first, or "
            "abort it"
        )
    return held
