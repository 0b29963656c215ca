"""Layers read ahead: in order, as far ahead as there are slabs; a late, failed or stopped one is lost, never wrong."""

import threading
import time
from collections.abc import Callable

import pytest

from qkv.errors import LayerLost
from qkv.offload.prefetch import MOST_AHEAD, Prefetch, ideal, within


def numbered(layer: int, slab: memoryview) -> None:
    slab[:] = bytes([layer]) * len(slab)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_layers_come_in_order_and_no_further_ahead_than_slabs() -> None:
    begun: list[int] = []

    def read(layer: int, slab: memoryview) -> None:
        begun.append(layer)
        numbered(layer, slab)

    ended = threading.Event()
    made = Prefetch(read, 9, 64, seconds=10, ahead=2, at_end=ended.set)
    until(lambda: len(begun) == 2)
    for layer in range(9):
        slab = made.take(layer)
        assert len(begun) <= layer + made.ahead
        assert bytes(slab) == bytes([layer]) * 64
        made.done(slab)
    assert ended.wait(10)
    assert begun == list(range(9))
    assert len(made.stalls) == len(made.loads) == 9
    assert 2 <= made.ahead <= MOST_AHEAD


def test_nothing_lands_after_stop_and_stop_waits_for_what_is_landing() -> None:
    landing, go = threading.Event(), threading.Event()
    landed: list[int] = []

    def land(layer: int, slab: memoryview) -> None:
        landing.set()
        assert go.wait(10)
        landed.append(layer)

    ended = threading.Event()
    made = Prefetch(numbered, 4, 64, seconds=10, ahead=4, land=land, at_end=ended.set)
    assert landing.wait(10)
    stopped = threading.Event()
    stopper = threading.Thread(target=lambda: (made.stop(), stopped.set()))
    stopper.start()
    assert not stopped.wait(0.05)
    go.set()
    assert stopped.wait(10)
    assert landed == [0]
    assert ended.wait(10)
    assert landed == [0]
    stopper.join()


def test_a_read_that_ends_after_stop_does_not_land() -> None:
    reading, go, ended = threading.Event(), threading.Event(), threading.Event()
    landed: list[int] = []

    def read(layer: int, slab: memoryview) -> None:
        reading.set()
        assert go.wait(10)

    made = Prefetch(read, 4, 64, seconds=10, land=lambda layer, slab: landed.append(layer), at_end=ended.set)
    assert reading.wait(10)
    made.stop()
    go.set()
    assert ended.wait(10)
    assert landed == []
    with pytest.raises(LayerLost, match="stopped"):
        made.take(0)


@pytest.mark.parametrize("where", ["read", "land"])
def test_a_failed_layer_is_lost_and_those_before_it_are_not(where: str) -> None:
    def fails(layer: int, slab: memoryview) -> None:
        if layer == 2:
            raise OSError(5, "Input/output error")
        numbered(layer, slab)

    ways = {"read": numbered, "land": lambda layer, slab: None, where: fails}
    made = Prefetch(ways["read"], 4, 64, seconds=10, ahead=4, land=ways["land"])
    for layer in range(2):
        made.done(made.take(layer))
    for layer in (2, 3):
        with pytest.raises(LayerLost, match="Input/output error"):
            made.take(layer)


def test_a_late_layer_is_lost_within_its_time() -> None:
    hang = threading.Event()
    made = Prefetch(lambda layer, slab: bool(hang.wait(10)) and None, 2, 64, seconds=0.05)
    began = time.monotonic()
    with pytest.raises(LayerLost, match=r"longer than 0\.05 s"):
        made.take(0)
    assert time.monotonic() - began < 5
    hang.set()


def test_within_gives_what_the_call_gives_or_is_late() -> None:
    assert within(10, lambda deadline: deadline > time.monotonic())
    with pytest.raises(ZeroDivisionError):
        within(10, lambda deadline: 1 / 0)
    hang = threading.Event()
    with pytest.raises(TimeoutError, match="did not answer"):
        within(0.05, lambda deadline: hang.wait(10))
    hang.set()


def test_the_ideal_time_is_the_two_machine_flow_shops() -> None:
    assert ideal([1, 1, 1], [0, 0, 0]) == 3
    assert ideal([0, 0, 0], [1, 1, 1]) == 3
    assert ideal([1, 1, 1], [2, 2, 2]) == 7
    assert ideal([2, 2, 2], [1, 1, 1]) == 7
    assert ideal([1, 5, 1], [5, 1, 1]) == 8
