"""Sequences: arrival order changes nothing, sealed bytes never change, bytes are counted, bad calls lose nothing."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv import AttendOptions, KVManager, Memory, Sequence
from qkv.errors import FormatError, OutOfBlocks, SequenceClosed, ShapeError

OPTIONS = AttendOptions(0.125)


def kv(
    tokens: int, heads: int = 2, dim: int = 64, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, heads, tokens, dim).to(dtype)
    return k, v


def records(manager: KVManager, sequence: Sequence, layer: int = 0) -> torch.Tensor:
    held = manager._layers.records.records(layer)
    return torch.zeros(0) if held is None else held[list(sequence.block_ids)].clone()


def held_bytes(root: Any) -> int:
    """Bytes of every tensor storage reachable from an object, each counted once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    stack = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor) and item.dtype == torch.int64:
            continue  # tables of ids
        if isinstance(item, torch.Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set)):
            stack += list(item)
        elif hasattr(item, "__dict__"):
            stack.append(vars(item))
    return sum(storages.values())


def fill(manager: KVManager, k: torch.Tensor, v: torch.Tensor, cuts: list[int]) -> Sequence:
    sequence = manager.open()
    for start, end in zip([0, *cuts], [*cuts, k.shape[1]], strict=True):
        for layer in range(manager.num_layers):
            manager.append(sequence, layer, k[:, start:end], v[:, start:end])
        manager.check()
    return sequence


@given(st.lists(st.integers(0, 700), max_size=6), st.sampled_from(["kivi2", "int8", "exact", "kivi4/kivi2"]))
@settings(max_examples=25, deadline=None)
def test_chunks_do_not_matter(cuts: list[int], format: str) -> None:
    k, v = kv(700)
    manager = KVManager(1, format)
    once, chunked = fill(manager, k, v, []), fill(manager, k, v, sorted(cuts))
    assert torch.equal(records(manager, once), records(manager, chunked))
    q = torch.randn(4, 3, 64)
    for a, b in zip(manager.attend(once, 0, q, OPTIONS), manager.attend(chunked, 0, q, OPTIONS), strict=True):
        assert torch.equal(a, b)  # type: ignore[arg-type]  # a log-sum-exp was asked


def test_token_by_token_equals_one_shot() -> None:
    k, v = kv(600, dtype=torch.bfloat16)
    manager = KVManager(1, "kivi3")
    once, single = fill(manager, k, v, []), fill(manager, k, v, list(range(1, 600)))
    assert len(once.block_ids) == 3
    assert torch.equal(records(manager, once), records(manager, single))
    q = torch.randn(4, 1, 64).bfloat16()
    assert torch.equal(manager.attend(once, 0, q, OPTIONS)[0], manager.attend(single, 0, q, OPTIONS)[0])


def test_old_records_never_change() -> None:
    k, v = kv(1700)
    manager = KVManager(2, "kivi2")
    sequence = fill(manager, k[:, :700], v[:, :700], [])
    old, ids = records(manager, sequence), list(sequence.block_ids)
    for start in range(700, 1700, 10):
        for layer in range(2):
            manager.append(sequence, layer, k[:, start : start + 10], v[:, start : start + 10])
    twin = manager.fork(sequence)
    manager.crop(sequence, 900)
    for layer in range(2):
        manager.append(sequence, layer, *kv(400))
    manager.crop(twin, 500)
    manager.check()
    assert list(sequence.block_ids[: len(ids)]) == ids
    assert torch.equal(manager._layers.records.records(0)[ids], old)  # type: ignore[index]  # it is there
    assert len(old) == 4


def test_forks_are_independent_and_share_records() -> None:
    manager = KVManager(1, "kivi4")
    sequence = fill(manager, *kv(500), [])
    before = manager.memory()
    twin = manager.fork(sequence)
    assert manager.memory().records == before.records
    want = manager.gather(sequence, 0)[0]
    manager.append(twin, 0, *kv(300))
    manager.crop(twin, 10)
    manager.append(twin, 0, *kv(30))
    manager.check()
    assert torch.equal(manager.gather(sequence, 0)[0], want)
    manager.close(twin)
    manager.close(sequence)
    manager.check()
    pools = manager._ledger.blocks, manager._ledger.pieces
    assert all(pool.num_free == pool.capacity for pool in pools), "nobody holds anything"


@pytest.mark.parametrize("length", [0, 5, 63, 64, 65, 192, 200, 448, 450, 511, 512, 600, 601])
def test_crop_anywhere_keeps_a_prefix(length: int) -> None:
    manager = KVManager(1, "kivi2")
    sequence = fill(manager, *kv(601), [])
    k, v = manager.gather(sequence, 0)
    manager.crop(sequence, length)
    manager.check()
    assert manager.length(sequence) == length
    more = kv(300)
    manager.append(sequence, 0, *more)
    manager.check()
    got = manager.gather(sequence, 0)
    kept = min(
        length, 64 + 3 * 128
    )  # what was sealed or sink; the tail behind it may be sealed now, for the first time
    assert torch.equal(got[0][:, :kept], k[:, :kept])
    assert torch.equal(got[1][:, :kept], v[:, :kept])
    assert torch.equal(got[0][:, -64:], more[0][:, -64:]), "the newest tokens are exact"
    out = manager.attend(sequence, 0, torch.randn(2, 1, 64), OPTIONS)[0]
    assert torch.isfinite(out).all()


