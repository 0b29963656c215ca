"""Every way to read reads everything; the workspace counter counts."""

import numpy as np
import pytest
import torch

from qkv.bench import reading, workspace
from qkv.bench.checks import threads


@pytest.mark.parametrize("count", [1, 2, 3])
def test_all_readers_sum_all_of_it(count: int) -> None:
    with threads(count):
        for values in (reading.buffer(1 << 16), torch.arange(1003), torch.arange(3)):
            wanted = int(values.sum())
            assert {name: way(values) for name, way in reading.readers(count).items()} == dict.fromkeys(
                reading.readers(count), wanted
            )


def test_a_buffer_has_the_bytes_asked_for() -> None:
    assert reading.buffer(1).nbytes == 64
    assert reading.buffer(1 << 20).nbytes == 1 << 20


def test_the_reader_picks_one_and_has_a_rate() -> None:
    reader = reading.Reader(1 << 20, rounds=3)
    assert reader.name in reading.readers(1)
    assert reader.bytes_per_second > 0
    assert reader.evictor(0) is None
    evict = reader.evictor(1 << 20)
    assert evict is not None
    evict("anyone")
    assert reading.cache_bytes() > 0


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with threads(1) as count:
        assert count == torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_the_workspace_is_the_highest_sum_of_live_arrays() -> None:
    def in_turn() -> None:
        for _ in range(5):
            torch.zeros(1 << 18).add_(1)
            np.zeros(1 << 18, np.float32).sum()

    def together() -> object:
        return [torch.zeros(1 << 18) for _ in range(5)], [np.zeros(1 << 18, np.float32) for _ in range(3)]

    assert 1 << 20 <= workspace.peak(in_turn) < 3 << 20
    assert 8 << 20 <= workspace.peak(together) < 9 << 20


def test_views_and_arguments_are_not_workspace() -> None:
    held = torch.zeros(1 << 20)
    assert workspace.peak(lambda: held.view(2, -1).mT.add_(1)) < 1 << 16
