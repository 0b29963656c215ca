"""KVManager: sequences that append exact K and V, keep them in sealed blocks, and attend to those blocks.

Life of a block: append -> exact tail -> seal (once) -> read by attend, shared by fork -> released with its last owner.
A sealed block is never encoded again, so results do not depend on how tokens arrived. Knows no model and no engine.
"""

import itertools
from typing import TYPE_CHECKING, Any

import torch

from qkv import ops
from qkv.budget import Admission, Limits, check_least
from qkv.errors import InputError, SequenceClosed, ShapeError
from qkv.formats import get_format
from qkv.layers import AXES, Layers
from qkv.ledger import Ledger, settled
from qkv.pool import BlockPool
from qkv.prefix import Namespace, Prefix
from qkv.reports import Cost, Match, Usage
from qkv.reports import Memory as Memory
from qkv.sequence import Sequence, arrive
from qkv.sharing import Sharing
from qkv.spec import BLOCK_TOKENS, AttendOptions, Format, KVView, LayerSpec, RecordLayout
from qkv.step import Step, check_plan
from qkv.usage import cost, usage

if TYPE_CHECKING:
    from qkv.offload.disk import DiskStore
    from qkv.offload.onefile import OneFile
    from qkv.offload.tier import Device, Disk, Host
    from qkv.storing import Storing


