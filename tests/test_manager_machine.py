"""Any calls in any order, against lists of tokens and records sealed in one shot: every byte, at every step.

Hypothesis searches for the shortest sequence of calls that breaks it. The long run is heavy: 400 examples of up to 50
steps each.
"""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from qkv import KVManager, Sequence
from qkv.errors import OutOfBlocks, ShapeError
from qkv.formats import record
from qkv.prefix import Namespace

LAYERS, DIM, VOCABULARY = 2, 16, 4096
TABLE = torch.randn(VOCABULARY, 2, 1, DIM, generator=torch.Generator().manual_seed(0))  # K and V by token id
PROMPTS = [[(start + 7 * at) % VOCABULARY for at in range(900)] for start in (0, 1, 2)]
PROMPTS += [PROMPTS[0][:400] + PROMPTS[1][400:], PROMPTS[0][:700] + PROMPTS[2][700:]]


def kv(tokens: list[int], layer: int) -> torch.Tensor:
    """[2, 1, T, D]"""
    return TABLE[tokens].movedim(0, 2) * (1 + layer)


class Plain:
    """What a sequence should hold: lists of token ids. `blocks`: 128 tokens as sealed, how many of them count."""

    def __init__(self, sink_tokens: int, tail_tokens: int) -> None:
        self.sizes = sink_tokens, tail_tokens
        self.sink: list[int] = []
        self.blocks: list[tuple[list[int], int]] = []
        self.tail: list[int] = []
        self.left: list[int] = []  # of its prompt, not appended yet

    @property
    def length(self) -> int:
        return len(self.sink) + sum(length for _, length in self.blocks) + len(self.tail)

    def append(self, tokens: list[int]) -> None:
        for token in tokens:
            fits = len(self.sink) < self.sizes[0] and not self.blocks and not self.tail
            (self.sink if fits else self.tail).append(token)
            if len(self.tail) == self.sizes[1] + 128:
                self.blocks.append((self.tail[:128], 128))
                del self.tail[:128]

    def crop(self, length: int) -> None:
        while self.length > length:
            if self.tail:
                self.tail.pop()
            elif self.blocks:
                block, counts = self.blocks.pop()
                if counts > 1:
                    self.blocks.append((block, counts - 1))
            else:
                self.sink.pop()

    def copy(self) -> "Plain":
        twin = Plain(*self.sizes)
        twin.sink, twin.blocks, twin.tail, twin.left = list(self.sink), list(self.blocks), list(self.tail), self.left
        return twin


