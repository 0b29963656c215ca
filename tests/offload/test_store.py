"""The store end to end: what comes back is bit for bit what went in, or it is a miss."""

import gc
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from qkv import AttendOptions, KVManager, RecordLayout, Sequence, get_format
from qkv.errors import CorruptSegment, InputError, LayerLost, ShapeError, StoreFull, StoreLocked
from qkv.offload.disk import DiskStore
from qkv.offload.io import FileIO
from qkv.offload.segment import Segment
from qkv.offload.tier import Device, Disk, slab_bytes
from qkv.offload.tiered import TieredRecords
from qkv.prefix import Namespace
from qkv.spec import LayerSpec

LAYERS, DIM, HEADS = 3, 16, 2
MIB = 1 << 20


def space(**changes: Any) -> Namespace:
    return replace(Namespace("w", ((HEADS, DIM, "float32"),) * LAYERS, "kivi2", 1, 128, 64), **changes)


def ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50000), k=count)


TABLES = [torch.randn(50000, 2, HEADS, DIM, generator=torch.Generator().manual_seed(at)) for at in range(LAYERS)]


def kv(tokens: list[int], layer: int) -> torch.Tensor:
    return TABLES[layer][tokens].permute(1, 2, 0, 3)


def manager(store: DiskStore, seconds: float = 10.0, **options: Any) -> KVManager:
    made = KVManager(LAYERS, options.pop("format", "kivi2"), **options)
    made.attach(store, seconds=seconds)
    return made


def append(kvs: KVManager, sequence: Sequence, tokens: list[int]) -> None:
    for layer in range(LAYERS):
        kvs.append(sequence, layer, *kv(tokens, layer))


def filled(kvs: KVManager, tokens: list[int], name: Namespace | None = None) -> Sequence:
    sequence = kvs.open(tokens, name or space())
    append(kvs, sequence, tokens[kvs.length(sequence) :])
    return sequence