class KVManager:
    """The KV cache of one model on one device.

    format       a name, `K/V`, or a Format; what is not exact is sealed in blocks of 128 tokens
    sink_tokens, tail_tokens  first and newest tokens kept exact; None: the format's default
    num_blocks   most blocks ever held; None: grows
    window       no query ever sees further back (every layer slides); blocks and the sink wholly behind it are given
                 back, but for 128 tokens that a crop may need. Such a manager shares by `fork`, not by name
    budget       bytes (or "1.5GiB") that `memory()` never passes: blocks, and the exact tokens of `max_sequences` at a
                 time. Needs `layers`, each layer's geometry; the tensors are made at full size at their first use.
    tiers        [Device("2GiB"), Host("8GiB"), Disk(folder, "50GiB")], or fewer: layers whose records the device has no
                 room for lie in the next tier and are streamed through it (qkv/offload/tier.py). Needs `layers`; exact
                 tokens come on top
    A layer's heads, head_dim, dtype and device are fixed by its first append. For one engine thread; `memory`, `stats`,
    and the pool's `stats`, `events` and `match` may be read from any.
    Raises FormatError, ShapeError.
    """

    def __init__(  # noqa: PLR0913  # each is a setting with a default
        self,
        num_layers: int,
        format: str | Format = "kivi4",
        *,
        sink_tokens: int | None = None,
        tail_tokens: int | None = None,
        num_blocks: int | None = None,
        window: int | None = None,
        budget: str | int | None = None,
        layers: list[LayerSpec] | None = None,
        max_sequences: int = 8,
        tiers: "list[Device | Host | Disk] | None" = None,
    ) -> None:
        self.format = get_format(format)
        self.sink_tokens = self.format.sink_tokens if sink_tokens is None else sink_tokens
        self.tail_tokens = self.format.tail_tokens if tail_tokens is None else tail_tokens
        check_least(
            num_layers=(num_layers, 1),
            sink_tokens=(self.sink_tokens, 0),
            tail_tokens=(self.tail_tokens, 0),
            window=(1 if window is None else window, 1),
            num_blocks=(1 if num_blocks is None else num_blocks, 1),
            max_sequences=(max_sequences, 1),
        )
        self.num_layers = num_layers
        limits = Limits(budget, tiers, num_blocks, max_sequences, (self.sink_tokens, self.tail_tokens))
        self.budget, records, num_blocks = limits.room(self.format, num_layers, layers)
        pieces = BlockPool(None if self.budget is None else self.budget.num_pieces, what="exact pieces")
        self._ledger = Ledger(BlockPool(num_blocks), pieces, self.sink_tokens, self.tail_tokens, window)
        self._sharing = Sharing(self._ledger)
        self._layers = Layers(num_layers, self.format, layers, self.budget, records)
        self._storing: Storing | None = None
        self._steps: dict[int, Step] = {}  # by sequence: appends that have not reached every layer
        self._sequences: dict[int, Sequence] = {}
        self._ids = itertools.count()

    def open(
        self, tokens: Any = None, namespace: Namespace | None = None, *, extra: Any = None, reuse: str = "same"
    ) -> Sequence:
        """A new sequence: empty, or with what earlier ones of the same namespace have computed of `tokens`.

        tokens     the prompt's token ids; at least the last is left to compute, from `length(sequence)` on
        namespace  all that decides a record's bytes besides the tokens (qkv/prefix.py)
        extra      position -> what stands there besides the token (a picture's hash)
        reuse      "same": go on only where a `checkpoint` was kept, and so exactly as that run did. "blocks": from the
                   last published block on; tokens behind it are computed over records, as if the prompt came in chunks.
        Raises InputError.
        """
        prefix = None
        if namespace is not None:
            self._sharing.check_namespace(namespace, self.format.id)
            given = () if tokens is None else tokens
            prefix = Prefix(namespace, given, tail_tokens=self.tail_tokens, extra=extra)
        elif tokens is not None:
            raise InputError("open: got tokens without a namespace; say what else decides their K and V")
        sequence = Sequence(next(self._ids))
        if prefix is not None:
            self._sharing.take(sequence, prefix, reuse)
            if self._storing is not None:
                self._storing.offer(sequence, prefix)
        self._sequences[sequence.id] = sequence
        return sequence

    def name_tokens(self, sequence: Sequence, tokens: Any, namespace: Namespace | None = None) -> None:
        """More token ids behind those known, so that later blocks can be found too. Raises InputError.

        namespace: for a sequence opened without one, or of another; `tokens` then are all of its tokens.
        """
        self._mine(sequence)
        if namespace is not None and (sequence.prefix is None or sequence.prefix.namespace != namespace):
            self._sharing.begin_names(sequence, namespace, self.format.id)
        if sequence.prefix is None:
            raise InputError(f"sequence {sequence.id} has no names: it was opened without a namespace, or cropped")
        sequence.prefix.extend(tokens)
        self._sharing.publish(sequence)

    def checkpoint(self, sequence: Sequence) -> bool:
        """Keep the exact tail as it stands, so that a sequence with the same tokens can go on from here.

        Costs 64 to 191 exact tokens, and blocks of which an equal one was published before, until it is dropped: with
        its blocks, for want of room, or as the one used longest ago. False where the sequence's blocks cannot be
        found by name (qkv/sharing.py). Raises ShapeError in the middle of a step.
        """
        self._mine(sequence)
        settled(sequence, "checkpoint")
        return self._sharing.keep(sequence)

    def attach(
        self, store: "DiskStore | OneFile", *, device: str | torch.device = "cpu", seconds: float = 10.0
    ) -> None:
        """Let `open` find what `save` has stored, in any process. seconds: most for a look-up, and for a layer."""
        self._storing = self._storing_of(store, device, seconds)

    def save(self, sequence: Sequence, store: "OneFile | None" = None) -> str:
        """Store where the sequence stands, in the attached store or this file; returns its name. Waits for the disk.

        Raises InputError (no store, no names for all its tokens), StoreFull, OSError; then nothing is stored.
        """
        self._mine(sequence)
        return self._stored("save", store).save(sequence)

    def restore(self, tokens: Any, namespace: Namespace, *, left: int = 0) -> Sequence | None:
        """A sequence with the most of `tokens`, but for the last `left`, that the store has; None: it has none.

        Layers may be on their way: using one waits for it, and raises LayerLost if it cannot be had; close it then.
        """
        storing, sequence = self._stored("restore"), self.open(namespace=namespace)
        storing.offer(sequence, Prefix(namespace, tokens, tail_tokens=self.tail_tokens), left)
        if sequence.holding.tokens:
            return sequence
        self.close(sequence)
        return None

    def match(self, tokens: Any, namespace: Namespace, *, extra: Any = None, reuse: str = "same") -> Match:
        """What `open` would find: tokens by tier, tokens left, bytes, seconds. Changes nothing."""
        prefix = Prefix(namespace, tokens, tail_tokens=self.tail_tokens, extra=extra)
        found = self._sharing.match(prefix, reuse)
        return found if self._storing is None else self._storing.match(prefix, found)

    @property
    def window(self) -> int | None:
        return self._ledger.window

    @property
    def pool(self) -> BlockPool:
        """Of the blocks: stats, events, pins, quotas."""
        return self._ledger.blocks

    def length(self, sequence: Sequence) -> int:
        """Tokens stored in every layer; a step under way does not count."""
        self._mine(sequence)
        return sequence.holding.tokens

    @torch.no_grad()
    def append(self, sequence: Sequence, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v [H, T, D] (K after RoPE) behind the layer's tokens; seals every full block older than the tail.

        A step of one sequence: the first layer reserves what all layers need, and the sequence is longer when the last
        one has its T tokens. Copies what it keeps. `plan` does the same for many sequences.
        Raises ShapeError (also: another T than the step's, a layer twice in a step), FormatError (inf, NaN),
        OutOfBlocks, SequenceClosed; then nothing has changed, and `abort` takes the step back.
        """
        self._layers.bind(layer, k, v)
        self._mine(sequence)
        step = self._steps.get(sequence.id)
        if step is None:
            if sequence.growth is not None:
                raise ShapeError(f"sequence {sequence.id} is in a planned step; write to that, or abort it first")
            for name, x in (("k", k), ("v", v)):
                ops.check_finite(name, x, AXES)
            step = self._steps[sequence.id] = self.plan([sequence], [k.shape[1]])
        try:
            step.write(layer, 0, k, v)
            step.finish(layer)
        finally:
            if not step.done:
                step.abort()
            if not step.open:
                del self._steps[sequence.id]

    def admission(self, lengths: list[int]) -> Admission:
        """Whether new sequences of these lengths (prompt and answer) would fit beside what is held now."""
        blocks, pieces = (sum(each) for each in zip((0, 0), *map(self._ledger.needs, lengths), strict=True))
        return Admission(blocks, self._ledger.blocks.available, pieces, self._ledger.pieces.available)

    def plan(self, sequences: list[Sequence], tokens: list[int]) -> Step:
        """A step of `tokens[i]` more for `sequences[i]`, with all blocks and pieces it needs, for all layers at once.

        Raises OutOfBlocks, ShapeError (a sequence twice, or in another step), SequenceClosed; then nothing has changed.
        """
        for sequence in sequences:
            self._mine(sequence)
        check_plan(sequences, tokens)
        return Step(self._sharing, self._layers, sequences, tokens)

    def abort(self, sequence: Sequence) -> None:
        """Take back `append`s that have not reached every layer; the sequence is as it was before them."""
        self._mine(sequence)
        step = self._steps.pop(sequence.id, None)
        if step is not None:
            step.abort()

    def attend(
        self,
        sequence: Sequence,
        layer: int,
        q: torch.Tensor,
        options: AttendOptions,
        *,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
        need_lse: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of q [H*G, Q, D], the last Q positions, over all stored tokens and then `new`.

        `new` k, v [H, T, D] take part exactly, as a prompt's own pass should see them; `append` them afterwards.
        Returns out [H*G, Q, D] and the log-sum-exp float32 [H*G, Q] (None: not asked and not at hand).
        Changes nothing. Raises ShapeError, SequenceClosed.
        """
        return ops.attend(q, self.view(sequence, layer, new), options, need_lse)

    def attend_many(
        self,
        sequences: list[Sequence],
        layer: int,
        queries: list[torch.Tensor],
        options: AttendOptions,
        *,
        new: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
        need_lse: bool = True,
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """`attend` for many sequences of any lengths and query counts in one go; decode steps share threads."""
        arrive(sequences, layer)
        steps: list[Any] = new or [None] * len(sequences)
        views = [self.view(each, layer, step) for each, step in zip(sequences, steps, strict=True)]
        return ops.attend_many(queries, views, options, need_lse)

    def view(self, sequence: Sequence, layer: int, new: tuple[torch.Tensor, torch.Tensor] | None = None) -> KVView:
        """Where the sequence's K and V of one layer lie, `new` [H, T, D] behind them. Copies only `new`."""
        self._mine(sequence)
        sequence.arrive(layer)
        if new is not None:
            layout = self._layers.bind(layer, *new)
        else:
            bound = self._layers.layouts[self._layers.index(layer)]
            if bound is None:
                raise ShapeError(f"layer {layer}: nothing appended yet; append, or pass `new`")
            layout = bound
        return self._layers.view(layer, layout, sequence.layer_holding(layer), new)

    def gather(self, sequence: Sequence, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense dequantised k, v [H, T, D] in the model dtype; zeros where the window has passed. Allocates."""
        view, dropped = self.view(sequence, layer), sequence.layer_holding(layer).dropped
        spec, first = view.layout.layer, dropped + view.table.sink_tokens
        tokens = dropped + view.tokens
        dense = torch.empty(2, spec.kv_heads, tokens, spec.head_dim, dtype=spec.dtype, device=spec.device)
        behind = first + view.table.sealed_tokens
        dense[:, :, :dropped] = 0
        dense[:, :, dropped:first] = view.sink
        ops.unseal_into(view, dense[:, :, first:behind])
        dense[:, :, behind:] = view.tail
        return dense[0], dense[1]

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same tokens. Shares every record and exact piece; who writes to one copies it."""
        self._mine(sequence)
        settled(sequence, "fork", arrive=False)
        twin = self.open()
        if sequence.loading is not None:
            sequence.loading.share()
            twin.loading = sequence.loading
        self._ledger.share(sequence, twin)
        twin.prefix, twin.published = sequence.prefix and sequence.prefix.copy(), sequence.published
        twin.spent = sequence.spent
        return twin

    def crop(self, sequence: Sequence, length: int) -> None:
        """Keep the first `length` tokens. Records are never rewritten: the last one kept may count fewer tokens.

        Raises ShapeError if `length` is negative or beyond the sequence, or if its newest tokens' window reaches what
        is dropped (0 is always allowed); then nothing has changed.
        """
        self._mine(sequence)
        self.check_crop(sequence, length)
        sequence.spent *= length / max(1, sequence.holding.tokens)
        self._ledger.crop(sequence, length)
        lengths, prefix = sequence.holding.block_lengths, sequence.prefix
        sequence.published = min(sequence.published, len(lengths))
        if prefix is not None and prefix.length > length:
            prefix.crop(length)
        if lengths and lengths[-1] < BLOCK_TOKENS:
            sequence.prefix = None  # later blocks begin at other positions than names say

    def check_crop(self, sequence: Sequence, length: int) -> None:
        """Raises ShapeError where `crop` would. Changes nothing."""
        have, least = settled(sequence, "crop"), self._ledger.shortest(sequence)
        if not 0 <= length <= have or 0 < length < least:
            stored = f"0, or {least} to {have}, what the window keeps" if least else f"0 to {have}, the tokens stored"
            raise ShapeError(f"crop: got length {length}, wanted {stored}")

    def close(self, sequence: Sequence) -> None:
        """Give back the sequence's blocks and pieces; any later use of it raises SequenceClosed."""
        self._mine(sequence)
        self.abort(sequence)
        if sequence.growth is not None:
            raise ShapeError(f"close: sequence {sequence.id} is in a planned step; finish that, or abort it")
        if sequence.loading is not None:
            sequence.loading.leave()
        self._ledger.close(sequence)
        sequence.closed = True
        del self._sequences[sequence.id]

    def memory(self) -> Memory:
        """Bytes of all that is held, in use or free for the next sequence, by tier."""
        records = self._layers.records
        return Memory(records.nbytes, self._layers.exact.nbytes, **records.elsewhere)

    def held(self, sequences: list[Sequence]) -> Memory:
        """Bytes of the blocks and pieces that these sequences hold, each counted once, a step under way included."""
        holdings = [h for s in sequences for h in (s.holding, s.growth.after if s.growth else s.holding)]
        blocks = len({block for holding in holdings for block in holding.block_ids})
        pieces = len({piece for holding in holdings for piece in holding.piece_ids})
        of_block, of_piece = self._layers.row_bytes
        return Memory(blocks * of_block, pieces * of_piece)

    def stats(self) -> Usage:
        """Bytes by kind, in use and free, and how full they are. See `pool.stats()` for blocks by state and hits."""
        held, sequences = self.memory(), list(self._sequences.values())
        return usage(self._sharing, sequences, self._layers.row_bytes, (held.records, held.exact))

    def cost(self, sequence: Sequence) -> Cost:
        """What closing the sequence would give back, and the measured seconds of work that would be lost with it.

        To preempt, close the one with the fewest seconds a byte. Less is lost if blocks are found again.
        """
        self._mine(sequence)
        return cost(self._ledger, sequence, self._layers.row_bytes)

    def check(self) -> None:
        """Walk the whole state; AssertionError if anything disagrees."""
        sequences = list(self._sequences.values())
        assert not any(sequence.closed for sequence in sequences)
        self._sharing.check()
        self._ledger.check(sequences, self._sharing.held())
        self._layers.check(sequences, self._ledger)

    def layout(self, layer: int) -> RecordLayout | None:
        """The layer's record layout; None before its first append."""
        return self._layers.layouts[self._layers.index(layer)]

    def _stored(self, verb: str, store: "OneFile | None" = None) -> "Storing":
        found = self._storing if store is None else self._storing_of(store, "cpu", 10.0)
        if found is None:
            raise InputError(f"{verb}: this manager has no store; attach one first")
        return found

    def _storing_of(self, store: "DiskStore | OneFile", device: str | torch.device, seconds: float) -> "Storing":
        from qkv.storing import Storing  # needs xxhash, which only a store does

        return Storing(store, self._sharing, self._layers, torch.device(device), seconds)

    def _mine(self, sequence: Sequence) -> None:
        if sequence.closed:
            raise SequenceClosed(f"sequence {sequence.id} is closed; open a new one")
        if self._sequences.get(sequence.id) is not sequence:
            raise ShapeError(f"sequence {sequence.id} belongs to another KVManager")
