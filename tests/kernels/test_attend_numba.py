"""The fused CPU kernel against the reference over the same records, and against its own precise mode."""

import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.formats import get_format, list_formats
from qkv.formats.record import seal, unseal
from qkv.kernels import attend_torch
from qkv.spec import BLOCK_TOKENS, AttendOptions, KVView, LayerSpec, RecordLayout

numba = pytest.importorskip("numba", reason="numba is not installed")
from qkv.kernels import amx_llvm, attend_numba, calls_numba  # noqa: E402  # needs numba
from qkv.kernels.softmax_llvm import widen_row  # noqa: E402  # needs numba

FORMATS = [
    "kivi2",
    "kivi3",
    "kivi4",
    "kivi2_g64",
    "kivi4_g128/kivi3_g64",
    "int8",
    "fp8_e4m3",
    "fp8_e5m2",
    "kivi4/int8",
    "exact/kivi2",
    "fp8_e5m2/exact",
    "exact",
]
# head_dim, query heads a KV head, queries, dtype
SHAPES = [
    (64, 3, 1, torch.bfloat16),
    (128, 4, 1, torch.float16),
    (80, 1, 5, torch.float32),
    (96, 7, 1, torch.bfloat16),
    (256, 2, 3, torch.float16),
    (128, 8, 8, torch.bfloat16),
    (16, 1, 1, torch.float32),
]
# A weight is rounded to one of 2 * 16319 steps of the largest: at most 2^-15 of it. Errors of n terms add like a random
# walk, and the largest weight is at most sqrt(n) times their root mean square: 2^-15 / sqrt(3) * sqrt(n) times the
# spread of the codes around their middle over that of the values (below 4; int8: 127 where values are far below the
# token's largest).
ROUNDED = {True: 2e-5, False: 2e-3}

PARTS = ("records", "pieces", "table", "new")


def view_of(
    name: str, heads: int, dim: int, dtype: torch.dtype, sizes: tuple[int, int, int, int] = (70, 3, 130, 9)
) -> KVView:
    """sizes: sink tokens, blocks, tail tokens, new tokens. Ids out of order, the last block cropped, odd strides."""
    sink, blocks, tail, new = sizes
    layout = RecordLayout(get_format(name), LayerSpec(heads, dim, dtype))
    k, v = torch.randn(2, blocks, heads, BLOCK_TOKENS, dim)
    k[..., 3] = k[..., 3] * 3 + 40  # an outlier channel with an offset, as Qwen2.5's
    k[..., 5] = 1.375
    v[:, :, 17] *= 20
    ids = torch.randperm(blocks + 2)[:blocks]
    records = torch.zeros(blocks + 2, layout.record_bytes, dtype=torch.uint8)
    records[ids] = seal(k.to(dtype), v.to(dtype), layout)
    lengths = torch.full((blocks,), BLOCK_TOKENS)
    if blocks:
        lengths[-1] = 37

    def exact(tokens: int) -> torch.Tensor:
        return torch.randn(2, heads, tokens + 11, dim).to(dtype)[:, :, :tokens]

    return KVView.of(layout, records, (ids, lengths), (exact(sink), exact(tail)), exact(new))


def both(q: torch.Tensor, view: KVView, options: AttendOptions) -> tuple[float, float]:
    """Relative L2 error of the output, largest error of the log-sum-exp."""
    want, lse = attend_torch.attend(q, view, options, lambda rows: unseal(rows, view.layout))
    got, got_lse = attend_numba.attend(q, view, options)
    assert got.shape == want.shape
    assert got.dtype == q.dtype
    return float((got - want).norm() / want.norm()), float((got_lse - lse).abs().max())