def bits(kvs: KVManager, sequence: Sequence) -> list[torch.Tensor]:
    views = [kvs.view(sequence, layer) for layer in range(LAYERS)]
    return [part for view in views for part in (view.sink, view.records[view.block_ids], view.tail)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def saved(path: Path, tokens: list[int], **options: Any) -> str:
    """A store with one checkpoint; the segment's path."""
    with DiskStore(path, **options) as store:
        kvs = manager(store)
        kvs.save(filled(kvs, tokens))
        assert store.counts["stored"] == 1
        return files(path)[0]


def files(path: Path) -> list[str]:
    return sorted(str(found) for found in (path / "ns").rglob("*.h5"))


@pytest.mark.parametrize("format", ["kivi2", "int8", "exact", "kivi4/kivi2"])
@pytest.mark.parametrize("length", [256, 700, 1001])
def test_a_reloaded_run_is_bit_for_bit_the_run_that_stored_it(tmp_path: Path, format: str, length: int) -> None:
    tokens = ids(length + 300)
    name = space(format=KVManager(LAYERS, format).format.id, sink_tokens=KVManager(LAYERS, format).sink_tokens)
    with DiskStore(tmp_path / "store") as store:
        kvs = manager(store, format=format)
        writer = filled(kvs, tokens[:length], name)
        stood = bits(kvs, writer)
        kvs.save(writer)
        append(kvs, writer, tokens[length:])
    with DiskStore(tmp_path / "store", readonly=True) as store:
        other = manager(store, format=format)
        promised = other.match(tokens, name)
        assert promised.hit_tokens == {"disk": length}
        assert promised.seconds_to_recompute > 0
        reader = other.open(tokens, name)
        assert other.length(reader) == length
        for layer in range(LAYERS):  # layer by layer, as a model would
            other.view(reader, layer)
        assert same(bits(other, reader), stood)
        append(other, reader, tokens[length:])
        other.check()
        assert same(bits(other, reader), bits(kvs, writer))
        q = torch.randn(2 * HEADS, 1, DIM)
        outs = [each.attend(one, 1, q, AttendOptions(0.25))[0] for each, one in ((kvs, writer), (other, reader))]
        assert torch.equal(*outs)
        assert store.counts["hits"] == 1


def test_layers_land_where_they_are_wanted_whatever_the_pool_does_meanwhile(tmp_path: Path) -> None:
    tokens, others = ids(1200), ids(3000, seed=5)
    saved(tmp_path / "store", tokens)
    with DiskStore(tmp_path / "store", readonly=True) as store:
        plain = manager(store)
        wanted = bits(plain, plain.open([*tokens, 1], space()))
        for layers in range(3):  # so many have landed when the pool grows to other memory
            kvs = manager(store)
            reader = kvs.open([*tokens, 1], space())
            loading: Any = reader.loading
            end = time.monotonic() + 10
            while len(loading.prefetch.loads) < layers:
                assert time.monotonic() < end
                time.sleep(0.001)
            before = loading._rows[0].data_ptr()
            append(kvs, kvs.open(), others)
            held = kvs._layers.records.records(0)
            assert held is not None
            assert held.data_ptr() != before
            assert same(bits(kvs, reader), wanted)
            kvs.check()


def test_a_sequence_closed_while_its_layers_land_writes_to_nobodys_blocks(tmp_path: Path) -> None:
    tokens, others = ids(1200), ids(1200, seed=6)
    saved(tmp_path / "store", tokens)
    with DiskStore(tmp_path / "store", readonly=True) as store:
        plain = KVManager(LAYERS, "kivi2")
        alone = plain.open()
        append(plain, alone, others)
        kvs = manager(store, num_blocks=9)
        for turn in range(30):
            reader = kvs.open([*tokens, 1], space())
            assert kvs.length(reader) == len(tokens)
            time.sleep(turn * 1e-4)
            kvs.close(reader)
            other = kvs.open()
            append(kvs, other, others)
            assert same(bits(kvs, other), bits(plain, alone)), turn
            kvs.close(other)
        kvs.check()


class Gated(FileIO):
    """Reads ahead wait for `gate`."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        if threading.current_thread().name == "qkv prefetch":
            self.gate.wait(20)
        return super().preadv(fd, buffers, offset)


def test_nothing_is_published_before_every_layer_is_there(tmp_path: Path) -> None:
    tokens, io = ids(1000), Gated()
    path = saved(tmp_path / "store", tokens)
    for damaged in (False, True):
        if damaged:
            with open(path, "r+b") as file:
                file.seek(-4096, os.SEEK_END)
                file.write(b"\0" * 4096)
        with DiskStore(tmp_path / "store", io=io) as store:
            kvs = manager(store)
            io.gate.clear()
            reader = kvs.restore(tokens, space())
            assert reader is not None
            kvs.name_tokens(reader, [7, 8, 9])
            assert kvs.pool.stats().published == 0
            io.gate.set()
            if damaged:
                with pytest.raises(LayerLost):
                    reader.arrive()
            else:
                reader.arrive()
            assert kvs.pool.stats().published == (0 if damaged else 6)
            kvs.close(reader)
            kvs.check()


@pytest.mark.parametrize("how", ["attend_many", "step"])
def test_a_streamed_layer_is_attended_to_beside_one_that_is_still_arriving(tmp_path: Path, how: str) -> None:
    tokens, others = ids(1000), ids(1000, seed=5)
    saved(tmp_path / "store", tokens)
    spec = LayerSpec(HEADS, DIM, torch.float32)
    size = RecordLayout(get_format("kivi2"), spec).record_bytes
    q = torch.randn(2 * HEADS, 1, DIM, generator=torch.Generator().manual_seed(1))
    with DiskStore(tmp_path / "store", readonly=True) as store:
        wanted = manager(store)
        alone = wanted.open()
        append(wanted, alone, others)
        for layer in range(LAYERS):
            tiers = [Device(2 * slab_bytes(16 * size)), Disk(str(tmp_path), 10**9)]
            kvs = manager(store, layers=[spec] * LAYERS, tiers=tiers, num_blocks=16)
            one = kvs.open()
            append(kvs, one, others)
            reader = kvs.open([*tokens, 1], space())
            assert kvs.length(reader) == 1000
            if how == "attend_many":
                out = kvs.attend_many([one, reader], layer, [q, q], AttendOptions(0.2))[0][0]
                want = wanted.attend(alone, layer, q, AttendOptions(0.2))[0]
            else:
                k, v = torch.zeros(2, 1, HEADS, DIM)
                row = q.transpose(0, 1)
                with kvs.plan([one, reader], [1, 1]) as step:
                    two = [x.repeat(2, 1, 1) for x in (row, k, v)]
                    out = step.attend(layer, *two, AttendOptions(0.2))[0]
                with wanted.plan([alone], [1]) as step:
                    want = step.attend(layer, row, k, v, AttendOptions(0.2))[0]
            assert torch.equal(out.flatten(), want.flatten()), layer


def test_a_layer_that_moves_to_a_file_while_it_lands_is_whole(tmp_path: Path) -> None:
    tokens, io = ids(1500), Gated()
    saved(tmp_path / "store", tokens)
    spec = LayerSpec(HEADS, DIM, torch.float32)
    size = RecordLayout(get_format("kivi2"), spec).record_bytes

    class Spill(FileIO):
        hook: Any = None

        def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
            done = super().pwritev(fd, buffers, offset)
            hook, self.hook = self.hook, None
            if hook is not None:
                hook()
            return done

    spill, limits = Spill(), (66 * size, 0, 10**9)
    with DiskStore(tmp_path / "store", readonly=True, io=io) as store:
        kvs = manager(store, layers=[spec] * LAYERS, tiers=[Device(limits[0]), Disk(str(tmp_path), limits[2])],
                      num_blocks=32)  # fmt: skip
        kvs._layers.records = TieredRecords([size] * LAYERS, limits, str(tmp_path), io=spill)
        one, mine = kvs.open(), ids(1900, seed=3)
        append(kvs, one, mine[:500])
        reader = kvs.open([*tokens, 1], space())
        loading: Any = reader.loading

        def answer() -> None:
            io.gate.set()
            end = time.monotonic() + 10
            while not loading.prefetch.loads:
                assert time.monotonic() < end
                time.sleep(0.001)

        spill.hook = answer
        append(kvs, one, mine[500:])
        assert spill.hook is None
        plain = KVManager(LAYERS, "kivi2")
        alone = plain.open()
        append(plain, alone, mine)
        for layer in range(LAYERS):
            view, want = kvs.view(one, layer), plain.view(alone, layer)
            assert torch.equal(view.records[view.block_ids], want.records[want.block_ids])


@pytest.mark.parametrize("why", ["geometry", "disk"])
def test_a_load_that_cannot_begin_is_a_miss_and_leaks_nothing(tmp_path: Path, why: str) -> None:
    tokens = ids(1000)
    half = space(geometry=((HEADS, DIM, "float16"),) * LAYERS) if why == "geometry" else space()
    dtype = torch.float16 if why == "geometry" else torch.float32
    with DiskStore(tmp_path / "store") as store:
        writer = manager(store)
        sequence = writer.open(tokens, half)
        for layer in range(LAYERS):
            writer.append(sequence, layer, *kv(tokens, layer).to(dtype))
        writer.save(sequence)
        spec = LayerSpec(HEADS, DIM, torch.float32)
        size = RecordLayout(get_format("kivi2"), spec).record_bytes
        tiers = [Device(2 * slab_bytes(30 * size)), Disk(str(tmp_path), 10**9)] if why == "disk" else None
        kvs = manager(store, layers=[spec] * LAYERS, tiers=tiers)
        append(kvs, kvs.open(), ids(300))
        if why == "disk":
            kvs._layers.records.reserve = full  # type: ignore[method-assign]  # as a spill disk that has no room
        gc.collect()
        held, files_open = kvs.pool.stats().held, len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            assert kvs.length(kvs.open([*tokens, 1], half)) == 0
            assert kvs.restore(tokens, half) is None
        gc.collect()
        assert kvs.pool.stats().held == held
        assert len(os.listdir("/proc/self/fd")) <= files_open
        assert store.counts["failed"] == 10
        kvs.check()


def full(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_layer_that_cannot_be_placed_is_lost_at_once_and_not_the_stores_fault(tmp_path: Path) -> None:
    saved(tmp_path / "store", ids(1000))
    with DiskStore(tmp_path / "store") as store:
        kvs = manager(store, seconds=30)
        reader = kvs.open([*ids(1000), 1], space())
        kvs._layers.place = full  # type: ignore[method-assign]  # as a tier without room
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(LayerLost, match="No space"):
                kvs.view(reader, 1)
        assert time.monotonic() - began < 5
        assert not store.counts["late"] + store.counts["failed"]
        kvs.close(reader)
        kvs.check()


def test_a_look_up_that_ends_too_late_leaves_nothing_open(tmp_path: Path) -> None:
    class Slow(FileIO):
        def preadv(self, fd: int, buffers: Any, offset: int) -> int:
            time.sleep(0.3)
            return super().preadv(fd, buffers, offset)

    saved(tmp_path / "store", ids(700))
    with DiskStore(tmp_path / "store", readonly=True, io=Slow()) as store:
        before = len(os.listdir("/proc/self/fd"))
        kvs = manager(store, seconds=0.05)
        assert kvs.length(kvs.open([*ids(700), 1], space())) == 0
        assert store.counts["late"] == 1
        for thread in threading.enumerate():
            if thread.name == "qkv store":
                thread.join(10)
        assert len(os.listdir("/proc/self/fd")) == before


def test_every_hdf5_tool_opens_a_segment(tmp_path: Path) -> None:
    path = saved(tmp_path / "store", ids(700))
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.stat(tmp_path / "store").st_mode & 0o777 == 0o700
    with Segment.open(path) as segment, h5py.File(path) as file:
        kv_set = file["kv"]
        assert kv_set.shape == (LAYERS, segment.header.extent)
        assert kv_set.id.get_offset() == segment.head.data_offset
        record = segment.header.record_bytes[1]
        blocks = segment.header.blocks
        out = bytearray(blocks * record)
        segment.read_layer(1, out)
        assert bytes(kv_set[1, : len(out)]) == out
        assert segment.verify() == kv_set.size
        for first in range(blocks):
            some = bytearray(record * (blocks - first - 1) or record)
            segment.read_layer(1, some, first)
            assert some == out[first * record :][: len(some)]
        for count, first in ((blocks, 1), (1, blocks), (1, blocks + 9)):
            with pytest.raises(ShapeError, match="layer 1"):
                segment.read_layer(1, bytearray(count * record), first)
        with pytest.raises(ShapeError, match="layer 1"):
            segment.read_layer(1, bytearray(record - 1))
    damaged = bytearray(Path(path).read_bytes())
    damaged[segment.head.data_offset + segment.header.extent + record] ^= 1  # layer 1, record 1
    Path(path).write_bytes(damaged)
    with Segment.open(path) as segment:
        segment.read_layer(1, bytearray(record))
        for part, first in ((bytearray(record), 1), (bytearray(record * blocks), 0)):
            with pytest.raises(CorruptSegment, match="layer 1, part 2 "):
                segment.read_layer(1, part, first)


def test_what_is_stored_already_is_not_stored_again(tmp_path: Path) -> None:
    shared, path = ids(700), tmp_path / "store"
    with DiskStore(path) as store:
        kvs = manager(store)
        first = kvs.save(filled(kvs, shared))
        assert kvs.save(filled(kvs, shared)) == first
        assert store.counts == {"stored": 1, "same": 1, "misses": 2}
        longer = [*shared, *ids(500, seed=1)]
        second = kvs.save(filled(kvs, longer))
        branch = [*shared[:500], *ids(500, seed=2)]
        kvs.save(filled(kvs, branch))
        parents = {entry.name: (entry.parent, entry.first, entry.blocks) for entry in store.entries()}
        assert parents[second] == (first, 4, 4)
        assert sorted(value[1] for value in parents.values()) == [0, 3, 4]
        other = manager(store)
        for tokens in (shared, longer, branch):
            reader = other.open([*tokens, 7], space())
            assert other.length(reader) == len(tokens)
            writer = KVManager(LAYERS, "kivi2")
            assert same(bits(other, reader), bits(writer, filled(writer, tokens)))
        assert len(files(path)) == 3
        gone = store.remove(first)
        assert len(gone) == 3
        assert files(path) == []


IDENTITY = {
    "weights": "w2", "rope": "linear 2", "adapter": "lora", "salt": "tenant b", "shard": "1/2", "layout_version": 2,
    "numerics": "chunks of 512", "tokenizer": "t2", "geometry": ((HEADS, DIM, "float16"),) * LAYERS,
}  # fmt: skip


@pytest.mark.parametrize("field", IDENTITY)
def test_one_wrong_field_of_the_identity_is_a_miss(tmp_path: Path, field: str) -> None:
    tokens = ids(700)
    saved(tmp_path / "store", tokens)
    with DiskStore(tmp_path / "store", readonly=True) as store:
        kvs = manager(store)
        assert kvs.length(kvs.open([*tokens, 1], space(**{field: IDENTITY[field]}))) == 0
        assert kvs.length(kvs.open([*tokens, 1], space())) == 700
        assert store.counts == {"misses": 1, "hits": 1}


def test_other_tokens_are_a_miss(tmp_path: Path) -> None:
    tokens = ids(700)
    saved(tmp_path / "store", tokens)
    with DiskStore(tmp_path / "store", readonly=True) as store:
        kvs = manager(store)
        for at in (0, 63, 64, 300, 650, 699):
            changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :], 1]
            assert kvs.length(kvs.open(changed, space())) == 0
        assert kvs.length(kvs.open(tokens, space())) == 0, "one token must be left to compute"
        whole = kvs.restore(tokens, space())
        assert whole is not None
        assert kvs.length(whole) == 700
        assert kvs.restore(ids(700, seed=9), space()) is None


def test_a_lost_or_broken_index_costs_nothing_but_a_scan(tmp_path: Path) -> None:
    path, tokens = tmp_path / "store", ids(700)
    saved(path, tokens)
    for data in (None, b"", b"not a database" * 1000):
        for name in ("index.db", "index.db-wal", "index.db-shm"):
            (path / name).unlink(missing_ok=True)
        if data is not None:
            (path / "index.db").write_bytes(data)
        for readonly in (True, False):
            with DiskStore(path, readonly=readonly) as store:
                kvs = manager(store)
                assert kvs.length(kvs.open([*tokens, 1], space())) == 700


def test_another_process_with_another_hash_seed_finds_it(tmp_path: Path) -> None:
    saved(tmp_path / "store", ids(700))
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_store import *
store = DiskStore({str(tmp_path / "store")!r}, readonly=True); kvs = manager(store)
reader = kvs.open([*ids(700), 1], space()); fresh = KVManager(LAYERS, "kivi2")
assert same(bits(kvs, reader), bits(fresh, filled(fresh, ids(700)))); print(kvs.length(reader))
"""
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout == "700\n", done.stderr


def test_any_flipped_bit_and_any_truncation_is_a_miss(tmp_path: Path) -> None:
    """Every region of the file, at random; each time the answer is computed and the damage is counted."""
    tokens = ids(450)
    path = saved(tmp_path / "store", tokens)
    whole = Path(path).read_bytes()
    rng = random.Random(0)
    with Segment.open(path) as segment:
        start, extent = segment.head.data_offset, segment.header.extent
    heads = rng.sample(range(start), 250) + list(range(64))
    places = [*heads, *rng.sample(range(start, len(whole)), 500), start, len(whole) - 1, start + extent - 1]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        Path(path).write_bytes(damaged)
        with pytest.raises(Exception, match=r"checksum|not a segment|version|sizes|bytes, its head|key|zeros"):
            _verify(path)
    for size in [0, 1, 63, 64, 65, start - 1, start, start + 1, *rng.sample(range(len(whole)), 60), len(whole) - 1]:
        Path(path).write_bytes(whole[:size])
        with pytest.raises(Exception, match=r"not a segment|sizes|bytes, its head|ends"):
            _verify(path)
    Path(path).write_bytes(whole + b"\0")
    with pytest.raises(Exception, match="bytes, its head"):
        _verify(path)


def _verify(path: str) -> None:
    with Segment.open(path) as segment:
        segment.verify()


@pytest.mark.parametrize("where", ["head", "data", "cut", "swapped"])
def test_damage_is_a_miss_and_is_put_aside(tmp_path: Path, where: str) -> None:
    tokens, path = ids(700), tmp_path / "store"
    file = Path(saved(path, tokens))
    data = bytearray(file.read_bytes())
    if where == "cut":
        del data[-5000:]
    elif where == "swapped":
        with DiskStore(tmp_path / "other") as store:
            kvs = manager(store)
            kvs.save(filled(kvs, ids(700, seed=5)))
        data = bytearray(Path(files(tmp_path / "other")[0]).read_bytes())
    else:
        data[100 if where == "head" else len(data) - 5000] ^= 4
    file.write_bytes(data)
    with DiskStore(path) as store:
        kvs = manager(store)
        sequence = kvs.open([*tokens, 1], space())
        if where == "data":  # the head is whole: it is seen when the layer is read, before anything uses it
            with pytest.raises(LayerLost):
                kvs.view(sequence, LAYERS - 1)
            with pytest.raises(LayerLost):
                kvs.view(sequence, LAYERS - 1)
            kvs.close(sequence)
            sequence = kvs.open([*tokens, 1], space())
        assert kvs.length(sequence) == 0
        append(kvs, sequence, tokens)
        assert store.counts["corrupt"] == 1
        assert len(os.listdir(path / "quarantine")) == 1
        assert files(path) == []
        kvs.save(sequence)
        assert len(files(path)) == 1
        kvs.check()
        assert store.collect() == [file.name.removesuffix(".h5")]


def test_limits_hold_and_leaves_go_first(tmp_path: Path) -> None:
    path, limit = tmp_path / "store", 16 * MIB
    with DiskStore(path, limit) as store:
        kvs = manager(store, format="exact")
        name = space(format="exact", sink_tokens=0)
        shared = ids(3000)
        for seed in range(12):
            tokens = [*shared, *ids(2000, seed=seed + 1)]
            sequence = filled(kvs, tokens, name)
            kvs.save(sequence)
            kvs.close(sequence)
            assert store.disk_usage() <= limit
            by_name = {entry.name: entry for entry in store.entries()}
            assert all(not entry.parent or entry.parent in by_name for entry in by_name.values())
        assert store.counts["evicted"] > 0
        assert kvs.length(kvs.open([*shared, *ids(2000, seed=12), 1], name)) == 5000
        huge = filled(kvs, ids(30000, seed=50), name)
        before = files(path)
        with pytest.raises(StoreFull):
            kvs.save(huge)
        assert len(files(path)) <= len(before)
    with DiskStore(path, limit, quota=3 * MIB) as store:
        kvs = manager(store, format="exact")
        with pytest.raises(StoreFull):
            kvs.save(filled(kvs, ids(9000, seed=60), space(format="exact", sink_tokens=0, salt="b")))


def test_bad_places_are_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "store").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "store")
    (tmp_path / "newer").mkdir(mode=0o700)
    (tmp_path / "newer" / "FORMAT").write_text("qkv store 2\n")
    for name, says in (
        ("file", "not a folder"), ("full", "no store of qkv"), ("open", "others can write"), ("link", "symbolic link"),
        ("newer", "its FORMAT is"), ("no/such", "does not exist"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=says):
            DiskStore(tmp_path / name)
    assert (tmp_path / "full" / "letter.txt").read_text() == "mine"
    with pytest.raises(InputError, match="there is none"):
        DiskStore(tmp_path / "absent", readonly=True)
    with DiskStore(tmp_path / "store"), pytest.raises(StoreLocked):
        DiskStore(tmp_path / "store")
    for options in ({"limit": 5}, {"key": b"short"}, {"quota": -1}):
        bad: Any = options
        with pytest.raises(InputError, match="store "):
            DiskStore(tmp_path / "store", **bad)


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "store"
    file = Path(saved(path, ids(700)))
    foreign = file.with_name(file.name[:2] + "0" * 62 + ".h5")
    with h5py.File(foreign, "w") as made:
        made["x"] = np.arange(5)
    (file.parent / "notes.txt").write_text("mine")
    with DiskStore(path) as store:
        assert store.counts["foreign"] == 1
        store.verify()
        store.collect()
        assert foreign.is_file()
        assert (file.parent / "notes.txt").is_file()
        kvs = manager(store)
        assert kvs.length(kvs.open([*ids(700), 1], space())) == 700


def test_a_key_authenticates_and_other_keys_read_nothing(tmp_path: Path) -> None:
    path, tokens = tmp_path / "store", ids(700)
    file = Path(saved(path, tokens, key=b"k" * 32))
    for key, found in ((b"k" * 32, 700), (b"l" * 32, 0), (None, 0)):
        with DiskStore(path, readonly=True, key=key) as store:
            kvs = manager(store)
            assert kvs.length(kvs.open([*tokens, 1], space())) == found
    assert file.is_file()


class Faulty(FileIO):
    """Fails, or delays, calls by name once they are armed."""

    def __init__(self) -> None:
        self.errors: dict[str, Any] = {}
        self.after_open: tuple[str, threading.Event] | None = None  # a call that hangs on prefetch threads

    def _do(self, name: str) -> None:
        fault = self.errors.get(name)
        if self.after_open is not None and threading.current_thread().name == "qkv prefetch":
            fault = self.after_open[1] if name == self.after_open[0] else fault
        if isinstance(fault, threading.Event):
            fault.wait(60)
        elif isinstance(fault, BaseException):
            raise fault

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        self._do("preadv")
        if "short" in self.errors:
            buffers = [buffers[0][: max(1, len(buffers[0]) // 3)]]
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        self._do("pwritev")
        if "short" in self.errors:
            buffers = [buffers[0][: max(1, len(buffers[0]) // 3)]]
        return super().pwritev(fd, buffers, offset)

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        self._do("open")
        return super().open(path, flags, mode)

    def fsync(self, fd: int) -> None:
        self._do("fsync")
        super().fsync(fd)

    def fallocate(self, fd: int, size: int) -> None:
        self._do("fallocate")
        super().fallocate(fd, size)

    def link(self, source: str, target: str) -> None:
        self._do("link")
        super().link(source, target)


def test_interrupted_and_short_calls_are_continued(tmp_path: Path) -> None:
    io, tokens = Faulty(), ids(700)
    io.errors["short"] = 0.0
    calls = [0]

    def interrupted(name: str) -> None:
        calls[0] += 1
        if name in ("preadv", "pwritev") and calls[0] % 2:
            raise InterruptedError

    io._do = interrupted  # type: ignore[method-assign]  # every other call is interrupted
    with DiskStore(tmp_path / "store", io=io) as store:
        kvs = manager(store)
        kvs.save(filled(kvs, tokens))
        other = manager(store)
        reader = other.open([*tokens, 1], space())
        fresh = KVManager(LAYERS, "kivi2")
        assert same(bits(other, reader), bits(fresh, filled(fresh, tokens)))
        assert other.length(reader) == 700
        assert store.verify() == (1, [], [])


@pytest.mark.parametrize("call", ["pwritev", "fsync", "fallocate", "link", "open"])
@pytest.mark.parametrize("number", [5, 28, 24])  # EIO, ENOSPC, EMFILE
def test_a_write_that_fails_stores_nothing_and_hurts_nothing(tmp_path: Path, call: str, number: int) -> None:
    io, tokens = Faulty(), ids(700)
    with DiskStore(tmp_path / "store", io=io) as store:
        kvs = manager(store)
        kvs.save(filled(kvs, ids(600, seed=1)))
        sequence = filled(kvs, tokens)
        io.errors[call] = OSError(number, os.strerror(number))
        with pytest.raises(OSError, match=os.strerror(number)):
            kvs.save(sequence)
        io.errors.clear()
        assert len(files(tmp_path / "store")) == 1
        assert os.listdir(tmp_path / "store" / "tmp") == []
        kvs.save(sequence)
        assert store.verify() == (2, [], [])


@pytest.mark.parametrize("call", ["preadv", "open"])
@pytest.mark.parametrize("number", [5, 24])
def test_a_read_that_fails_is_a_miss(tmp_path: Path, call: str, number: int) -> None:
    io, tokens = Faulty(), ids(700)
    saved(tmp_path / "store", tokens)
    with DiskStore(tmp_path / "store", io=io) as store:
        kvs = manager(store)
        io.errors[call] = OSError(number, os.strerror(number))
        assert kvs.length(kvs.open([*tokens, 1], space())) == 0
        assert store.counts["failed"] == 1
        io.errors.clear()
        assert kvs.length(kvs.open([*tokens, 1], space())) == 700


def test_a_read_that_hangs_is_a_miss_within_the_deadline(tmp_path: Path) -> None:
    io, tokens = Faulty(), ids(700)
    saved(tmp_path / "store", tokens)
    with DiskStore(tmp_path / "store", io=io) as store:
        kvs = manager(store, seconds=0.3)
        io.errors["preadv"] = hang = threading.Event()
        began = time.monotonic()
        assert kvs.length(kvs.open([*tokens, 1], space())) == 0
        assert kvs.length(kvs.open([*tokens, 1], space())) == 0, "it is not asked again at once"
        assert time.monotonic() - began < 1.5
        assert store.counts["late"] == 1
        assert store.counts["skipped"] == 1
        io.errors.clear()
        hang.set()
        other = manager(store, seconds=0.3)
        io.after_open = "preadv", threading.Event()  # the head is read, no layer is
        reader = other.open([*tokens, 1], space())
        assert other.length(reader) == 700
        began = time.monotonic()
        with pytest.raises(LayerLost, match=r"longer than 0\.3 s"):
            other.view(reader, 0)
        assert time.monotonic() - began < 1.5
        assert store.counts["late"] == 2
        io.after_open[1].set()
        io.after_open = None
        other.close(reader)
        append(other, other.open(), tokens)
        other.check()
        again = manager(store)
        assert again.length(again.open([*tokens, 1], space())) == 700  # and is never closed
        del again, kvs, other, reader
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("qkv "):
            thread.join(10)
            assert not thread.is_alive()


def test_what_cannot_be_saved_says_why(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "store") as store:
        kvs = manager(store)
        with pytest.raises(InputError, match="names for 0 of 0"):
            kvs.save(kvs.open())
        short = kvs.open(ids(100), space())
        append(kvs, short, ids(100))
        with pytest.raises(InputError, match="at least one block"):
            kvs.save(short)
        plain = KVManager(LAYERS)
        with pytest.raises(InputError, match="has no store"):
            plain.save(plain.open())
    with DiskStore(tmp_path / "store", readonly=True) as store:
        kvs = manager(store)
        with pytest.raises(InputError, match="reading only"):
            kvs.save(filled(kvs, ids(700)))
