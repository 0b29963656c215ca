"""The compiled unseal against the reference: the same floats, and the same roundings to the model's dtype."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from qkv import ops
from qkv.errors import ShapeError
from qkv.formats import get_format, list_formats, record
from qkv.spec import BLOCK_TOKENS, MODEL_DTYPES, KVView, LayerSpec, RecordLayout

pytest.importorskip("numba", reason="numba is not installed")
from qkv.kernels import unseal_numba  # needs numba

NAMES = [*(f.id for f in list_formats()), "kivi4/kivi2", "exact/kivi2", "int8/kivi4", "fp8_e5m2/exact"]
DIMS = (16, 64, 80, 96, 128, 256)


def layout_of(name: str, dim: int, dtype: torch.dtype, heads: int = 2) -> RecordLayout:
    return RecordLayout(get_format(name), LayerSpec(heads, dim, dtype))


def records_of(layout: RecordLayout, count: int) -> torch.Tensor:
    shape = (2, count, layout.layer.kv_heads, BLOCK_TOKENS, layout.layer.head_dim)
    k, v = (torch.randn(shape) * 2.0 ** torch.randint(-6, 6, (*shape[:-1], 1))).to(layout.layer.dtype)
    return record.seal(k, v, layout)


def noise(layout: RecordLayout, count: int) -> torch.Tensor:
    """Records of random bytes: every code and every scale there is, infinities and NaN too."""
    return torch.randint(0, 256, (count, layout.record_bytes), dtype=torch.uint8)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Bit for bit, but any NaN equals any other."""
    ints = torch.int32 if got.dtype == torch.float32 else torch.int16
    equal = got.contiguous().view(ints) == want.contiguous().view(ints)
    return got.shape == want.shape and bool((equal | (got.isnan() & want.isnan())).all())


def into(records: torch.Tensor, ids: list[int], lengths: list[int], layout: RecordLayout) -> torch.Tensor:
    """What `ops.unseal_into` writes, [2, H, T, D], into the middle of a larger tensor whose rest must stay."""
    layer = layout.layer
    room = torch.full((2, layer.kv_heads, sum(lengths) + 7, layer.head_dim), 3.5, dtype=layer.dtype)
    none = room[:, :, :0]
    view = KVView.of(layout, records, (torch.tensor(ids, dtype=torch.int64), torch.tensor(lengths)), (none, none), none)
    ops.unseal_into(view, room[:, :, 4:-3])
    assert bool((room[:, :, :4] == 3.5).all())
    assert bool((room[:, :, -3:] == 3.5).all())
    return room[:, :, 4:-3]


def dense(records: torch.Tensor, ids: list[int], lengths: list[int], layout: RecordLayout) -> torch.Tensor:
    """The same by the reference: decode, clamp (what is stored as it is needs none), round."""
    largest = torch.finfo(layout.layer.dtype).max
    sides = []
    for spec, values in zip((layout.format.k, layout.format.v), record.unseal(records, layout), strict=True):
        side = torch.cat([values[i, :, :length] for i, length in zip(ids, lengths, strict=True)], dim=1)
        sides.append(side if spec.scheme == "raw" else side.clamp(-largest, largest))
    return torch.stack(sides).to(layout.layer.dtype)


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_floats(name: str, dim: int, dtype: torch.dtype) -> None:
    layout = layout_of(name, dim, dtype, heads=1)
    assert unseal_numba.refusal(layout) is None
    for records in (records_of(layout, 2), noise(layout, 2)):
        before = records.clone()
        for got, want in zip(ops.unseal(records, layout), record.unseal(records, layout), strict=True):
            assert got.dtype == torch.float32
            assert same(got, want)
        ids, lengths = [1, 0, 1], [BLOCK_TOKENS, 37, 1]
        # a record of noise has roundings of every size, ties and subnormals among them
        assert same(into(records, ids, lengths, layout), dense(records, ids, lengths, layout))
        assert torch.equal(records, before)


@pytest.mark.parametrize("name", NAMES)
def test_no_blocks_and_odd_pools(name: str) -> None:
    layout = layout_of(name, 64, torch.float16, heads=3)
    records = records_of(layout, 4)
    assert [tuple(side.shape) for side in ops.unseal(records[:0], layout)] == [(0, 3, BLOCK_TOKENS, 64)] * 2
    for got, want in zip(
        ops.unseal(records[::2], layout), record.unseal(records[::2].contiguous(), layout), strict=True
    ):
        assert same(got, want)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads: int) -> None:
    layout = layout_of("kivi3/int8", 64, torch.bfloat16, heads=5)
    records = records_of(layout, 11)
    ids, lengths = torch.randperm(11).tolist(), [BLOCK_TOKENS] * 10 + [0]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got, floats = into(records, ids, lengths, layout), ops.unseal(records, layout)
    finally:
        torch.set_num_threads(before)
    assert same(got, dense(records, ids, lengths, layout))
    assert all(same(got, want) for got, want in zip(floats, record.unseal(records, layout), strict=True))


