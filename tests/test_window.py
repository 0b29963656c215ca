"""A manager whose layers all slide: what the window has passed is given back, and no answer changes."""

from typing import Any

import pytest
import torch

from qkv import AttendOptions, KVManager, Sequence
from qkv.errors import InputError, ShapeError
from qkv.prefix import Namespace

LAYERS = 2


def append(manager: KVManager, sequence: Sequence, tokens: int) -> None:
    for layer in range(LAYERS):
        manager.append(sequence, layer, *torch.randn(2, 1, tokens, 16))


def answers(manager: KVManager, sequence: Sequence, window: int, queries: int) -> torch.Tensor:
    torch.manual_seed(manager.length(sequence))
    q, new = torch.randn(2, queries, 16), torch.randn(2, 1, queries, 16)
    made = manager.attend(sequence, 1, q, AttendOptions(0.25, window=window), new=(new[0], new[1]))
    return torch.cat([made[0].flatten(), made[1].flatten()])  # type: ignore[union-attr]  # a log-sum-exp was asked


@pytest.mark.parametrize("window", [1, 100, 128, 300])
@pytest.mark.parametrize("chunks", [[1] * 20, [7, 500, 1, 130, 400, 1, 1, 64, 2000, 1, 5], [3000, 1, 1, 700]])
@pytest.mark.parametrize("format", ["kivi2", "exact"])
def test_no_answer_changes_and_what_is_held_is_bounded(window: int, chunks: list[int], format: str) -> None:
    slides, keeps = KVManager(LAYERS, format, window=window), KVManager(LAYERS, format)
    sequences = [manager.open() for manager in (slides, keeps)]
    for chunk in chunks:
        for manager, sequence in zip((slides, keeps), sequences, strict=True):
            torch.manual_seed(chunk)
            append(manager, sequence, chunk)
            manager.check()
        assert slides.length(sequences[0]) == keeps.length(sequences[1])
        got, want = (
            answers(manager, sequence, window, queries=3)
            for manager, sequence in zip((slides, keeps), sequences, strict=True)
        )
        # the same keys, summed in other runs
        torch.testing.assert_close(got, want, atol=2e-3, rtol=0)
        held = sequences[0].holding
        bound = window + 128 + chunk + 2 * 128 + 64 + 191
        assert held.tokens - held.dropped <= bound
        mine, other = slides.gather(sequences[0], 1)[0], keeps.gather(sequences[1], 1)[0]
        assert mine.shape == other.shape
        assert torch.equal(mine[:, held.dropped :], other[:, held.dropped :])
        assert not mine[:, : held.dropped].any()
    slides.close(sequences[0])
    slides.check()
    assert slides.pool.num_free == slides.pool.capacity


def test_decoding_takes_no_more_blocks() -> None:
    manager = KVManager(LAYERS, "kivi4", window=256, num_blocks=8)
    sequence = manager.open()
    for _ in range(40):  # 2,560 tokens: 20 blocks' worth
        append(manager, sequence, 64)
    manager.check()
    assert manager.pool.capacity <= manager._ledger.most_blocks(10**6) + 1 <= 7
    assert manager.admission([10**6]).blocks_needed == manager._ledger.most_blocks(10**6)


def test_a_draft_can_be_cropped_and_more_is_refused() -> None:
    manager = KVManager(LAYERS, "kivi4", window=256)
    sequence = manager.open()
    for _ in range(30):
        append(manager, sequence, 64)
    append(manager, sequence, 0)  # lets go of all it may
    length, dropped = manager.length(sequence), sequence.holding.dropped
    assert dropped > 1000
    manager.crop(sequence, length - 128)
    append(manager, sequence, 128)
    with pytest.raises(ShapeError, match=f"wanted 0, or {dropped + 255} to {length}"):
        manager.crop(sequence, dropped + 254)
    assert manager.length(sequence) == length
    twin = manager.fork(sequence)
    manager.crop(sequence, dropped + 255)
    append(manager, sequence, 300)
    assert manager.length(twin) == length
    manager.crop(sequence, 0)
    append(manager, sequence, 300)
    assert sequence.holding.counts.sink == 64
    manager.check()


def test_names_and_bad_windows_are_refused() -> None:
    manager = KVManager(LAYERS, "kivi4", window=256)
    space = Namespace("w", ((1, 16, "float32"),) * LAYERS, "kivi4", 1, 128, manager.sink_tokens)
    with pytest.raises(InputError, match="shares by `fork` only"):
        manager.open([1, 2], space)
    for window in (0, -1, 2.5):
        bad: Any = window
        with pytest.raises(ShapeError, match="window: got"):
            KVManager(LAYERS, "kivi4", window=bad)
