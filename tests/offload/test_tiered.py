"""Records in tiers: a manager that streams layers from host or disk gives bit for bit what one with room gives."""

import errno
import gc
import os
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qkv import AttendOptions, KVManager, RecordLayout, Sequence, get_format
from qkv.errors import CorruptSegment, InputError, LayerLost, OutOfBlocks, ShapeError
from qkv.offload.backing import FileRows, HostRows
from qkv.offload.io import FileIO
from qkv.offload.ring import Slab
from qkv.offload.tier import PAGE, Device, Disk, Host, most_blocks, places
from qkv.offload.tiered import TieredRecords
from qkv.spec import LayerSpec

LAYERS, HEADS, DIM = 8, 2, 32
SPEC = LayerSpec(HEADS, DIM, torch.float32)
RECORD = RecordLayout(get_format("kivi2"), SPEC).record_bytes


def tiered(tiers: list[Any], **options: Any) -> KVManager:
    return KVManager(LAYERS, "kivi2", layers=[SPEC] * LAYERS, tiers=tiers, **options)


def states(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(LAYERS, 2, HEADS, tokens, DIM, generator=torch.Generator().manual_seed(seed))


def feed(manager: KVManager, sequence: Sequence, kv: torch.Tensor, chunk: int) -> None:
    for start in range(0, kv.shape[3], chunk):
        for layer in range(LAYERS):
            manager.append(sequence, layer, *kv[layer, :, :, start : start + chunk])


def outputs(manager: KVManager, sequence: Sequence, order: Any = range(LAYERS)) -> dict[int, torch.Tensor]:
    q = torch.randn(2 * HEADS, 1, DIM, generator=torch.Generator().manual_seed(3))
    return {layer: manager.attend(sequence, layer, q, AttendOptions(0.2))[0] for layer in order}


def equal(one: dict[int, torch.Tensor], other: dict[int, torch.Tensor]) -> bool:
    return all(torch.equal(one[layer], other[layer]) for layer in one)


def records(manager: KVManager) -> TieredRecords:
    held = manager._layers.records
    assert isinstance(held, TieredRecords)
    return held


def blocks(count: int) -> int:
    """Bytes of all layers' records of so many blocks."""
    return count * LAYERS * RECORD


@pytest.mark.parametrize("lower", ["host", "disk", "both"])
@pytest.mark.parametrize("chunk", [3000, 700, 128, 37])
def test_streamed_layers_give_the_same_bits(tmp_path: Path, lower: str, chunk: int) -> None:
    tiers: list[Any] = [Device(blocks(24) // 2)]
    tiers += [Host(blocks(24) // 4 if lower == "both" else blocks(64))] if lower != "disk" else []
    tiers += [Disk(str(tmp_path), blocks(64))] if lower != "host" else []
    manager, plain = tiered(tiers, num_blocks=24), KVManager(LAYERS, "kivi2")
    kv, more = states(3000), states(300, seed=1)
    pairs = [(each, each.open()) for each in (manager, plain)]
    for each, sequence in pairs:
        feed(each, sequence, kv, chunk)
    assert len(records(manager).streamed) == 7  # half of it: one layer's room beside three slabs
    memory = manager.memory()
    assert (memory.host > 0, memory.disk > 0) == (lower != "disk", lower != "host")
    assert memory.records <= blocks(24) // 2
    assert equal(outputs(*pairs[0]), outputs(*pairs[1]))
    for at in range(0, 300, 3):  # decode: attend to every layer, then keep one token; blocks are sealed on the way
        for each, sequence in pairs:
            feed(each, sequence, more[:, :, :, at : at + 3], 1)
    assert equal(outputs(*pairs[0]), outputs(*pairs[1]))
    for order in ([5, 1, 7, 7, 0, 3, 3, 6, 2, 4], list(reversed(range(LAYERS)))):
        assert equal(outputs(*pairs[0], order), outputs(*pairs[1], order))
    manager.check()
    assert list(tmp_path.iterdir()) == [], "a spill file has no name"


def test_sequences_fork_crop_and_end_while_layers_are_streamed(tmp_path: Path) -> None:
    tiers = [Device(blocks(20)), Disk(str(tmp_path), blocks(64))]
    managers = [tiered(tiers, num_blocks=40), KVManager(LAYERS, "kivi2")]
    rng = torch.Generator().manual_seed(5)
    held: list[tuple[Sequence, Sequence]] = []
    for step in range(60):
        what = int(torch.randint(0, 5, (1,), generator=rng))
        length = int(torch.randint(1, 400, (1,), generator=rng))
        if (what == 0 and len(held) < 4) or not held:
            held.append((managers[0].open(), managers[1].open()))
        at = int(torch.randint(0, len(held), (1,), generator=rng))
        pair = held[at]
        if what == 1 and len(held) < 4:
            held.append(tuple(each.fork(one) for each, one in zip(managers, pair, strict=True)))  # type: ignore[arg-type]
        elif what == 2:
            for each, one in zip(managers, pair, strict=True):
                each.crop(one, max(0, each.length(one) - length))
        elif what == 3 and managers[0].length(pair[0]) > 900:
            for each, one in zip(managers, held.pop(at), strict=True):
                each.close(one)
        elif managers[0].length(pair[0]) < 1500:
            for each, one in zip(managers, pair, strict=True):
                feed(each, one, states(length, seed=step), length)
        for pair in held:
            if managers[0].length(pair[0]):
                assert equal(*(outputs(each, one) for each, one in zip(managers, pair, strict=True)))
        managers[0].check()
    assert records(managers[0]).streamed


def test_layers_move_down_only_when_the_device_is_full(tmp_path: Path) -> None:
    manager = tiered([Device(blocks(8)), Host(blocks(4)), Disk(str(tmp_path), blocks(100))])
    sequence, plain = manager.open(), KVManager(LAYERS, "kivi2")
    other, seen = plain.open(), []
    for chunk in range(14):
        kv = states(256, seed=chunk)
        feed(manager, sequence, kv, 256)
        feed(plain, other, kv, 256)
        seen.append(manager.memory())
        assert seen[-1].records <= blocks(8)
        assert equal(outputs(manager, sequence), outputs(plain, other))
    assert (seen[0].host, seen[0].disk) == (0, 0)
    assert seen[-1].disk > seen[-1].host > 0


def test_no_room_in_any_tier_is_out_of_blocks_and_loses_nothing(tmp_path: Path) -> None:
    manager = tiered([Device(blocks(8) // 2), Disk(str(tmp_path), blocks(8))])
    sequence = manager.open()
    kv = states(128 * 40)
    feed(manager, sequence, kv[:, :, :, :800], 800)
    before = outputs(manager, sequence)
    with pytest.raises(OutOfBlocks):
        manager.append(sequence, 0, *kv[0, :, :, 800:])
    assert equal(outputs(manager, sequence), before)
    manager.check()


class Broken(FileIO):
    """A disk that flips a bit, or hangs, when told to."""

    flip = False
    hang: threading.Event | None = None

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        if self.hang is not None:
            self.hang.wait(30)
        done = super().preadv(fd, buffers, offset)
        if self.flip:
            buffers[0][done // 2] ^= 1
        return done


@pytest.mark.parametrize("fault", ["flip", "hang"])
def test_damaged_or_late_records_are_lost_never_wrong(tmp_path: Path, fault: str) -> None:
    io = Broken()
    manager = tiered([Device(blocks(20) // 2), Disk(str(tmp_path), blocks(64))], num_blocks=20)
    held = manager._layers.records = TieredRecords(
        [RECORD] * LAYERS, (blocks(20) // 2, 0, blocks(64)), str(tmp_path), io=io, seconds=0.3
    )
    sequence = manager.open()
    feed(manager, sequence, states(2000), 2000)
    before = outputs(manager, sequence)
    setattr(io, fault, True if fault == "flip" else threading.Event())
    began = time.monotonic()
    with pytest.raises(LayerLost, match="checksum" if fault == "flip" else "longer than"):
        outputs(manager, sequence, [*range(LAYERS)] * 3)
    assert time.monotonic() - began < 5
    if io.hang is not None:
        io.hang.set()
    io.flip, io.hang = False, None
    assert equal(outputs(manager, sequence), before), "the bytes on the disk are whole: the next read has them"
    assert held.traffic()["read"] > 0


class Buffered(FileIO):
    """A file system that refuses reads past the page cache, when a file is opened for them or at the first one."""

    def __init__(self, refuses: str) -> None:
        self.refuses, self.direct = refuses, -1

    def open_direct(self, fd: int) -> int:
        if self.refuses == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        self.direct = super().open_direct(fd) if self.refuses == "nothing" else os.dup(fd)
        return self.direct

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        if self.refuses == "read" and fd == self.direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().preadv(fd, buffers, offset)


@pytest.mark.parametrize("refuses", ["nothing", "open", "read"])
@pytest.mark.parametrize("size", [64, 832, 4096, (1 << 16) + 64])
def test_rows_come_back_past_the_page_cache_or_through_it(tmp_path: Path, size: int, refuses: str) -> None:
    held, count = FileRows(size, str(tmp_path), Buffered(refuses)), 400
    given = Slab(count * size, torch.device("cpu"))
    given.rows.random_(256)
    written: set[int] = set()
    for rows in ([0, 1], [7], range(200, 290), [399], [5, 201], [2, 3]):
        given.rows[rows[0] * size] ^= 1
        groups = held.groups_of(rows)
        held.store(given.data[: count * size], groups)
        written.update(groups)
        back = Slab(count * size, torch.device("cpu"))
        held.load(back.data, 10)
        for group in written:
            part = slice(group * held.group, min((group + 1) * held.group, count * size))
            assert torch.equal(back.rows[part], given.rows[part])
    assert held.bytes_read > 0
    assert refuses == "nothing" or held.direct is None
    os.pwrite(held._fd, b"\0\1" if bytes(given.data[:2]) != b"\0\1" else b"\1\0", 0)
    with pytest.raises(CorruptSegment, match="checksum"):
        held.load(back.data, 10)


def test_groups_written_short_and_never_written_rows_are_no_damage(tmp_path: Path) -> None:
    size = 16384
    for kind in (FileRows(size, str(tmp_path), FileIO()), HostRows(size)):
        rows = 3
        given = Slab(rows * size, torch.device("cpu"))
        given.rows.random_(256)
        kind.store(given.data[: rows * size], [0])  # four rows are a group; this one is short
        for rows, wrote in ((9, [4]), (10, [9]), (17, [12, 13]), (17, [3])):
            grown = Slab(rows * size, torch.device("cpu"))
            grown.rows.random_(256)  # what another layer left in the slab
            kind.load(grown.data, 10)
            assert torch.equal(grown.rows[: 3 * size], given.rows[: 3 * size]), "rows of the beginning"
            kind.store(grown.data[: rows * size], kind.groups_of(wrote))
        kind.load(grown.data, 10)


def test_a_full_disk_costs_no_row_that_was_there(tmp_path: Path) -> None:
    class Full(FileIO):
        full = False

        def fallocate(self, fd: int, size: int) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().fallocate(fd, size)

    io, size = Full(), 4096
    held = FileRows(size, str(tmp_path), io)
    given = Slab(400 * size, torch.device("cpu"))
    given.rows.random_(256)
    held.store(given.data[: 100 * size], held.groups_of(range(100)))
    before = given.rows[: 100 * size].clone()
    io.full = True
    given.rows[5 * size] ^= 1
    with pytest.raises(OSError, match="No space"):
        held.store(given.data[: 400 * size], held.groups_of([5, 399]))
    back = Slab(400 * size, torch.device("cpu"))
    held.load(back.data, 10)
    assert torch.equal(back.rows[: 100 * size], before)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(6, 12), st.integers(20, 60), st.sampled_from([1, 2, 5, 17]),
    st.tuples(st.floats(0.2, 0.9), st.floats(0.1, 0.6), st.floats(0.1, 0.8)),
)  # fmt: skip
@example(8, 60, 1, (0.6, 0.2, 0.8))
def test_no_limit_is_passed_and_no_row_is_lost_however_the_pool_grows(
    layers: int, most: int, grows: int, shares: tuple[float, ...]
) -> None:
    size, capacities = (
        1024,
        range(4, most, grows),
    )  # a layer planned lower may be planned higher when the pool has grown
    limits = tuple(int(share * layers * most * size) for share in shares)
    with tempfile.TemporaryDirectory() as folder:
        tier = TieredRecords([size] * layers, limits, folder)
        wanted = torch.zeros(layers, 0, size, dtype=torch.uint8)
        for capacity in capacities:
            if places([capacity * size] * layers, *limits) is None:
                with pytest.raises(OutOfBlocks):
                    tier.reserve(0, capacity, size, torch.device("cpu"))
                break
            more = torch.randint(0, 256, (layers, capacity - wanted.shape[1], size), dtype=torch.uint8)
            wanted = torch.cat([wanted, more], 1)
            for layer in range(layers):
                rows = tier.reserve(layer, capacity, size, torch.device("cpu"))
                fresh = range(capacity - more.shape[1], capacity)
                rows[fresh.start :] = wanted[layer, fresh.start :]
                tier.wrote(layer, list(fresh))
            assert tier.nbytes <= limits[0]
            assert tier.elsewhere["host"] <= limits[1]
            assert tier.elsewhere["disk"] <= limits[2]
        for layer in range(layers if wanted.shape[1] else 0):
            held = tier.records(layer)
            assert held is not None
            assert torch.equal(held[: wanted.shape[1]], wanted[layer])
        tier._stop()


def test_rings_of_a_smaller_pool_are_let_go(tmp_path: Path) -> None:
    tier = TieredRecords([512] * 4, (1 << 20, 1 << 30, 0), str(tmp_path))
    rings = []
    for capacity in range(600, 660, 10):
        for layer in range(4):
            tier.reserve(layer, capacity, 512, torch.device("cpu"))
        rings.append(weakref.ref(tier._ring))
    end = time.monotonic() + 10
    while [ring() is not None for ring in rings] != [False] * 5 + [True]:
        assert time.monotonic() < end, "an old ring, and its slabs, are still held"
        gc.collect()
        time.sleep(0.01)


def test_a_manager_that_is_gone_leaves_no_thread_and_no_file(tmp_path: Path) -> None:
    manager = tiered([Device(blocks(20) // 2), Disk(str(tmp_path), blocks(64))], num_blocks=20)
    feed(manager, manager.open(), states(2000), 2000)
    files = len(os.listdir("/proc/self/fd"))
    del manager
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "qkv ring":
            thread.join(5)
            assert not thread.is_alive()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files - 6


def test_places_are_as_many_as_fit_evenly_spread() -> None:
    layers = [PAGE] * 8

    def found(device: float, host: float, disk: float) -> tuple[list[str], int] | None:
        return places(layers, *(int(pages * PAGE) for pages in (device, host, disk)))

    assert found(8, 0, 0) == (["device"] * 8, 0)
    assert found(7.9, 0, 8) == (["device", "disk"] * 4, 3)  # four and three slabs
    assert found(1.9, 0, 100) is None
    assert found(2.9, 0, 100) == (["disk"] * 8, 2)
    assert found(3, 0, 100) == (["disk"] * 8, 3)
    assert found(3, 4, 3.9) is None
    split = found(3, 4, 4)
    assert split is not None
    assert (split[0].count("host"), split[0].count("disk")) == (4, 4)
    assert places([PAGE + 1] * 8, 4 * PAGE, 0, 100 * PAGE) == (["disk"] * 8, 2), "slabs are whole pages"
    for limits in ((300, 0, 900), (300, 200, 400), (1000, 0, 0), (35, 0, 10)):
        sizes, scaled = (7 * 640, 5 * 640, 5 * 640, 9 * 640), [640 * limit for limit in limits]
        most = most_blocks(sizes, *scaled)
        assert places([most * size for size in sizes], *scaled) is not None or not most
        assert places([(most + 1) * size for size in sizes], *scaled) is None


def test_tiers_that_cannot_be_say_why(tmp_path: Path) -> None:
    disk = Disk(str(tmp_path), "1GiB")
    cases: list[tuple[list[Any], dict[str, Any], type[Exception], str]] = [
        ([disk], {}, InputError, "wanted Device, then"),
        ([Device(10**6), disk, Host(5)], {}, InputError, "in this order"),
        ([Device("two")], {}, InputError, "Device|budget"),
        ([Device(10**6)], {"budget": 10**6}, InputError, "a budget too"),
        ([Device(RECORD), disk], {}, ShapeError, "two layers' records"),
        ([Device(10**6), disk], {"num_blocks": 10**6}, ShapeError, "wanted 1000000"),
        ([Device(10**6), Disk(str(tmp_path / "none"), 10**9)], {}, InputError, "no folder"),
    ]
    for tiers, options, error, says in cases:
        with pytest.raises(error, match=says):
            tiered(tiers, **options)
    with pytest.raises(ShapeError, match="geometry of all 8"):
        KVManager(LAYERS, "kivi2", tiers=[Device(10**6)])
