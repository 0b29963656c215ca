"""The compiled seal against the reference: the same bytes for every format, head_dim and dtype, the same refusals."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from qkv import ops
from qkv.errors import FormatError, ShapeError
from qkv.formats import get_format, list_formats, record
from qkv.spec import BLOCK_TOKENS, MODEL_DTYPES, PIECE_TOKENS, LayerSpec, RecordLayout

pytest.importorskip("numba", reason="numba is not installed")
from qkv.kernels import seal_numba  # needs numba

NAMES = [*(f.id for f in list_formats()), "kivi4/kivi2", "exact/kivi2", "int8/kivi4", "fp8_e5m2/exact"]
DIMS = (16, 64, 80, 96, 128, 256)


def layout_of(name: str, dim: int, dtype: torch.dtype, heads: int = 2) -> RecordLayout:
    return RecordLayout(get_format(name), LayerSpec(heads, dim, dtype))


def blocks(layer: LayerSpec) -> torch.Tensor:
    """[5, H, 128, D]: outliers and constants; all magnitudes; ranges beyond float16; subnormals and zeros; ties."""
    x = torch.randn(5, layer.kv_heads, BLOCK_TOKENS, layer.head_dim)
    x[0, ..., 3] = x[0, ..., 3] * 40 + 20
    x[0, :, 17] *= 60
    x[0, ..., 9] = 1.375
    x[0, :, 30] = 0
    x[1] *= 2.0 ** torch.randint(-140, 12, (layer.kv_heads, BLOCK_TOKENS, 1))
    x[2] = (x[2] * 3e4).clamp(-65504, 65504)
    x[3] = x[3].round() * torch.finfo(layer.dtype).smallest_normal / 4
    x[3, :, :, ::5] = -0.0
    x[4] = torch.randint(0, 31, x[4].shape) / 2  # halves between codes
    x[4, :, ::32] = 15
    return x.to(layer.dtype)


def sealed(k: torch.Tensor, v: torch.Tensor, layout: RecordLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """What `ops.seal` leaves in a pool of old bytes, and what the reference's records would."""
    ids = torch.randperm(len(k) + 3)[: len(k)]
    got = torch.randint(0, 256, (len(k) + 3, layout.record_bytes), dtype=torch.uint8)
    want = got.clone()
    want[ids] = record.seal(k, v, layout)
    ops.seal(k, v, layout, got, ids.tolist())
    return got, want


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_bytes(name: str, dim: int, dtype: torch.dtype) -> None:
    layout = layout_of(name, dim, dtype, heads=1)
    assert seal_numba.refusal(layout) is None
    k, v = blocks(layout.layer), blocks(layout.layer).flip(2)
    got, want = sealed(k, v, layout)
    wrong = [f for f in layout.fields if not torch.equal(layout.field(got, f), layout.field(want, f))]
    assert torch.equal(got, want), f"fields that differ: {wrong or 'the gaps'}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_strided_input_is_read_where_it_lies(name: str, count: int) -> None:
    layout = layout_of(name, 80, torch.bfloat16, heads=3)
    stream = torch.randn(2, 3, count * BLOCK_TOKENS + 5, 96).to(torch.bfloat16)[:, :, 5:, 16:]
    k, v = torch.unflatten(stream, 2, (count, BLOCK_TOKENS)).transpose(1, 2)
    before = stream.clone()
    got, want = sealed(k, v, layout)
    assert torch.equal(got, want)
    assert torch.equal(stream, before)
    turned = k.mT.contiguous().mT, v.flip(3)
    got, want = sealed(*turned, layout)
    assert torch.equal(got, want)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads: int) -> None:
    layout = layout_of("kivi3/int8", 64, torch.float16, heads=5)
    k, v = torch.randn(2, 9, 5, BLOCK_TOKENS, 64).half()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got, want = sealed(k, v, layout)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got, want)


def test_zeros_of_either_sign_give_the_same_record_however_they_lie() -> None:
    """Which zero a minimum returns depends on the order of comparisons; the record must not."""
    for dtype in MODEL_DTYPES:
        layout = layout_of("kivi4", 64, dtype)
        x = (torch.randint(0, 2, (1, 2, BLOCK_TOKENS, 64)) * 2.0 - 1).mul(0.0).to(dtype)
        assert x.signbit().any()
        for y in (x, x.mT.contiguous().mT, x.transpose(1, 2).contiguous().transpose(1, 2)):
            assert not record.seal(y, y, layout).any()
            got, want = sealed(y, y, layout)
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("bad", "dtype"),
    [
        (float("nan"), torch.float16),
        (float("inf"), torch.float16),
        (-float("inf"), torch.bfloat16),
        (-float("nan"), torch.bfloat16),
        (2.0**127, torch.bfloat16),
        (-2.0e38, torch.float32),
        (float("nan"), torch.float32),
    ],
)
def test_refusals_are_the_references(bad: float, dtype: torch.dtype) -> None:
    layout = layout_of("kivi2", 64, dtype)
    for which in "kv":
        pair = {"k": torch.randn(3, 2, BLOCK_TOKENS, 64).to(dtype), "v": torch.randn(3, 2, BLOCK_TOKENS, 64).to(dtype)}
        pair[which][1, 0, 77, 5] = bad
        pair[which][1, 1, 3, 2] = bad
        with pytest.raises(FormatError) as reference:
            record.seal(pair["k"], pair["v"], layout)
        out = torch.full((3, layout.record_bytes), 7, dtype=torch.uint8)
        with pytest.raises(FormatError) as ours:
            ops.seal(pair["k"], pair["v"], layout, out, [0, 1, 2])
        assert str(ours.value) == str(reference.value)
        assert (out == 7).all(), "a refusal leaves the pool as it is"


