"""Between a manager and its store: a sequence's state to segments, and back, layer by layer as they are used."""

import weakref
from functools import partial
from time import monotonic

import torch

from qkv.errors import CorruptSegment, InputError, LayerLost, OutOfBlocks, QkvError
from qkv.layers import Layers, land
from qkv.ledger import Ledger, settled
from qkv.offload.checkpoint import Found, Sizes, header_of
from qkv.offload.disk import DiskStore
from qkv.offload.onefile import OneFile
from qkv.offload.prefetch import Prefetch, within
from qkv.offload.segment import LayerBytes
from qkv.pool import BlockPool
from qkv.prefix import Prefix
from qkv.reports import Match
from qkv.sequence import Counts, Holding, Sequence, pieces_for
from qkv.sharing import Sharing
from qkv.spec import BLOCK_TOKENS, LayerSpec, RecordLayout

PAUSE_SECONDS = 30.0  # a store that did not answer is not asked again for so long


class Storing:
    """One store for the sequences of one manager. seconds: most for a look-up, or for one layer."""

    def __init__(
        self, store: DiskStore | OneFile, sharing: Sharing, layers: Layers, device: torch.device, seconds: float
    ) -> None:
        self.store, self.seconds, self._device = store, seconds, device
        self._sharing, self._layers, self._paused = sharing, layers, 0.0

    def save(self, sequence: Sequence) -> str:
        """Store where the sequence stands. Raises InputError (no names), ShapeError, StoreFull, OSError."""
        settled(sequence, "save")
        prefix, holding = sequence.prefix, sequence.holding
        blocks = holding.counts.sealed
        if prefix is None or prefix.length < holding.tokens or not blocks:
            raise InputError(
                f"save: sequence {sequence.id} has {blocks} sealed blocks and names for "
                f"{prefix.length if prefix else 0} of {holding.tokens} tokens; open it with tokens and a namespace, "
                "name all of them, and store at least one block"
            )
        layouts = [layout for layout in self._layers.layouts if layout is not None]
        assert len(layouts) == self._layers.count, "a settled sequence with tokens has bound every layer"
        sizes = Sizes(
            tuple(layout.record_bytes for layout in layouts),
            tuple(holding.counts.sink * layout.layer.token_bytes for layout in layouts),
            tuple(holding.counts.tail * layout.layer.token_bytes for layout in layouts),
        )
        header = header_of(prefix, blocks, holding.counts.tail, sizes, sequence.spent)
        return self.store.put(prefix, blocks, header, lambda layer: self._bytes(sequence, layer))

    def offer(self, sequence: Sequence, prefix: Prefix, left: int = 1) -> None:
        """Give the sequence what the store has, if that is more than it has taken over already."""
        if not prefix.length:  # opened for names that come later
            return
        taken = sequence.holding
        found = self.find(prefix, taken.tokens, left)
        if found is not None and self.load(sequence, prefix, found):
            self._sharing.ledger.blocks.release(list(taken.block_ids))
            self._sharing.ledger.pieces.release(list(taken.piece_ids))

    def match(self, prefix: Prefix, found: Match) -> Match:
        """`found`, or what the store's index promises if that is more. Reads no segment."""
        stored = self.store.promised(prefix)
        if stored is None or stored.tokens <= sum(found.hit_tokens.values()):
            return found
        left = prefix.length - stored.tokens
        rate = found.seconds_left / found.tokens_left if found.tokens_left else 0.0
        return Match({"disk": stored.tokens}, left, stored.blocks, stored.bytes, stored.seconds, rate * left)

    def find(self, prefix: Prefix, better_than: int, left: int = 1) -> Found | None:
        """A stored checkpoint of more than `better_than` tokens; None: none, or the store does not answer."""
        if monotonic() < self._paused:
            self.store.counts["skipped"] += 1
            return None
        try:
            found = within(self.seconds, lambda deadline: self.store.find(prefix, deadline, left), _close)
        except TimeoutError:
            self._pause()
            return None
        except OSError:
            self.store.counts["failed"] += 1
            return None
        space = prefix.namespace
        tokens = 0 if found is None else space.sink_tokens + found.blocks * space.block_tokens + found.tail_tokens
        fits = found is not None and self._fits(found, prefix)
        if found is not None and not (fits and tokens > better_than):
            found.close()
            return None
        return found

    def _fits(self, found: Found, prefix: Prefix) -> bool:
        """Whether this manager could have made it."""
        layouts = self.layouts(prefix)
        return found.tail_tokens < self._sharing.ledger.tail_tokens + BLOCK_TOKENS and all(
            segment.header.record_bytes == tuple(layout.record_bytes for layout in layouts)
            for segment, count in found.chain
            if count
        )

    def layouts(self, prefix: Prefix) -> list[RecordLayout]:
        """Of every layer, as the namespace says. Raises InputError for a dtype that torch does not know."""
        made = []
        for heads, dim, name in prefix.namespace.geometry:
            dtype = getattr(torch, name.removeprefix("torch."), None)
            if not isinstance(dtype, torch.dtype):
                raise InputError(f"namespace geometry: got dtype {name!r}, wanted one of torch's, such as bfloat16")
            made.append(RecordLayout(self._layers.format, LayerSpec(heads, dim, dtype, self._device)))
        return made

    def load(self, sequence: Sequence, prefix: Prefix, found: Found) -> bool:
        """Give an empty sequence the checkpoint's ids; its layers arrive when asked for. False: no room for it."""
        ledger, space = self._sharing.ledger, prefix.namespace
        counts = Counts(space.sink_tokens, found.blocks, found.tail_tokens)
        try:
            blocks, pieces = _allocate(ledger, counts)
        except OutOfBlocks:
            found.close()
            self.store.counts["no room"] += 1
            return False
        sinks, tails = tuple(pieces[: pieces_for(counts.sink)]), tuple(pieces[pieces_for(counts.sink) :])
        holding = Holding(counts, sinks, tails, tuple(blocks), (BLOCK_TOKENS,) * found.blocks)
        try:
            loading = Loading(self, sequence, holding, found, self.layouts(prefix))
        except BaseException as error:
            found.close()
            ledger.blocks.release(blocks)
            ledger.pieces.release(pieces)
            if not isinstance(error, QkvError | OSError):
                raise
            self.store.counts["failed"] += 1  # layers of another geometry, a tier that is full: a miss
            return False
        sequence.prefix, sequence.published, sequence.holding = prefix, 0, holding
        sequence.spent, sequence.loading = found.seconds, loading
        return True

    def publish(self, sequence: Sequence) -> None:
        """All layers are there: other sequences may find its blocks."""
        self._sharing.publish(sequence)

    def failed(self, error: BaseException, found: Found) -> None:
        """Count it, and take what is damaged out of use."""
        cause = error.__cause__
        if isinstance(cause, CorruptSegment):
            for segment, _ in found.chain:
                if segment.path == cause.path:
                    self.store.damaged(segment.header.namespace, segment.head.name)
        elif isinstance(cause, TimeoutError):
            self._pause()
        else:
            self.store.counts["failed"] += 1

    def _pause(self) -> None:
        self.store.counts["late"] += 1
        self._paused = monotonic() + PAUSE_SECONDS

    def _bytes(self, sequence: Sequence, layer: int) -> LayerBytes:
        layout = self._layers.layouts[layer]
        assert layout is not None
        view = self._layers.view(layer, layout, sequence.holding)
        records = _flat(view.records[view.block_ids])
        size = layout.record_bytes
        cut = [records[at : at + size] for at in range(0, len(records), size)]
        return LayerBytes(cut, _flat(view.sink), _flat(view.tail))


