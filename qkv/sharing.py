"""Sharing between sequences: blocks found by name, with the exact tokens that belong to them.

What comes behind a run's blocks was computed over its exact sink and tail. So a sequence takes up where another stood
only if it gets all of that run's state, a checkpoint:

    sink pieces | published blocks, the run's own where an equal one was published before it | tail pieces

Then it goes on exactly as that run did. Blocks without a checkpoint may be taken too (`reuse="blocks"`), with the sink
of the run that published the first of them; the tokens behind them are computed again, over records instead of exact
tokens, as by a run whose prompt came in other chunks.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

from qkv.errors import InputError
from qkv.ledger import Ledger
from qkv.prefix import Namespace, Prefix
from qkv.reports import Match
from qkv.sequence import Counts, Holding, Sequence
from qkv.spec import BLOCK_TOKENS

REUSE = ("same", "blocks")
CHECKPOINTS = 64  # kept at most; the one used longest ago goes first


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stood: `holding`, behind the published block `parent`. Holds its pieces and `private`.

    content  of the tail (Prefix.tail)
    private  the run's own blocks where an equal one had been published
    """

    parent: bytes
    content: bytes
    holding: Holding
    private: tuple[int, ...]


class Sharing:
    """What the sequences of one manager may take over from one another."""

    def __init__(self, ledger: Ledger, checkpoints: int = CHECKPOINTS) -> None:
        self.ledger, self._blocks, self._pieces = ledger, ledger.blocks, ledger.pieces
        self._most = checkpoints
        self._sinks: dict[bytes, tuple[int, ...]] = {}  # by start
        self._checkpoints: OrderedDict[tuple[bytes, bytes], Checkpoint] = OrderedDict()
        self._behind: dict[
            bytes, tuple[Checkpoint, ...]
        ] = {}  # by parent; tuples, for `match` may come from any thread

    def check_namespace(self, namespace: Namespace, format_id: str) -> None:
        """Raises InputError unless sequences of this manager may be found under names of this namespace."""
        ledger = self.ledger
        if ledger.window is not None:
            raise InputError("namespace: this manager drops what its window has passed, so it shares by `fork` only")
        for name, got, wanted in (
            ("block_tokens", namespace.block_tokens, BLOCK_TOKENS),
            ("sink_tokens", namespace.sink_tokens, ledger.sink_tokens),
            ("format", namespace.format, format_id),
        ):
            if got != wanted:
                raise InputError(f"namespace {name}: got {got!r}, wanted {wanted!r}, this manager's")

    def begin_names(self, sequence: Sequence, namespace: Namespace, format_id: str) -> None:
        """Names for a sequence that has none, or others; its tokens' ids come next. Raises InputError."""
        self.check_namespace(namespace, format_id)
        if any(length < BLOCK_TOKENS for length in sequence.holding.block_lengths):
            raise InputError(f"sequence {sequence.id} was cropped inside a block; its blocks cannot be named")
        sequence.prefix, sequence.published = Prefix(namespace, tail_tokens=self.ledger.tail_tokens), 0

    def publish(self, sequence: Sequence) -> None:
        """Let the sequence's blocks that are complete in every layer, and have names, be found."""
        prefix, counts = sequence.prefix, sequence.holding.counts
        self.sweep()
        if sequence.loading is not None and not sequence.loading.complete:
            return  # not all layers are there and proven; the last one to arrive comes here again
        if prefix is None or prefix.start is None or counts.sink != self.ledger.sink_tokens:
            return
        first, last = sequence.published, min(counts.sealed, len(prefix.keys))
        if last <= first:
            return
        self._blocks.publish(prefix, first, list(sequence.holding.block_ids[first:last]), sequence.seconds)
        sequence.published, sequence.seconds = last, 0.0
        if prefix.start not in self._sinks and self._blocks.children(prefix.start):
            self._pieces.retain(list(sequence.holding.sink_ids))
            self._sinks[prefix.start] = sequence.holding.sink_ids
            self._blocks.watch(prefix.start)

    def keep(self, sequence: Sequence) -> bool:
        """Keep where the sequence stands, for others to go on from. False: names or published blocks are missing."""
        prefix, holding = sequence.prefix, sequence.holding
        sealed = holding.counts.sealed
        if prefix is None or not sealed or sequence.published < sealed or prefix.length < holding.tokens:
            return False
        published = self._blocks.named(prefix, sealed)
        if len(published) < sealed:
            return False
        private = tuple(own for own, named in zip(holding.block_ids, published, strict=True) if own != named)
        made = Checkpoint(prefix.keys[sealed - 1], prefix.tail(sealed, holding.counts.tail), holding, private)
        key, parent = (made.parent, made.content), made.parent
        if key in self._checkpoints:
            self._checkpoints.move_to_end(key)
            return True
        self._pieces.retain(list(holding.piece_ids))
        self._blocks.retain(list(private))
        self._checkpoints[key] = made
        behind = (*self._behind.get(parent, ()), made)
        # the longest is tried first
        self._behind[parent] = tuple(sorted(behind, key=lambda each: each.holding.counts.tail, reverse=True))
        self._blocks.watch(parent)
        while len(self._checkpoints) > self._most:
            self._drop(next(iter(self._checkpoints.values())))
        return True

    def take(self, sequence: Sequence, prefix: Prefix, reuse: str) -> int:
        """Give an empty sequence what `find` finds; returns the tokens it has now. Counted as a lookup."""
        self.sweep()
        blocks, checkpoint = self.find(prefix, reuse)
        ids = self._blocks.acquire(prefix, blocks)
        sequence.prefix, sequence.published = prefix, len(ids)
        if not ids:
            return 0
        assert prefix.start is not None
        if checkpoint is None:
            counts = Counts(self.ledger.sink_tokens, len(ids))
            sinks = self._sinks.get(prefix.start, ())
            sequence.holding = Holding(counts, sinks, (), tuple(ids), (BLOCK_TOKENS,) * len(ids))
        else:
            sequence.holding = checkpoint.holding
            self._blocks.retain(list(checkpoint.private))
            self._blocks.release([named for named in ids if named not in checkpoint.holding.block_ids])
            self._checkpoints.move_to_end((checkpoint.parent, checkpoint.content))
        self._pieces.retain(list(sequence.holding.piece_ids))
        sequence.spent = self._blocks.match(prefix, len(ids)).seconds_to_recompute
        return sequence.holding.tokens

    def find(self, prefix: Prefix, reuse: str) -> tuple[int, Checkpoint | None]:
        """How many blocks a sequence of these tokens may take, and the tail that goes with them. Changes nothing."""
        if reuse not in REUSE:
            raise InputError(f"reuse: got {reuse!r}, wanted one of {', '.join(REUSE)}")
        found = self._blocks.match(prefix).blocks
        for blocks in range(found, 0, -1):
            for checkpoint in self._behind.get(prefix.keys[blocks - 1], ()):
                held = checkpoint.holding
                # one token must be left to compute: its query is what the caller wants an answer to
                if held.tokens < prefix.length and prefix.tail(blocks, held.counts.tail) == checkpoint.content:
                    return blocks, checkpoint
        there = prefix.start in self._sinks or not self.ledger.sink_tokens
        return (found if reuse == "blocks" and there else 0), None

    def match(self, prefix: Prefix, reuse: str) -> Match:
        """What `take` would give. Changes nothing."""
        blocks, checkpoint = self.find(prefix, reuse)
        found = self._blocks.match(prefix, blocks)
        if checkpoint is None:
            return found
        hits = dict(found.hit_tokens)
        tail = checkpoint.holding.counts.tail
        hits["device"] = hits.get("device", 0) + tail
        left = found.tokens_left - tail
        rate = found.seconds_left / found.tokens_left if found.tokens_left else 0.0
        return replace(found, hit_tokens=hits, tokens_left=left, seconds_left=rate * left)

    def sweep(self) -> None:
        """Let go of sinks and tails whose blocks have been evicted."""
        for name in self._blocks.gone():
            self._pieces.release(list(self._sinks.pop(name, ())))
            for checkpoint in list(self._behind.get(name, ())):
                self._drop(checkpoint)

    def forget(self) -> bool:
        """Drop the checkpoint used longest ago, to make room; False: there is none."""
        if not self._checkpoints:
            return False
        self._drop(next(iter(self._checkpoints.values())))
        return True

    def checkpoints(self) -> list[Holding]:
        """Where the runs stood that others may go on from."""
        return [checkpoint.holding for checkpoint in list(self._checkpoints.values())]

    def sink_pieces(self) -> list[int]:
        """Pieces of the sinks that published blocks stand on."""
        return [piece for ids in list(self._sinks.values()) for piece in ids]

    def held(self) -> tuple[list[int], list[int]]:
        """Blocks and pieces that sinks and checkpoints hold, once for each."""
        kept = self._checkpoints.values()
        blocks = [block for checkpoint in kept for block in checkpoint.private]
        pieces = [*self._sinks.values(), *(checkpoint.holding.piece_ids for checkpoint in kept)]
        return blocks, [piece for ids in pieces for piece in ids]

    def check(self) -> None:
        """Walk the whole state; AssertionError if anything disagrees."""
        self.sweep()
        assert sum(map(len, self._behind.values())) == len(self._checkpoints) <= self._most
        for start in self._sinks:
            assert self._blocks.children(start), "a sink is kept for nothing"
        for checkpoint in self._checkpoints.values():
            assert checkpoint in self._behind[checkpoint.parent]
            assert checkpoint.holding.counts.sealed == len(checkpoint.holding.block_ids)

    def _drop(self, checkpoint: Checkpoint) -> None:
        del self._checkpoints[checkpoint.parent, checkpoint.content]
        behind = tuple(other for other in self._behind.pop(checkpoint.parent) if other is not checkpoint)
        if behind:
            self._behind[checkpoint.parent] = behind
        self._pieces.release(list(checkpoint.holding.piece_ids))
        self._blocks.release(list(checkpoint.private))
