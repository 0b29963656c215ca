"""A step of many sequences: what each alone would get, in every layer or not at all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qkv import AttendOptions, KVManager, Sequence, ops
from qkv.errors import FormatError, InputError, OutOfBlocks, ShapeError
from qkv.layers import Layers
from qkv.ledger import Ledger
from qkv.offload.device import DeviceTier
from qkv.pool import BlockPool
from qkv.spec import LayerSpec
from qkv.step import Step

OPTIONS = AttendOptions(0.25)
LAYERS, HEADS, GROUP, DIM = 3, 2, 3, 16
# histories and new tokens: nothing, the sink in the making, decode steps, one that seals, chunks, one that seals three
HISTORY = (0, 30, 300, 255, 400, 511, 900)
TOKENS = (40, 60, 1, 1, 1, 90, 400)


def manager_with(history: tuple[int, ...] = HISTORY, **options: Any) -> tuple[KVManager, list[Sequence]]:
    torch.manual_seed(3)
    manager = KVManager(LAYERS, "kivi4", **options)
    sequences = [manager.open() for _ in history]
    for sequence, tokens in zip(sequences, history, strict=True):
        for layer in range(LAYERS if tokens else 0):
            manager.append(sequence, layer, *torch.randn(2, HEADS, tokens, DIM))
    return manager, sequences


def inputs(tokens: tuple[int, ...] = TOKENS) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    torch.manual_seed(4)
    total = sum(tokens)
    return [
        (torch.randn(total, HEADS * GROUP, DIM), torch.randn(total, HEADS, DIM), torch.randn(total, HEADS, DIM))
        for _ in range(LAYERS)
    ]


def state(manager: KVManager, sequences: list[Sequence]) -> list[Any]:
    found: list[Any] = []
    for sequence in sequences:
        found += [manager.length(sequence), sequence.block_ids, sequence.holding.piece_ids]
        if manager.length(sequence):
            found += [torch.stack(manager.gather(sequence, layer)).tolist() for layer in range(LAYERS)]
    return found


def run(manager: KVManager, sequences: list[Sequence], each: Callable[[Step, int], None] = lambda *_: None) -> Any:
    outs = []
    with manager.plan(sequences, list(TOKENS)) as step:
        for layer, (q, k, v) in enumerate(inputs()):
            each(step, layer)
            outs.append(step.attend(layer, q, k, v, OPTIONS))
    return outs


def test_each_sequence_gets_what_it_gets_alone() -> None:
    manager, sequences = manager_with()
    other, alone = manager_with()
    together = run(manager, sequences)
    manager.check()
    for layer, (q, k, v) in enumerate(inputs()):
        first = 0
        for sequence, tokens in zip(alone, TOKENS, strict=True):
            part = slice(first, first + tokens)
            first += tokens
            own = k[part].transpose(0, 1), v[part].transpose(0, 1)
            query = q[part].transpose(0, 1)
            if tokens == 1:
                other.append(sequence, layer, *own)
                out, _ = other.attend(sequence, layer, query, OPTIONS)
            else:
                out, _ = other.attend(sequence, layer, query, OPTIONS, new=own)
                other.append(sequence, layer, *own)
            torch.testing.assert_close(together[layer][part], out.transpose(0, 1))
    for sequence, single, tokens, before in zip(sequences, alone, TOKENS, HISTORY, strict=True):
        assert manager.length(sequence) == before + tokens
        for layer in range(LAYERS):
            for got, want in zip(manager.gather(sequence, layer), other.gather(single, layer), strict=True):
                assert torch.equal(got, want)


SITES = [
    (ops, "attend_many"), (ops, "store_tokens"), (ops, "seal"), (ops, "check_finite"), (DeviceTier, "reserve"),
    (DeviceTier, "copy_row"), (BlockPool, "allocate"), (Ledger, "begin"), (Layers, "view"), (Layers, "write"),
    (Layers, "bind"), (Step, "finish"),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name"), SITES, ids=[name for _, name in SITES])
def test_a_step_that_fails_at_any_call_changes_nothing(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-th call of one function fails, for every n until the step gets through."""
    manager, sequences = manager_with()
    twins = [manager.fork(sequence) for sequence in sequences]  # so that tails are shared, and copied
    before = state(manager, sequences + twins)
    other, undisturbed = manager_with()
    for sequence in undisturbed:
        other.fork(sequence)
    want = run(other, undisturbed)
    real, failures = getattr(owner, name), 0
    while True:
        counter = {"left": failures}

        def counted(*args: Any, counter: dict[str, int] = counter, **kwargs: Any) -> Any:
            counter["left"] -= 1
            if counter["left"] == -1:
                raise RuntimeError("injected")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)
        try:
            got = run(manager, sequences)
        except RuntimeError:
            monkeypatch.setattr(owner, name, real)
            manager.check()
            assert state(manager, sequences + twins) == before, f"call {failures} of {name}"
            failures += 1
        else:
            break
    monkeypatch.setattr(owner, name, real)
    assert failures > 0, "the site is on the way"
    for one, another in zip(got, want, strict=True):
        torch.testing.assert_close(one, another)
    for sequence, single in zip(sequences, undisturbed, strict=True):
        assert torch.equal(torch.stack(manager.gather(sequence, 2)), torch.stack(other.gather(single, 2)))
    assert state(manager, twins) == before[len(before) // 2 :]
    manager.check()


def test_an_error_in_the_model_changes_nothing() -> None:
    manager, sequences = manager_with()
    before = state(manager, sequences)

    def broken(step: Step, layer: int) -> None:
        if layer == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(manager, sequences, broken)
    assert state(manager, sequences) == before
    manager.check()


def test_a_step_without_room_changes_nothing() -> None:
    manager, sequences = manager_with(num_blocks=13)
    before, free = state(manager, sequences), manager.pool.available
    with pytest.raises(OutOfBlocks) as caught:
        manager.plan(sequences, list(TOKENS))
    assert caught.value.needed > caught.value.free + caught.value.evictable
    assert manager.pool.available == free
    assert state(manager, sequences) == before
    manager.check()


def test_wrong_use_is_refused() -> None:
    manager, sequences = manager_with()
    one, two = sequences[2:4]
    for wrong, match in (
        (lambda: manager.plan([one, one], [1, 1]), "each sequence once"),
        (lambda: manager.plan([one, two], [1]), "2 sequences and 1 counts"),
        (lambda: manager.plan([one], [-1]), "got -1 tokens"),
        (lambda: KVManager(LAYERS).plan([one], [1]), "another KVManager"),
    ):
        with pytest.raises(ShapeError, match=match):
            wrong()
    step = manager.plan([one, two], [1, 2])
    for verb in (manager.fork, lambda s: manager.crop(s, 3), manager.checkpoint, manager.close):
        with pytest.raises(ShapeError, match="step"):
            verb(one)
    with pytest.raises(ShapeError, match="in a planned step"):
        manager.append(one, 0, *torch.randn(2, HEADS, 1, DIM))
    with pytest.raises(ShapeError, match="in a step already"):
        manager.plan([one], [1])
    q, k, v = torch.randn(3, HEADS * GROUP, DIM), torch.randn(3, HEADS, DIM), torch.randn(3, HEADS, DIM)
    step.attend(1, q, k, v, OPTIONS)
    with pytest.raises(ShapeError, match=r"layer 1 has its tokens of this step already, layers \[0, 2\] have not"):
        step.attend(1, q, k, v, OPTIONS)
    with pytest.raises(ShapeError, match="it is over, or was aborted"):
        step.attend(0, q, k, v, OPTIONS)
    for bad in ((q[:2], k, v), (q, k[:2], v[:2]), (q, k[:, :1], v[:, :1]), (q[..., :8], k, v), (q, k, v[..., :8])):
        with manager.plan([one, two], [1, 2]) as step, pytest.raises(ShapeError):
            step.attend(0, *bad, OPTIONS)
    spoiled = k.clone()
    spoiled[2, 1, 3] = float("inf")
    with manager.plan([one, two], [1, 2]) as step, pytest.raises(FormatError, match="k: got inf at head 1, token 1"):
        step.attend(0, q, spoiled, v, OPTIONS)
    manager.check()
    assert (manager.length(one), manager.length(two)) == HISTORY[2:4]


def test_appends_of_one_step_must_agree() -> None:
    manager, sequences = manager_with()
    one = sequences[2]
    manager.append(one, 1, *torch.randn(2, HEADS, 5, DIM))
    with pytest.raises(ShapeError, match="layer 0 got 4 tokens, wanted 5"):
        manager.append(one, 0, *torch.randn(2, HEADS, 4, DIM))
    with pytest.raises(ShapeError, match=r"layer 1 has its tokens of this step already, layers \[0, 2\]"):
        manager.append(one, 1, *torch.randn(2, HEADS, 5, DIM))
    assert manager.length(one) == 300
    manager.append(one, 0, *torch.randn(2, HEADS, 5, DIM))
    manager.abort(one)
    manager.check()
    assert manager.length(one) == 300
    for layer in range(LAYERS):
        manager.append(one, layer, *torch.randn(2, HEADS, 5, DIM))
    assert manager.length(one) == 305


def test_a_budget_is_never_passed() -> None:
    layers = [LayerSpec(HEADS, DIM, torch.float32)] * LAYERS
    manager = KVManager(LAYERS, "kivi4", budget="600KiB", layers=layers, max_sequences=2)
    sequences, refused = [], 0
    for length in (40, 700, 300, 2000, 100):
        admission = manager.admission([length])
        sequence = manager.open()
        try:
            for layer in range(LAYERS):
                manager.append(sequence, layer, *torch.randn(2, HEADS, length, DIM))
        except OutOfBlocks:
            refused += 1
            assert not admission.fits
        else:
            assert admission.fits
            sequences.append(sequence)
        assert manager.memory().total <= 600 * 1024
        manager.check()
    assert refused > 0 < len(sequences)
    with pytest.raises(ShapeError, match="as was declared"):
        KVManager(1, budget="1MiB", layers=layers[:1]).append(sequences[0], 0, *torch.randn(2, 1, 4, DIM))
    for budget in ("-1GiB", "0", "lots", -5, 0, True, 2**70):
        with pytest.raises(InputError, match="budget: got"):
            KVManager(LAYERS, budget=budget, layers=layers)
    with pytest.raises(ShapeError, match="got 1000 bytes, wanted at least"):
        KVManager(LAYERS, budget=1000, layers=layers)
    with pytest.raises(ShapeError, match="the geometry of all 3 layers"):
        KVManager(LAYERS, budget="1GiB")
