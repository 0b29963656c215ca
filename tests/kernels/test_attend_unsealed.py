"""Attention of many query rows against the reference over the same records: masks, shapes, dtypes, work space."""

import itertools
import math
import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qkv import ops
from qkv.formats import get_format
from qkv.formats.record import seal, unseal
from qkv.kernels import attend_torch
from qkv.spec import BLOCK_TOKENS, MODEL_DTYPES, AttendOptions, KVView, LayerSpec, RecordLayout

pytest.importorskip("numba", reason="numba is not installed")
from qkv.kernels import attend_unsealed  # needs numba
from qkv.kernels.merge_numba import merge

FORMATS = ("kivi2", "kivi3", "kivi4_g64", "int8", "fp8_e4m3/kivi4", "exact/kivi2", "exact")
# Half a unit in the last place, the largest relative error of a rounding; uniform errors have 1/sqrt(3) of it as their
# root mean square.
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many runs without many tokens."""
    monkeypatch.setattr(attend_unsealed, "MOST_TOKENS", 1024)


def view_of(
    name: str,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    crops: tuple[int, ...] = (37,),
) -> KVView:
    """sizes: sink tokens, blocks, tail tokens, new tokens. Ids out of order, `crops` the lengths of the last blocks."""
    sink, blocks, tail, new = sizes
    layout = RecordLayout(get_format(name), LayerSpec(heads, dim, dtype))
    k, v = torch.randn(2, blocks, heads, BLOCK_TOKENS, dim).to(dtype)
    ids = torch.randperm(blocks + 2)[:blocks]
    records = torch.randint(0, 256, (blocks + 2, layout.record_bytes), dtype=torch.uint8)
    records[ids] = seal(k, v, layout)
    lengths = torch.full((blocks,), BLOCK_TOKENS)
    if blocks >= len(crops):
        lengths[blocks - len(crops) :] = torch.tensor(crops)

    def exact(tokens: int) -> torch.Tensor:
        return torch.randn(2, heads, tokens + 11, dim).to(dtype)[:, :, :tokens]

    return KVView.of(layout, records, (ids, lengths), (exact(sink), exact(tail)), exact(new))


def reference(q: torch.Tensor, view: KVView, options: AttendOptions) -> tuple[torch.Tensor, torch.Tensor]:
    return attend_torch.attend(q.float(), view, options, lambda rows: unseal(rows, view.layout))


def check(q: torch.Tensor, view: KVView, options: AttendOptions) -> None:
    """Relative L2 error of the output, largest error of the log-sum-exp, shapes and dtypes.

    float32 (and `precise`): sums of D products and of T weights in another order; 2^-24 times the square root of
    thousands of terms, on scores of at most about 30: below 1e-5.
    16 bit: K, V, the weights, a run's output and the result are rounded once each. Each rounding moves every value by
    up to `unit`, at random: sqrt(5 / 3) units in L2 and, for a score (K rounded, D products of size |q_d k_d| / sqrt(D)
    averaging 1 in square), 1 / sqrt(3) units each, at most 5 times that over a million of them.
    """
    assert attend_unsealed.refusal(q, view, options) is None
    out, lse = attend_unsealed.attend(q, view, options)
    want, want_lse = reference(q, view, options)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert out.shape == want.shape
    assert lse.shape == want_lse.shape
    seen = torch.isfinite(want_lse)
    assert torch.equal(torch.isneginf(lse), ~seen)
    assert not out[~seen].any()
    exact = options.precise or q.dtype == torch.float32
    unit = UNIT[q.dtype]
    bound = (1e-5, 1e-5) if exact else (2 * unit, 5 * unit)
    rounding = unit if exact else 0.0  # the result is in q's dtype even where all before it is float32
    assert float((out.float() - want).norm() / want.norm().clamp_min(1e-9)) <= bound[0] + rounding
    assert float((lse - want_lse)[seen].abs().max().nan_to_num(0) if seen.any() else 0) <= bound[1]


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize(("dim", "group"), [(16, 1), (64, 3), (80, 4), (96, 7), (128, 4), (256, 1)])
@pytest.mark.parametrize("name", FORMATS)
def test_formats_shapes_and_dtypes(name: str, dim: int, group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim + group)
    queries = 70
    view = view_of(name, 2, dim, dtype, (40, 18, 60, queries), crops=(90, 37))
    q = torch.randn(2 * group, queries, dim).to(dtype)
    for options in (
        AttendOptions(dim**-0.5),
        AttendOptions(dim**-0.5, window=600, sinks=torch.randn(2 * group) * 3),
        AttendOptions(dim**-0.5, precise=True),
    ):
        check(q, view, options)


def masks_by_hand(start: int, tokens: int, queries: tuple[int, int], options: AttendOptions) -> torch.Tensor:
    """How often each (query row, key) of a run is visited, from the rectangles."""
    count = torch.zeros(queries[1], tokens, dtype=torch.int64)
    for rows, keys, mask in attend_unsealed._rectangles(start, tokens, queries, options):
        part = count[rows, keys]
        if mask is True:
            assert part.shape[0] == part.shape[1]
            part += torch.ones_like(part).tril()
        else:
            part += 1 if mask is None else mask
            assert mask is None or bool(mask[:, : attend_unsealed.MASKED_ROWS].any(1).all()), "a row begins with -inf"
    return count


@pytest.mark.parametrize("causal", [True, False])
def test_every_visible_pair_is_visited_once(causal: bool) -> None:
    """Runs before, across, inside and behind the queries, with windows of every kind."""
    rng = random.Random(1)
    for _ in range(400):
        count, tokens = rng.choice([1, 65, 300, 700]), rng.choice([1, 37, 300, 900])
        first = rng.choice([0, 5, 1000])
        # causal runs end before the queries begin, or lie among them
        places = [first - tokens, first - tokens - 200, first, first + (count - tokens) // 2, first + count - tokens]
        start = rng.choice([p for p in places if p >= 0 and (not causal or p >= first or p + tokens <= first)] or [0])
        if causal and (start < first < start + tokens or start + tokens > first + count):
            continue
        window = rng.choice([None, 1, 5, 64, 299, 300, 301, 1000, 5000])
        options = AttendOptions(1.0, causal, window)
        got = masks_by_hand(start, tokens, (first, count), options)
        distance = torch.arange(first, first + count).unsqueeze(1) - torch.arange(start, start + tokens)
        want = torch.ones_like(got, dtype=torch.bool)
        if causal:
            want &= distance >= 0
        if window is not None:
            want &= distance < window
        assert torch.equal(got, want.long()), (first, count, start, tokens, window)


@pytest.mark.parametrize("queries", [65, 130, 512])
@pytest.mark.parametrize(
    "sizes", [(0, 0, 0, 0), (0, 3, 0, 0), (64, 0, 190, 0), (7, 5, 100, 0), (64, 20, 0, 0), (0, 33, 5, 0)]
)
def test_any_mixture_of_pieces(sizes: tuple[int, int, int, int], queries: int) -> None:
    """Empty histories; queries over all, some and more than what is new; windows that end inside each piece."""
    for new, window in itertools.product((queries, queries // 2, queries + 40), (None, 1, 100, 1500)):
        view = view_of("kivi4", 1, 64, torch.float32, (*sizes[:3], new))
        if view.tokens >= queries:
            check(torch.randn(3, queries, 64), view, AttendOptions(0.125, window=window))


@pytest.mark.parametrize("window", [None, 1, 100, 400, 3000])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sinks", [False, True])
def test_masks_and_sinks(window: int | None, causal: bool, sinks: bool) -> None:
    view = view_of("kivi2", 2, 64, torch.float32, (64, 21, 30, 300), crops=(1, 128, 90))
    options = AttendOptions(0.3, causal, window, None, torch.randn(4) * 9 if sinks else None)
    check(torch.randn(4, 300, 64), view, options)


def test_more_queries_than_tokens_see_what_there_is() -> None:
    view = view_of("kivi2", 2, 64, torch.float32, (5, 1, 0, 0))
    check(torch.randn(4, 100, 64), view, AttendOptions(0.125, causal=False))


@pytest.mark.parametrize("sinks", [False, True])
def test_nothing_at_all(sinks: bool) -> None:
    view = view_of("kivi2", 2, 64, torch.bfloat16, (0, 0, 0, 0))
    logits = torch.randn(4)
    options = AttendOptions(0.125, causal=False, sinks=logits if sinks else None)
    out, lse = attend_unsealed.attend(torch.randn(4, 70, 64).bfloat16(), view, options)
    assert not out.any()
    assert torch.equal(lse, logits.unsqueeze(1).expand(4, 70)) if sinks else torch.isneginf(lse).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads(threads: int) -> None:
    view = view_of("kivi3", 5, 64, torch.bfloat16, (64, 20, 70, 80))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        check(torch.randn(10, 80, 64).bfloat16(), view, AttendOptions(0.125, window=1000))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_nan_stays_visible(dtype: torch.dtype) -> None:
    view = view_of("kivi2", 2, 64, dtype, (64, 18, 30, 100))
    q = torch.randn(4, 100, 64).to(dtype)
    q[1, 7, 5] = math.nan
    out, lse = attend_unsealed.attend(q, view, AttendOptions(0.125))
    assert out[1, 7].isnan().all()
    assert lse[1, 7].isnan()
    out[1, 7], lse[1, 7] = 0, 0
    assert out.isfinite().all()
    assert lse.isfinite().all()
    view.new[0, 0, 50, 3] = math.nan  # head 0's key of query 50, which earlier ones do not see
    out, _ = attend_unsealed.attend(torch.randn(4, 100, 64).to(dtype), view, AttendOptions(0.125))
    assert out[:2, 50:].isnan().all()
    assert out[:2, :50].isfinite().all()
    assert out[2:].isfinite().all()


def test_large_logits_do_not_overflow() -> None:
    view = view_of("kivi4", 1, 64, torch.float32, (0, 20, 0, 70))
    out, lse = attend_unsealed.attend(torch.randn(2, 70, 64) * 1e4, view, AttendOptions(1.0))
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_the_largest_float16_values_stay_finite() -> None:
    layout = RecordLayout(get_format("kivi2"), LayerSpec(1, 64, torch.float16))
    v = torch.full((1, 1, BLOCK_TOKENS, 64), 65504.0).half()
    v[..., ::2] *= -1
    none = torch.zeros(2, 1, 0, 64).half()
    blocks = torch.tensor([0]), torch.tensor([128])
    view = KVView.of(layout, seal(torch.zeros_like(v), v, layout), blocks, (none, none), none)
    out, _ = attend_unsealed.attend(torch.randn(1, 70, 64).half(), view, AttendOptions(0.125))
    assert out.isfinite().all()
    assert (out.abs() > 0.9 * 65504).all()


def test_merge_is_attention_over_both() -> None:
    for dtype in MODEL_DTYPES:
        out, part = torch.randn(3, 2, 90, 48).unbind(1)
        lse, part_lse = torch.randn(3, 2, 90).mul(5).unbind(1)
        lse[0, :30], part_lse[0, 20:50] = -math.inf, -math.inf
        out[0, :30] = 0
        stored = part.to(dtype)
        both = torch.logaddexp(lse.double(), part_lse.double())
        safe = both.nan_to_num(neginf=0.0)
        want = out.double() * (lse.double() - safe).exp().unsqueeze(-1) + stored.double() * (
            part_lse.double() - safe
        ).exp().unsqueeze(-1)
        out = out.contiguous()
        lse = lse.contiguous()
        merge(out, lse, stored, part_lse)
        # exp of a difference of up to 25 that is rounded to 2^-24 of itself, twice; then two products and a sum
        assert (out.double() - want).abs().max() <= 60 * 2**-24 * 5
        assert torch.allclose(lse.double(), both, rtol=2**-22, atol=2**-22)


class Largest(TorchDispatchMode):
    """The bytes of the largest memory that any torch operation returned, `given` tensors' own not counted."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.given:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("window", [None, 3000])