def test_memory_is_what_the_tensors_hold() -> None:
    manager = KVManager(3, "kivi4/kivi2")
    assert held_bytes(manager) == manager.memory().total == 0
    sequences = [fill(manager, *kv(tokens), []) for tokens in (1, 64, 300, 777)]
    sequences.append(manager.fork(sequences[-1]))
    assert held_bytes(manager) == manager.memory().total > 0
    assert manager.held(sequences[:4]) == manager.held(sequences), "a fork holds what its source holds"
    piece = 3 * 2 * 2 * 16 * 64 * 4  # layers, K and V, heads, tokens, channels, bytes
    assert manager.held([sequences[1]]) == Memory(0, 4 * piece)
    assert manager.held([sequences[2]]).exact == (4 + 7) * piece
    assert manager.held([sequences[2]]).records == sum(manager.layout(at).record_bytes for at in range(3))  # type: ignore[union-attr]  # bound
    assert manager.held(sequences).total <= manager.memory().total
    manager.close(sequences[2])
    assert held_bytes(manager) == manager.memory().total


@pytest.mark.parametrize(("format", "most"), [("kivi2", 0.225), ("kivi4", 0.35)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("tokens", [8191, 8192, 8300])
def test_bytes_at_8k(format: str, most: float, dim: int, tokens: int) -> None:
    k, v = kv(tokens, 2, dim, torch.bfloat16)
    manager = KVManager(1, format)
    fill(manager, k, v, [8000, *range(8050, tokens, 50)])
    assert held_bytes(manager) <= most * tokens * 2 * 2 * dim * 2


def test_a_corrupted_record_changes_attention() -> None:
    manager = KVManager(1, "kivi2")
    sequence = fill(manager, *kv(600), [])
    q = torch.randn(4, 1, 64)
    before = manager.attend(sequence, 0, q, OPTIONS)[0]
    manager._layers.records.records(0)[sequence.block_ids[1]] ^= 255  # type: ignore[index]  # it is there
    assert not torch.equal(manager.attend(sequence, 0, q, OPTIONS)[0], before)


def test_new_tokens_take_part_exactly_and_are_not_stored() -> None:
    k, v = kv(400)
    manager = KVManager(1, "kivi2")
    q = torch.randn(2, 400, 64)
    empty = manager.open()
    out, lse = manager.attend(empty, 0, q, OPTIONS, new=(k, v))
    fast, none = manager.attend(empty, 0, q, OPTIONS, new=(k, v), need_lse=False)
    assert lse is not None
    assert none is None
    assert (out - fast).abs().max() < 1e-5
    assert manager.length(empty) == 0
    assert manager.memory().total == 0


def snapshot(manager: KVManager, sequence: Sequence) -> tuple[Any, ...]:
    k, v = manager.gather(sequence, 0)
    return manager.length(sequence), list(sequence.block_ids), k.tolist(), v.tolist(), manager.memory()


def bad_appends() -> dict[str, tuple[int, torch.Tensor, torch.Tensor]]:
    k, v = kv(300)
    spoiled = k.clone()
    spoiled[1, 299, 3] = float("nan")
    return {
        "nan": (0, spoiled, v),
        "nan in v": (0, k, spoiled),
        "heads": (0, k[:1], v[:1]),
        "head_dim": (0, k[..., :32], v[..., :32]),
        "lengths": (0, k, v[:, :5]),
        "dtype": (0, k.half(), v.half()),
        "rank": (0, k[0], v[0]),
        "layer": (1, k, v),
        "negative layer": (-1, k, v),
        "device": (0, k.to("meta"), v.to("meta")),
    }


@pytest.mark.parametrize("case", bad_appends())
def test_a_bad_append_changes_nothing(case: str) -> None:
    manager = KVManager(1, "kivi4")
    sequence = fill(manager, *kv(300), [])
    before = snapshot(manager, sequence)
    with pytest.raises((ShapeError, FormatError)):
        manager.append(sequence, *bad_appends()[case])
    assert snapshot(manager, sequence) == before
    manager.check()


def test_a_full_pool_changes_nothing() -> None:
    manager = KVManager(1, "kivi4", num_blocks=3)
    sequence = fill(manager, *kv(500), [])
    before = snapshot(manager, sequence)
    with pytest.raises(OutOfBlocks, match="needed 4, free 1") as caught:
        manager.append(sequence, 0, *kv(500))
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (4, 1, 0)
    assert snapshot(manager, sequence) == before
    manager.append(sequence, 0, *kv(100))
    manager.check()


def test_wrong_use_is_refused() -> None:
    manager = KVManager(2, "kivi4")
    sequence = fill(manager, *kv(300), [])
    for length in (-1, 301):
        with pytest.raises(ShapeError, match=f"got length {length}, wanted 0 to 300"):
            manager.crop(sequence, length)
    manager.append(sequence, 0, *kv(5))
    for call in (manager.fork, lambda s: manager.crop(s, 10)):
        with pytest.raises(ShapeError, match="layers hold 300 to 305"):
            call(sequence)
    with pytest.raises(ShapeError, match="another KVManager"):
        KVManager(2).append(sequence, 0, *kv(1))
    with pytest.raises(ShapeError, match="306 queries over 305"):
        manager.attend(sequence, 0, torch.randn(2, 306, 64), OPTIONS)
    with pytest.raises(ShapeError, match="3 query heads"):
        manager.attend(sequence, 0, torch.randn(3, 1, 64), OPTIONS)
    with pytest.raises(ShapeError, match="window"):
        manager.attend(sequence, 0, torch.randn(2, 1, 64), AttendOptions(1.0, window=0))
    manager.close(sequence)
    for use in (manager.length, manager.fork, manager.close, lambda s: manager.append(s, 0, *kv(1))):
        with pytest.raises(SequenceClosed):
            use(sequence)
    fresh = KVManager(1)
    with pytest.raises(ShapeError, match="nothing appended yet"):
        fresh.attend(fresh.open(), 0, torch.randn(2, 1, 64), OPTIONS)
    for options in ({"sink_tokens": -1}, {"tail_tokens": 1.5}, {"num_blocks": 0}):
        with pytest.raises(ShapeError, match="wanted a whole number of at least"):
            KVManager(1, **options)
    with pytest.raises(ShapeError, match="num_layers"):
        KVManager(0)


def test_buffers_outlive_inference_mode() -> None:
    manager = KVManager(1, "kivi2")
    with torch.inference_mode():
        sequence = manager.fork(fill(manager, *kv(400), []))
    k, v = (side.requires_grad_() for side in kv(300))
    manager.append(sequence, 0, k, v)
    assert manager.length(sequence) == 700
    assert not manager.attend(sequence, 0, torch.randn(2, 1, 64).requires_grad_(), OPTIONS)[0].requires_grad


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_calls_against_a_plain_model(seed: int) -> None:
    """`exact` loses nothing, so gather must equal a list of tensors after any mix of calls."""
    rng = random.Random(seed)
    manager = KVManager(2, "exact", sink_tokens=rng.choice([0, 3, 64]), tail_tokens=rng.choice([0, 7, 128]))
    model: dict[int, tuple[Sequence, torch.Tensor]] = {}
    for _ in range(150):
        verb = rng.choice(["open", "append", "append", "append", "fork", "crop", "close"])
        if verb == "open" or not model:
            sequence = manager.open()
            model[sequence.id] = (sequence, torch.zeros(2, 1, 0, 8))
            continue
        sequence, tokens = model[rng.choice(list(model))]
        if verb == "append":
            new = torch.randn(2, 1, rng.choice([0, 1, 5, 127, 128, 129, 400]), 8)
            for layer in range(2):
                manager.append(sequence, layer, new[0], new[1])
            model[sequence.id] = (sequence, torch.cat([tokens, new], dim=2))
        elif verb == "fork":
            twin = manager.fork(sequence)
            model[twin.id] = (twin, tokens)
        elif verb == "crop":
            length = rng.randint(0, tokens.shape[2])
            manager.crop(sequence, length)
            model[sequence.id] = (sequence, tokens[:, :, :length])
        else:
            manager.close(sequence)
            del model[sequence.id]
        manager.check()
        for held, want in model.values():
            assert manager.length(held) == want.shape[2]
            if want.shape[2]:
                assert torch.equal(torch.stack(manager.gather(held, 1)), want)


def test_many_sequences_at_once_are_each_alone() -> None:
    """Decode steps and a long chunk, over histories of any length, in one call."""
    manager = KVManager(1, "kivi4")
    sequences = [manager.open() for _ in range(4)]
    for sequence, tokens in zip(sequences, (900, 3, 300, 0), strict=True):
        if tokens:
            manager.append(sequence, 0, *torch.randn(2, 2, tokens, 64))
    counts = (1, 3, 80, 1)
    steps = [tuple(torch.randn(2, 2, count, 64)) for count in counts]
    queries = [torch.randn(4, count, 64) for count in counts]
    options = AttendOptions(0.125)
    together = manager.attend_many(sequences, 0, queries, options, new=steps)
    for sequence, q, step, (out, lse) in zip(sequences, queries, steps, together, strict=True):
        alone, alone_lse = manager.attend(sequence, 0, q, options, new=step)
        torch.testing.assert_close(out, alone)
        torch.testing.assert_close(lse, alone_lse)
    with pytest.raises(ShapeError, match=r"sequence 1: got 2 query heads .* wanted those of the first, 4"):
        manager.attend_many(sequences[:2], 0, [queries[0], queries[1][:2]], options, new=steps[:2])
    assert manager.attend_many([], 0, [], options) == []