class Machine(RuleBasedStateMachine):
    """`held`: open sequences and what they should hold. `steps`: of all examples."""

    steps = 0

    @initialize(
        format=st.sampled_from(["kivi2", "int8", "exact", "kivi3/kivi4"]),
        sink=st.sampled_from([0, 5, 64]),
        tail=st.sampled_from([0, 7, 64]),
        blocks=st.sampled_from([6, 14, 40, None]),
    )
    def begin(self, format: str, sink: int, tail: int, blocks: int | None) -> None:
        self.manager = KVManager(LAYERS, format, sink_tokens=sink, tail_tokens=tail, num_blocks=blocks)
        geometry = ((1, DIM, "float32"),) * LAYERS
        self.name = Namespace("w", geometry, self.manager.format.id, 1, 128, sink)
        self.held: list[tuple[Sequence, Plain]] = []
        self.pinned: list[int] = []
        self.closed: Sequence | None = None

    def pick(self, which: int) -> tuple[Sequence, Plain]:
        return self.held[which % len(self.held)]

    any_sequence = precondition(lambda self: bool(self.held))
    which = st.integers(0, 30)

    @precondition(lambda self: len(self.held) < 8)
    @rule(prompt=st.integers(0, 4), length=st.integers(0, 900), reuse=st.sampled_from(["same", "blocks"]))
    def open(self, prompt: int, length: int, reuse: str) -> None:
        tokens = PROMPTS[prompt][:length]
        promised = self.manager.match(tokens, self.name, reuse=reuse)
        sequence = self.manager.open(tokens, self.name, reuse=reuse)
        taken = self.manager.length(sequence)
        assert sum(promised.hit_tokens.values()) == taken
        assert promised.tokens_left == length - taken
        assert taken < max(1, length)
        plain = Plain(self.manager.sink_tokens, self.manager.tail_tokens)
        counts = sequence.holding.counts
        plain.sink = tokens[: counts.sink]
        starts = range(counts.sink, counts.sink + 128 * counts.sealed, 128)
        plain.blocks = [(tokens[start : start + 128], 128) for start in starts]
        plain.tail = tokens[taken - counts.tail : taken]
        plain.left = tokens[taken:]
        assert plain.length == taken
        self.held.append((sequence, plain))

    @any_sequence
    @rule(which=which, count=st.sampled_from([0, 1, 2, 31, 33, 127, 128, 300, 900]))
    def append(self, which: int, count: int) -> None:
        sequence, plain = self.pick(which)
        tokens, left = plain.left[:count], plain.left[count:]
        try:
            for layer in range(LAYERS):
                self.manager.append(sequence, layer, *kv(tokens, layer))
        except OutOfBlocks:
            assert self.manager.pool.limit is not None
            return
        plain.append(tokens)
        plain.left = left

    @any_sequence
    @rule(which=which, count=st.sampled_from([1, 40, 200]), layers=st.integers(1, LAYERS - 1))
    def give_up_half_way(self, which: int, count: int, layers: int) -> None:
        sequence, _ = self.pick(which)
        try:
            for layer in range(layers):
                self.manager.append(sequence, layer, *kv(PROMPTS[0][:count], layer))
        except OutOfBlocks:
            return
        self.manager.check()
        self.manager.abort(sequence)

    @precondition(lambda self: 0 < len(self.held) < 8)
    @rule(which=which)
    def fork(self, which: int) -> None:
        sequence, plain = self.pick(which)
        self.held.append((self.manager.fork(sequence), plain.copy()))

    @any_sequence
    @rule(which=which, keep=st.integers(0, 1000), back=st.integers(0, 200), near=st.booleans())
    def crop(self, which: int, keep: int, back: int, near: bool) -> None:
        sequence, plain = self.pick(which)
        length = max(0, plain.length - back) if near else min(keep, plain.length)
        with pytest.raises(ShapeError):
            self.manager.crop(sequence, plain.length + 1)
        self.manager.crop(sequence, length)
        if length < plain.length:
            plain.left = []
        plain.crop(length)

    @any_sequence
    @rule(which=which)
    def checkpoint(self, which: int) -> None:
        self.manager.checkpoint(self.pick(which)[0])

    @any_sequence
    @rule(which=which)
    def close(self, which: int) -> None:
        sequence, plain = self.pick(which)
        self.manager.close(sequence)
        self.held.remove((sequence, plain))

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        self.manager.pool.evict(count)

    @any_sequence
    @rule(which=which)
    def pin(self, which: int) -> None:
        pool = self.manager.pool
        ids = [block for block in self.pick(which)[0].block_ids if block in pool._index.keys]
        pool.pin(ids)
        self.pinned += ids

    @rule()
    def unpin(self) -> None:
        self.manager.pool.unpin(self.pinned)
        self.pinned = []

    @invariant()
    def every_byte_is_what_one_shot_gives(self) -> None:
        if not hasattr(self, "manager"):
            return
        Machine.steps += 1
        self.manager.check()
        for sequence, plain in self.held:
            assert self.manager.length(sequence) == plain.length
            if not plain.length:
                continue
            for layer in range(LAYERS):
                view = self.manager.view(sequence, layer)
                assert torch.equal(view.sink, kv(plain.sink, layer))
                assert torch.equal(view.tail, kv(plain.tail, layer))
                assert view.block_lengths.tolist() == [length for _, length in plain.blocks]
                assert torch.equal(view.records[view.block_ids], self.sealed(plain, layer))

    def sealed(self, plain: Plain, layer: int) -> torch.Tensor:
        """The reference's records of all blocks at once."""
        layout = self.manager.layout(layer)
        assert layout is not None
        both = [kv(block, layer) for block, _ in plain.blocks]
        if not both:
            return torch.zeros(0, layout.record_bytes, dtype=torch.uint8)
        k, v = torch.stack(both, 1)
        return record.seal(k, v, layout)


def run(examples: int, steps: int) -> None:
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    options: Any = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=quiet
    )
    run_state_machine_as_test(Machine, settings=options)


def test_any_calls_in_any_order() -> None:
    run(30, 30)


@pytest.mark.heavy
@pytest.mark.timeout(3000)
def test_any_calls_in_any_order_for_20000_steps() -> None:
    Machine.steps = 0
    run(500, 50)
    assert Machine.steps >= 20_000