def test_work_space_does_not_grow_with_the_context(window: int | None) -> None:
    sizes = []
    for blocks in (32, 80):
        view = view_of("kivi2", 2, 64, torch.bfloat16, (64, blocks, 30, 100))
        q = torch.randn(4, 100, 64).bfloat16()
        with Largest(q, view.records, view.sink, view.tail, view.new) as seen:
            attend_unsealed.attend(q, view, AttendOptions(0.125, window=window))
        sizes.append(seen.largest)
    scratch = 2 * 2 * attend_unsealed.MOST_TOKENS * 64 * 2
    assert sizes == [scratch, scratch]


def test_work_space_does_not_grow_with_the_heads() -> None:
    for heads, dim, dtype in ((1, 16, torch.float16), (8, 128, torch.bfloat16), (32, 256, torch.float32)):
        view = view_of("kivi2", heads, dim, dtype, (0, 0, 0, 0))
        tokens = attend_unsealed.run_tokens(view, dtype)
        assert tokens % BLOCK_TOKENS == 0
        assert attend_unsealed.FEWEST_TOKENS <= tokens <= attend_unsealed.MOST_TOKENS
        nbytes = 2 * heads * tokens * dim * dtype.itemsize
        assert nbytes <= attend_unsealed.SCRATCH_BYTES or tokens == attend_unsealed.FEWEST_TOKENS


