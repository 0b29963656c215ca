"""Attention against a float64 softmax over the dequantised values, for every shape of call."""

import itertools
import math

import pytest
import torch

from qkv.formats import get_format
from qkv.formats.record import seal, unseal
from qkv.kernels import attend_sdpa, attend_torch
from qkv.spec import BLOCK_TOKENS, AttendOptions, KVView, LayerSpec, RecordLayout


def view_of(
    name: str = "kivi2", heads: int = 2, dim: int = 64, sizes: tuple[int, int, int, int] = (64, 3, 70, 0)
) -> KVView:
    """sizes: sink tokens, blocks, tail tokens, new tokens. Block ids are out of order; the last block is cropped."""
    sink, blocks, tail, new = sizes
    layout = RecordLayout(get_format(name), LayerSpec(heads, dim, torch.float32))
    k, v = torch.randn(2, blocks, heads, BLOCK_TOKENS, dim)
    ids = torch.randperm(blocks + 2)[:blocks]
    records = torch.randint(0, 256, (blocks + 2, layout.record_bytes), dtype=torch.uint8)
    records[ids] = seal(k, v, layout)
    lengths = torch.full((blocks,), BLOCK_TOKENS)
    if blocks:
        lengths[-1] = 37

    def exact(tokens: int) -> torch.Tensor:
        return torch.randn(2, heads, tokens, dim)

    return KVView.of(layout, records, (ids, lengths), (exact(sink), exact(tail)), exact(new))