class Loading:
    """Layers of one sequence on their way from the store. The engine's thread only, but for the reader it starts."""

    def __init__(
        self, storing: Storing, sequence: Sequence, holding: Holding, found: Found, layouts: list[RecordLayout]
    ) -> None:
        self._storing, self._sequence, self._found = storing, sequence, found
        self._layouts, self._arrived, self._users = layouts, 0, 1
        self.complete = False
        self._holding = holding
        self._lost: LayerLost | None = None
        first, last = found.chain[0][0].header, found.last
        self._parts = [
            (first.sink_bytes[layer], found.blocks * layout.record_bytes, last.tail_bytes[layer])
            for layer, layout in enumerate(layouts)
        ]
        slab = max(map(sum, self._parts))
        pools = storing._sharing.ledger
        capacity = pools.blocks.capacity, pools.pieces.capacity
        self._rows = [storing._layers.reserve(n, layout, capacity)[1] for n, layout in enumerate(layouts)]
        read = partial(_read, found, self._parts, storing.seconds)
        self.prefetch = Prefetch(
            read, len(layouts), slab, seconds=storing.seconds, at_end=found.close,
            land=partial(_land, self._rows, self._holding.block_ids, self._parts),
        )  # fmt: skip
        weakref.finalize(self, self.prefetch.stop)  # the reader does not outlive a sequence that nobody closed

    def arrive(self, layer: int) -> None:
        """Return when the layer, and all before it, are in place. Raises LayerLost; then the sequence is of no use."""
        while self._arrived <= layer:
            if self._lost is not None:
                raise self._lost
            try:
                slab = self.prefetch.take(self._arrived)
            except LayerLost as error:
                self._lost = error
                self._storing.failed(error, self._found)
                self.prefetch.stop()
                raise
            try:
                self._place(self._arrived, slab)
            except Exception as error:  # its tier is full, or fails
                self._lost = LayerLost(self._arrived, str(error))
                self.prefetch.stop()
                raise self._lost from error
            self.prefetch.done(slab)
            self._arrived += 1
        if self._arrived == len(self._parts) and not self.complete:
            self.complete = True
            self._storing.publish(self._sequence)

    def arrive_all(self) -> None:
        """As `arrive`, for every layer."""
        self.arrive(len(self._parts) - 1)

    def share(self) -> None:
        """One more sequence waits for these layers."""
        self._users += 1

    def leave(self) -> None:
        """One sequence less; without any, nothing more is read. The reader closes the files, if it ever ends."""
        self._users -= 1
        if not self._users:
            self.prefetch.stop()

    def _place(self, layer: int, slab: memoryview) -> None:
        sink, records, tail = self._parts[layer]
        data = torch.frombuffer(slab, dtype=torch.uint8)[: sink + records + tail]
        storing, parts = self._storing, torch.split(data, [sink, records, tail])
        pools = storing._sharing.ledger
        capacity = pools.blocks.capacity, pools.pieces.capacity
        storing._layers.place(layer, self._layouts[layer], self._holding, parts, capacity, self._rows[layer])