@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize(("dim", "group", "queries", "dtype"), SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_reference(name: str, dim: int, group: int, queries: int, dtype: torch.dtype, precise: bool) -> None:
    torch.manual_seed(dim + group)
    view = view_of(name, 2, dim, dtype)
    q = torch.randn(2 * group, queries, dim)
    sinks = torch.randn(2 * group)
    for options in (
        AttendOptions(dim**-0.5, precise=precise),
        AttendOptions(dim**-0.5, window=150, precise=precise),
        AttendOptions(dim**-0.5, window=3, softcap=20.0, sinks=sinks, precise=precise),
        AttendOptions(dim**-0.5, causal=False, sinks=sinks * 9, precise=precise),
    ):
        error, lse_error = both(q, view, options)
        assert error <= ROUNDED[precise], options
        assert lse_error <= 20 * ROUNDED[precise], options


@pytest.mark.parametrize(("dim", "group", "queries", "dtype"), [SHAPES[2], SHAPES[5]])
@pytest.mark.parametrize("name", FORMATS)
def test_without_amx(
    name: str, dim: int, group: int, queries: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amx_llvm, "has_amx", lambda: False)
    assert "AMX" not in attend_numba.instructions()
    error, lse_error = both(
        torch.randn(2 * group, queries, dim), view_of(name, 2, dim, dtype), AttendOptions(dim**-0.5)
    )
    assert error <= ROUNDED[False]
    assert lse_error <= 20 * ROUNDED[False]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_ragged_batch_is_each_sequence_alone(threads: int) -> None:
    """Lengths from one token to many blocks and query counts from 1 to 16, in one call."""
    sizes = [(0, 0, 0, 1), (64, 30, 70, 16), (1, 0, 0, 0), (64, 1, 200, 5), (64, 9, 64, 0), (0, 3, 0, 0)]
    views = [view_of("kivi3", 2, 64, torch.bfloat16, each) for each in sizes]
    layout = views[0].layout
    views = [KVView(layout, *(getattr(view, name) for name in PARTS)) for view in views]
    queries = [torch.randn(6, count, 64) for count in (1, 16, 1, 5, 1, 8)]
    options = AttendOptions(0.125, sinks=torch.randn(6))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = attend_numba.attend_many(queries, views, options)
    finally:
        torch.set_num_threads(before)
    for q, view, (out, lse) in zip(queries, views, together, strict=True):
        want, want_lse = attend_torch.attend(q, view, options, lambda rows: unseal(rows, layout))
        assert float((out - want).norm() / want.norm()) <= ROUNDED[False]
        assert float((lse - want_lse).abs().max()) <= 20 * ROUNDED[False]


@given(
    pieces=st.lists(st.tuples(*[st.integers(0, 400)] * 3, st.integers(0, 9)), min_size=1, max_size=6),
    heads=st.integers(1, 5),
    threads=st.integers(1, 7),
)
@settings(max_examples=200, deadline=None)
def test_every_piece_is_planned_once_and_evenly(
    pieces: list[tuple[int, int, int, int]], heads: int, threads: int
) -> None:
    calls = np.zeros((len(pieces), calls_numba.CALL_FIELDS), np.int64)
    for row, (sink, tail, new, blocks) in zip(calls, pieces, strict=True):
        named = {"sink": sink, "tail": tail, "new": new, "blocks": blocks}
        for name, value in named.items():
            row[calls_numba.Call._fields.index(name)] = value
    tasks = np.zeros((len(pieces) * heads + threads - 1, calls_numba.TASK_FIELDS), np.int64)
    starts = np.zeros(threads + 1, np.int64)
    count = calls_numba.plan(calls.ctypes.data, len(calls), heads, threads, tasks.ctypes.data, starts.ctypes.data)
    sizes = [sum(-(-tokens // BLOCK_TOKENS) for tokens in each[:3]) + each[3] for each in pieces]
    planned = [(call, head, i) for call, head, first, last in tasks[:count].tolist() for i in range(first, last)]
    assert planned == [(call, head, i) for call, size in enumerate(sizes) for head in range(heads) for i in range(size)]
    assert {tuple(task[:2]) for task in tasks[:count].tolist()} == {
        (c, h) for c in range(len(sizes)) for h in range(heads)
    }
    shares = [sum(last - first for _, _, first, last in tasks[a:b].tolist()) for a, b in pairwise(starts.tolist())]
    assert sum(shares) == sum(sizes) * heads
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize(
    "sizes", [(0, 1, 0, 0), (0, 0, 1, 0), (1, 0, 0, 0), (0, 0, 0, 5), (64, 40, 0, 1), (129, 2, 257, 0)]
)
def test_any_mixture_of_pieces(sizes: tuple[int, int, int, int]) -> None:
    view = view_of("kivi2", 3, 64, torch.bfloat16, sizes)
    error, lse_error = both(torch.randn(6, 1, 64), view, AttendOptions(0.125, precise=True))
    assert error <= ROUNDED[True]
    assert lse_error <= 20 * ROUNDED[True]


def test_nothing_at_all() -> None:
    view = view_of("kivi2", 2, 64, torch.float32, (0, 0, 0, 0))
    out, lse = attend_numba.attend(torch.randn(4, 1, 64), view, AttendOptions(0.125, causal=False))
    assert (out == 0).all()
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing_beyond_rounding(threads: int) -> None:
    """Heads, or pieces of the context where heads are few, go to threads; the pieces are merged exactly."""
    before = torch.get_num_threads()
    views = [view_of("kivi4", heads, 64, torch.bfloat16, (64, 60, 70, 0)) for heads in (1, 2, 5)]
    try:
        torch.set_num_threads(threads)
        errors = [
            both(torch.randn(view.layout.layer.kv_heads * 2, 1, 64), view, AttendOptions(0.125, precise=True))
            for view in views
        ]
    finally:
        torch.set_num_threads(before)
    assert max(error for error, _ in errors) <= ROUNDED[True]


@pytest.mark.parametrize("precise", [True, False])
def test_nan_stays_visible(precise: bool) -> None:
    view = view_of("kivi2", 2, 64, torch.float32)
    q = torch.randn(4, 1, 64)
    q[1, 0, 7] = float("nan")
    out, _ = attend_numba.attend(q, view, AttendOptions(0.125, precise=precise))
    assert torch.isnan(out[1]).all()
    assert torch.isfinite(out[[0, 2, 3]]).all()


def test_huge_scores_do_not_overflow() -> None:
    view = view_of("kivi4", 1, 64, torch.float32)
    out, lse = attend_numba.attend(torch.randn(1, 1, 64) * 1e4, view, AttendOptions(1.0))
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize("dim", range(16, 272, 16))
@pytest.mark.parametrize("v_side", [f.id for f in list_formats()])
def test_amx_reads_no_byte_behind_a_record(v_side: str, dim: int) -> None:
    """It reads 8-bit codes 64 values at a time: where head_dim is no multiple of 64, beyond K's codes."""
    layout = RecordLayout(get_format(f"int8/{v_side}"), LayerSpec(1, dim, torch.bfloat16))
    codes = layout.fields["k_codes_0"]
    last_lanes = codes.offset + (BLOCK_TOKENS // 16 - 1) * dim * 16
    assert last_lanes + -(-dim // 64) * 64 * 16 <= layout.head_bytes


def test_refusals_say_why() -> None:
    view = view_of("kivi2", 2, 64, torch.float32)
    assert attend_numba.refusal(torch.randn(4, 1, 64), view) is None
    assert "129 query rows" in attend_numba.refusal(torch.randn(2, 129, 64), view)
    assert "no queries" in attend_numba.refusal(torch.randn(2, 0, 64), view)
    odd = view_of("exact", 1, 24, torch.float32)
    assert "multiple of 16" in attend_numba.refusal(torch.randn(1, 1, 24), odd)


@numba.njit
def widened(values: Any, out: Any) -> None:
    widen_row(values.ctypes.data, 0, values.size, np.float32(1), out.ctypes.data)


def test_every_float16_is_widened_exactly() -> None:
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    values = patterns[torch.isfinite(patterns.view(torch.float16))]
    values = values[: len(values) // 16 * 16]
    out = np.zeros(len(values), np.float32)
    widened(values.numpy(), out)
    want = values.view(torch.float16).float()
    assert torch.equal(torch.from_numpy(out).view(torch.int32), want.view(torch.int32))


GENERIC = """
import torch
from qkv.kernels import attend_numba, tiles_llvm
assert not tiles_llvm.has_vnni()
assert "generic" in attend_numba.instructions()
import importlib.util
spec = importlib.util.spec_from_file_location("cases", FILE)
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)
for name in ("kivi2", "kivi3", "kivi4", "int8", "fp8_e4m3"):
    for precise in (True, False):
        for dtype in (torch.bfloat16, torch.float16):
            cases.test_equals_the_reference(name, 64, 3, 1, dtype, precise)
cases.test_every_float16_is_widened_exactly()
print("generic ok")
"""


def test_a_cpu_without_vnni(tmp_path: Any) -> None:
    """The same source compiled for the plainest CPU of this architecture, in a process of its own."""
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    code = GENERIC.replace("FILE", repr(__file__))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip().endswith("generic ok"), done.stderr


FORKED = """
import os, signal, torch
from qkv import AttendOptions, KVManager
torch.set_num_threads(2)
manager = KVManager(1, "kivi2")
sequence = manager.open()
manager.append(sequence, 0, *torch.randn(2, 2, 4096, 64))
q, options = torch.randn(4, 1, 64), AttendOptions(0.125)
want = manager.attend(sequence, 0, q, options)[0]
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if torch.equal(manager.attend(sequence, 0, q, options)[0], want) else 1)
assert os.waitpid(child, 0)[1] == 0
print("forked ok")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip() == "forked ok", done.stderr