def oracle(q: torch.Tensor, view: KVView, o: AttendOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense float64 attention over what the view holds."""
    parts = [view.sink]
    for block_id, length in zip(view.block_ids.tolist(), view.block_lengths.tolist(), strict=True):
        pair = unseal(view.records[block_id : block_id + 1], view.layout)
        parts.append(torch.stack([side[0, :, :length] for side in pair]))
    k, v = torch.cat([*parts, view.tail, view.new], dim=2).double()
    group = q.shape[0] // k.shape[0]
    scores = q.double() @ k.repeat_interleave(group, 0).mT * o.scale
    if o.softcap is not None:
        scores = o.softcap * torch.tanh(scores / o.softcap)
    tokens, queries = k.shape[1], q.shape[1]
    distance = torch.arange(tokens - queries, tokens).unsqueeze(1) - torch.arange(tokens)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if o.causal:
        hidden |= distance < 0
    if o.window is not None:
        hidden |= distance >= o.window
    scores = scores.masked_fill(hidden, -math.inf)
    if o.sinks is not None:
        scores = torch.cat([scores, o.sinks.double().view(-1, 1, 1).expand(-1, queries, 1)], dim=-1)
    return scores.softmax(-1)[..., :tokens] @ v.repeat_interleave(group, 0), scores.logsumexp(-1)


def close(q: torch.Tensor, view: KVView, o: AttendOptions) -> None:
    out, lse = attend_torch.attend(q, view, o, lambda rows: unseal(rows, view.layout))
    want, want_lse = oracle(q, view, o)
    # float32: a score is a sum of D products (relative D * eps of their magnitudes), a weight e^score inherits the
    # score's absolute error, and the output is a weighted mean of values of order 1
    largest = float((q.double().norm(dim=-1).max() * 12) * o.scale)
    bound = 2**-23 * (q.shape[-1] + math.log2(view.tokens + 1)) * max(1.0, largest)
    assert (out.double() - want).abs().max() <= bound * max(1.0, float(want.abs().max()))
    assert (lse.double() - want_lse).abs().max() <= bound * max(1.0, float(want_lse.abs().max()))


@pytest.mark.parametrize(("name", "dim"), list(itertools.product(["exact", "kivi2", "kivi3", "int8"], [64, 80, 256])))
def test_formats_and_head_dims(name: str, dim: int) -> None:
    close(torch.randn(6, 3, dim), view_of(name, dim=dim), AttendOptions(dim**-0.5))


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("queries", [1, 2, 7, 130])
def test_groups_and_query_counts(group: int, queries: int) -> None:
    close(torch.randn(2 * group, queries, 64), view_of(), AttendOptions(0.125))


@pytest.mark.parametrize("window", [1, 5, 100, 300, 10_000, None])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_masks_softcap_and_sinks(window: int | None, softcap: float | None, sinks: bool) -> None:
    options = AttendOptions(0.3, True, window, softcap, torch.randn(4) * 3 if sinks else None)
    close(torch.randn(4, 9, 64), view_of(sizes=(64, 2, 30, 9)), options)


@pytest.mark.parametrize(
    "sizes", [(0, 0, 1, 0), (0, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, 0), (0, 9, 0, 600), (64, 20, 191, 1), (0, 0, 0, 1100)]
)
def test_any_part_may_be_missing(sizes: tuple[int, int, int, int]) -> None:
    queries = max(1, sizes[3])
    close(torch.randn(4, queries, 64), view_of(sizes=sizes), AttendOptions(0.125))


def test_not_causal_and_large_logits() -> None:
    close(torch.randn(4, 5, 64), view_of(), AttendOptions(0.125, causal=False))
    close(torch.randn(4, 5, 64) * 30, view_of(), AttendOptions(1.0))


def test_no_queries_and_no_keys() -> None:
    view = view_of(sizes=(0, 0, 0, 0))
    out, lse = attend_torch.attend(
        torch.zeros(4, 0, 64), view, AttendOptions(1.0), lambda rows: unseal(rows, view.layout)
    )
    assert out.shape == (4, 0, 64)
    assert lse.shape == (4, 0)


def run(q: torch.Tensor, view: KVView, **options: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rules = AttendOptions(0.125, **options)  # type: ignore[arg-type]  # only booleans are passed
    return attend_torch.attend(q, view, rules, lambda rows: unseal(rows, view.layout))


def test_a_query_that_sees_nothing_is_zero() -> None:
    view = view_of(sizes=(0, 0, 0, 0))
    out, lse = run(torch.randn(4, 3, 64), view, causal=False)
    assert (out == 0).all()
    assert torch.isneginf(lse).all()


def test_nan_stays_visible() -> None:
    view = view_of()
    q = torch.randn(4, 2, 64)
    q[1, 0, 5] = math.nan
    out, lse = run(q, view)
    assert torch.isnan(out[1, 0]).all()
    assert torch.isnan(lse[1, 0])
    assert torch.isfinite(out[[0, 2, 3]]).all()
    assert torch.isfinite(out[1, 1]).all()


@pytest.mark.parametrize("name", ["kivi2", "kivi4", "int8", "fp8_e4m3"])
def test_the_largest_float16_values_stay_finite(name: str) -> None:
    layout = RecordLayout(get_format(name), LayerSpec(1, 64, torch.float16))
    largest = torch.finfo(torch.float16).max
    v = torch.full((1, 1, BLOCK_TOKENS, 64), largest, dtype=torch.float16)
    v[..., ::2] *= -1
    none = torch.zeros(2, 1, 0, 64, dtype=torch.float16)
    records = seal(torch.zeros_like(v), v, layout)
    view = KVView.of(layout, records, (torch.tensor([0]), torch.tensor([BLOCK_TOKENS])), (none, none), none)
    out, _ = run(torch.randn(1, 1, 64).half(), view)
    assert torch.isfinite(out).all()
    assert (out.abs() > 0.9 * largest).all()


def test_dense_kv_exists_for_one_piece_only() -> None:
    view = view_of(sizes=(64, 40, 70, 0))
    seen = []

    def counted(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(len(rows))
        return unseal(rows, view.layout)

    attend_torch.attend(torch.randn(4, 1, 64), view, AttendOptions(0.125), counted)
    assert sum(seen) == 40
    assert max(seen) <= attend_torch.PIECE_BLOCKS
    seen.clear()
    attend_torch.attend(torch.randn(4, 1, 64), view, AttendOptions(0.125, window=200), counted)
    assert sum(seen) <= attend_torch.PIECE_BLOCKS, "blocks behind the window must not be read"


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("queries", [1, 50, 200])
def test_sdpa_equals_the_reference(window: int | None, queries: int) -> None:
    view = view_of(sizes=(0, 0, 0, 200))
    q, options = torch.randn(8, queries, 64), AttendOptions(0.125, window=window)
    assert attend_sdpa.refusal(q, view, options) is None
    want, _ = oracle(q, view, options)
    assert (attend_sdpa.attend(q, view, options) - want).abs().max() < 2**-23 * 80 * 4


def test_sdpa_refuses_what_it_cannot_do() -> None:
    q = torch.randn(4, 1, 64)
    stored, new = view_of(), view_of(sizes=(0, 0, 0, 5))
    assert attend_sdpa.refusal(q, stored, AttendOptions(1.0)) is not None
    assert attend_sdpa.refusal(q, new, AttendOptions(1.0, softcap=3.0)) is not None
    assert attend_sdpa.refusal(q, new, AttendOptions(1.0, sinks=torch.zeros(4))) is not None