def _close(found: Found | None) -> None:
    if found is not None:
        found.close()


def _read(found: Found, parts: list[tuple[int, int, int]], seconds: float, layer: int, slab: memoryview) -> None:
    """Sink, records and tail of one layer, one after another, each verified. parts: their bytes, by layer."""
    deadline = monotonic() + seconds
    sink, records, tail = parts[layer]
    at = sink
    for place, (segment, count) in enumerate(found.chain):
        size = segment.header.record_bytes[layer]
        rows = slab[at : at + count * size]
        at += len(rows)
        own_tail = slab[sink + records : sink + records + tail] if place == len(found.chain) - 1 else None
        segment.read_layer(layer, rows, sink=slab[:sink] if not place else None, tail=own_tail, deadline=deadline)


def _land(
    rows: list[torch.Tensor | None], ids: tuple[int, ...], parts: list[tuple[int, int, int]], layer: int,
    slab: memoryview,
) -> None:  # fmt: skip
    """A layer's records from its slab to its rows, on the reader's thread. `place` looks whether they are still those.

    The rows belong to the sequence until it is closed, and closing it stops the reader first.
    """
    held, (sink, records, _) = rows[layer], parts[layer]
    if held is not None:
        with torch.inference_mode(False):
            land(held, ids, torch.frombuffer(slab, dtype=torch.uint8)[sink : sink + records])


def _allocate(ledger: Ledger, counts: Counts) -> tuple[list[int], list[int]]:
    """Blocks and pieces for these counts, and room for a question: the pools do not grow as soon as it comes."""
    question = Counts(0, 1, BLOCK_TOKENS) if ledger.blocks.limit is None else Counts(0, 0, 0)
    blocks = _first(ledger.blocks, counts.sealed, question.sealed)
    try:
        pieces = pieces_for(counts.sink) + pieces_for(counts.tail)
        return blocks, _first(ledger.pieces, pieces, pieces_for(question.tail))
    except BaseException:
        ledger.blocks.release(blocks)
        raise


def _first(pool: BlockPool, count: int, spare: int) -> list[int]:
    """`count` ids; the pool has at least `spare` more."""
    ids = pool.allocate(count + spare)
    pool.release(ids[count:])
    return ids[:count]


def _flat(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in host memory, C order. Copies unless it lies so already."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).flatten().numpy().data