def test_blocks_behind_the_window_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    real = attend_unsealed.unseal_numba.unseal_into

    def counted(records: torch.Tensor, ids: torch.Tensor, *rest: Any) -> None:
        read.append(len(ids))
        real(records, ids, *rest)

    monkeypatch.setattr(attend_unsealed.unseal_numba, "unseal_into", counted)
    view = view_of("kivi2", 1, 64, torch.float32, (64, 60, 0, 70))
    check(torch.randn(1, 70, 64), view, AttendOptions(0.125, window=300))
    assert sum(read) == 4, "299 keys before the first query: 37, 128, 128, and one of the next"
    read.clear()
    attend_unsealed.attend(torch.randn(1, 70, 64), view, AttendOptions(0.125, window=70))
    assert sum(read) == 2


def test_refusals_say_why() -> None:
    view, q = view_of("kivi2", 2, 64, torch.float32, (0, 1, 0, 0)), torch.randn(2, 70, 64)
    assert "soft-cap" in str(attend_unsealed.refusal(q, view, AttendOptions(1.0, softcap=5.0)))
    assert "no queries" in str(attend_unsealed.refusal(q[:, :0], view, AttendOptions(1.0)))
    odd = view_of("exact", 1, 24, torch.float32, (0, 1, 0, 0))
    assert "multiple of 16" in str(attend_unsealed.refusal(torch.randn(1, 70, 24), odd, AttendOptions(1.0)))


def test_the_door_picks_it_and_softcap_gets_the_reference() -> None:
    view = view_of("kivi4", 2, 64, torch.bfloat16, (64, 20, 30, 300))
    q = torch.randn(8, 300, 64).bfloat16()
    options = AttendOptions(0.125)
    assert torch.equal(ops.attend(q, view, options)[0], attend_unsealed.attend(q, view, options)[0])
    (row,) = [choice for choice in ops.explain() if "long prompts" in choice.op]
    assert row.implementation == "numba + flash"
    assert "soft-cap" in row.reason
    capped = AttendOptions(0.125, softcap=5.0)
    out, lse = ops.attend(q, view, capped)
    want, want_lse = reference(q, view, capped)
    assert torch.equal(out, want.bfloat16())
    assert torch.equal(lse, want_lse)


GENERIC = """
import importlib.util, torch
from qkv.kernels.vectors_llvm import has
assert not has("f16c")
spec = importlib.util.spec_from_file_location("cases", FILE)
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)
for dtype in cases.MODEL_DTYPES:
    cases.test_formats_shapes_and_dtypes("kivi3", 80, 3, dtype)
cases.test_merge_is_attention_over_both()
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