def test_float32_out_of_a_16_bit_model() -> None:
    layout = layout_of("kivi4/exact", 80, torch.bfloat16)
    records = records_of(layout, 2)
    out = torch.empty(2, 2, 200, 80)
    unseal_numba.unseal_into(records, torch.tensor([1, 0]), torch.tensor([128, 72]), layout, out)
    want = torch.stack([torch.cat([side[1], side[0, :, :72]], dim=1) for side in record.unseal(records, layout)])
    assert same(out, want)


def test_the_largest_float16_values_stay_finite() -> None:
    layout = layout_of("kivi2", 64, torch.float16)
    x = torch.full((1, 2, BLOCK_TOKENS, 64), 65504.0).half()
    x[..., ::2] *= -1
    records = record.seal(x, x, layout)
    assert bool((record.unseal(records, layout)[1].abs() > 65504).any()), "the case is there to be clamped"
    assert bool(into(records, [0], [128], layout).isfinite().all())


def test_what_addresses_are_made_of_is_checked() -> None:
    layout = layout_of("kivi2", 64, torch.float16)
    records, out = records_of(layout, 3), torch.zeros(2, 2, 256, 64).half()

    def call(ids: list[int], lengths: list[int], records: torch.Tensor = records, out: torch.Tensor = out) -> None:
        unseal_numba.unseal_into(records, torch.tensor(ids), torch.tensor(lengths), layout, out)

    call([0, 2], [128, 128])
    unseal_numba.unseal_into(records, torch.tensor([1, 2], dtype=torch.int32), torch.tensor([128, 128]), layout, out)
    assert same(out, dense(records, [1, 2], [128, 128], layout))
    for ids in ([0, 3], [-1, 0]):
        with pytest.raises(ShapeError, match="block ids"):
            call(ids, [128, 128])
    with pytest.raises(ShapeError, match="lengths"):
        call([0, 1], [129, 127])
    with pytest.raises(ShapeError, match="lengths"):
        call([0, 1, 2], [128, -1, 129])
    for bad in (out[:1], out[:, :1], out[:, :, 1:], out[..., ::2], out.bfloat16()):
        with pytest.raises(ShapeError, match="out"):
            call([0, 1], [128, 128], out=bad)
    for bad in (records[:, :-64], records.to(torch.int16), records.T.contiguous().T):
        with pytest.raises(ShapeError, match="records"):
            call([0, 1], [128, 128], records=bad)
    with pytest.raises(ShapeError, match=r"^records: got shape"):
        ops.unseal(records[:, :-64], layout)


def test_head_dims_that_tiles_do_not_fit_go_to_the_reference() -> None:
    layout = layout_of("exact", 72, torch.bfloat16)
    assert "multiple of 16" in str(unseal_numba.refusal(layout))
    records = records_of(layout, 2)
    assert all(
        same(got, want) for got, want in zip(ops.unseal(records, layout), record.unseal(records, layout), strict=True)
    )
    assert same(into(records, [1, 0], [128, 5], layout), dense(records, [1, 0], [128, 5], layout))


GENERIC = """
import importlib.util, torch
from qkv.kernels.vectors_llvm import has
assert not has("f16c")
spec = importlib.util.spec_from_file_location("cases", FILE)
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)
for name in ("kivi2", "kivi3", "kivi4", "int8", "fp8_e4m3", "fp8_e5m2", "exact"):
    for dtype in cases.MODEL_DTYPES:
        cases.test_the_same_floats(name, 80, dtype)
print("generic ok")
"""


def test_the_plainest_cpu(tmp_path: Any) -> None:
    """The same source compiled without any vector extension, in a process of its own."""
    plain = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    code = GENERIC.replace("FILE", repr(__file__))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | plain, check=False
    )
    assert done.stdout.strip().endswith("generic ok"), done.stderr


FORKED = """
import os, signal, torch
from qkv.formats import get_format
from qkv.kernels import seal_numba, unseal_numba
from qkv.spec import LayerSpec, RecordLayout
torch.set_num_threads(2)
layout = RecordLayout(get_format("kivi2"), LayerSpec(2, 64, torch.float32))
k, v = torch.randn(2, 32, 2, 128, 64)
ids, lengths = torch.arange(32), torch.full((32,), 128)
def work():  # no torch arithmetic: torch's own threads do not survive a fork
    records, out = torch.empty(32, layout.record_bytes, dtype=torch.uint8), torch.empty(2, 2, 4096, 64)
    assert seal_numba.within(k, 100.0)
    seal_numba.seal(k, v, layout, records, ids.tolist())
    unseal_numba.unseal_into(records, ids, lengths, layout, out)
    return records.numpy().tobytes() + out.numpy().tobytes()
want = work()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if work() == want else 1)
assert os.waitpid(child, 0)[1] == 0
print("forked ok")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip() == "forked ok", done.stderr