def test_the_largest_values_are_taken() -> None:
    for dtype, largest in ((torch.float16, 65504.0), (torch.bfloat16, 1.68e38), (torch.float32, 1.69e38)):
        layout = layout_of("kivi3", 64, dtype)
        x = torch.full((1, 2, BLOCK_TOKENS, 64), largest).to(dtype)
        x *= torch.randint(0, 2, x.shape).to(dtype) * 2 - 1
        got, want = sealed(x, x, layout)
        assert torch.equal(got, want)
        assert seal_numba.within(x, record.LARGEST_VALUE)


def test_wrong_ids_and_shapes_are_refused() -> None:
    layout = layout_of("kivi2", 64, torch.float16)
    good, out = torch.zeros(2, 2, BLOCK_TOKENS, 64).half(), torch.zeros(4, layout.record_bytes, dtype=torch.uint8)
    for ids in ([0, 4], [-1, 0], [0], [0, 1, 2]):
        with pytest.raises(ShapeError, match="block ids"):
            ops.seal(good, good, layout, out, ids)
    with pytest.raises(ShapeError, match=r"^records: got"):
        ops.seal(good, good, layout, out[:, :-64], [0, 1])
    with pytest.raises(ShapeError, match=r"^v: got dtype"):
        ops.seal(good, good.float(), layout, out, [0, 1])
    with pytest.raises(ShapeError, match=r"^k: got shape"):
        ops.seal(good[:, :, :127], good, layout, out, [0, 1])


def test_head_dims_that_tiles_do_not_fit_go_to_the_reference() -> None:
    layout = layout_of("exact", 72, torch.bfloat16)
    assert "multiple of 16" in str(seal_numba.refusal(layout))
    x = torch.randn(2, 2, BLOCK_TOKENS, 72).bfloat16()
    got, want = sealed(x, x, layout)
    assert torch.equal(got, want)


GENERIC = """
import importlib.util, torch
from qkv.kernels.vectors_llvm import has
assert not has("f16c")
spec = importlib.util.spec_from_file_location("cases", FILE)
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)
for name in ("kivi2", "kivi3", "kivi4", "int8", "fp8_e4m3", "fp8_e5m2", "exact"):
    for dtype in cases.MODEL_DTYPES:
        cases.test_the_same_bytes(name, 80, dtype)
cases.test_the_largest_values_are_taken()
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_few_tokens_are_stored_whole_or_not_at_all(dtype: torch.dtype) -> None:
    """Through the door, from any strides, over pieces; a value that no record holds leaves them as they were."""
    ids = torch.tensor([4, 0, 2, 7, 3, 5])
    for heads, tokens, dim, first in ((1, 1, 16, 0), (3, 5, 80, 14), (2, 0, 64, 3), (2, 90, 64, 5), (1, 1, 32, 95)):
        k, v = torch.randn(2, tokens, heads, dim).to(dtype).transpose(1, 2)
        v = torch.randn(heads, dim, tokens).to(dtype).mT
        pieces = torch.zeros(8, 2, heads, PIECE_TOKENS, dim, dtype=dtype)
        ops.store_tokens(k, v, pieces, ids, first)
        want = torch.zeros_like(pieces)
        for token in range(tokens):
            piece, slot = ids[(first + token) // PIECE_TOKENS], (first + token) % PIECE_TOKENS
            want[piece, 0, :, slot], want[piece, 1, :, slot] = k[:, token], v[:, token]
        assert torch.equal(pieces, want)
        if not tokens:
            continue
        for side, bad in ((0, float("nan")), (1, float("-inf"))):
            broken = [k.clone(), v.clone()]
            broken[side][-1, -1, -1] = bad
            with pytest.raises(FormatError, match=f"{'kv'[side]}: got .* at head {heads - 1}, token {tokens - 1}"):
                ops.store_tokens(broken[0], broken[1], pieces, ids, first)
            assert torch.equal(pieces, want)
