"""torch's attention over dense K and V, called in every way that might be fastest; trying tells which is.

dtype   the model's, or float32
layout  gqa       one K and V head for a group of queries, `enable_gqa`
        expanded  K and V copied for every query head
        rows      the queries of a group as rows of one head: [1, H, G*Q, D]
        matmul    by hand: matmul, softmax, matmul, a KV head at a time
        split     long chunks: what is stored without a mask, the chunk causal, merged by their log-sum-exps
All are causal: q is the last Q positions. Tensors are made before the clock starts, in the layout the call wants.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from qkv.bench import oracle
from qkv.bench.timing import Stats, interleave

Call = Callable[[], torch.Tensor]
SPLIT_FROM = 32  # queries
MOST_ERROR = 5e-3  # what qkv's own rounding may cost; matmul with bfloat16 scores costs twice that


@dataclass(frozen=True)
class Problem:
    """q [H*G, Q, D] over k, v [H, T, D], the last Q tokens of which are the queries' own."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float


def layouts(queries: int) -> tuple[str, ...]:
    """The layouts worth trying for that many queries."""
    return ("gqa", "expanded", "rows", "split") if queries >= SPLIT_FROM else ("gqa", "expanded", "rows", "matmul")


def prepare(problem: Problem, dtype: torch.dtype, layout: str) -> Call:
    """A call that gives out [H*G, Q, D] in `dtype`; it owns copies of K and V."""
    heads, tokens, dim = problem.k.shape
    query_heads, queries, _ = problem.q.shape
    group, scale = query_heads // heads, problem.scale
    q, k, v = (x.to(dtype, copy=True).unsqueeze(0) for x in (problem.q, problem.k, problem.v))
    later = torch.arange(tokens) > torch.arange(tokens - queries, tokens).unsqueeze(1)
    mask = None if queries == 1 else torch.zeros(queries, tokens, dtype=dtype).masked_fill_(later, float("-inf"))
    if layout == "expanded":
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        return lambda: sdpa(q, k, v, attn_mask=mask, scale=scale)[0]
    if layout == "gqa":
        return lambda: sdpa(q, k, v, attn_mask=mask, scale=scale, enable_gqa=group > 1)[0]
    rows = q.view(1, heads, group * queries, dim)
    tiled = None if mask is None else mask.repeat(group, 1)
    if layout == "rows":
        return lambda: sdpa(rows, k, v, attn_mask=tiled, scale=scale)[0].reshape(query_heads, queries, dim)
    if layout == "matmul":
        return partial(_by_hand, rows[0] * scale, k[0], v[0], tiled, (query_heads, queries, dim))
    assert layout == "split", layout
    return partial(_split, q, k, v, scale)


def _by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, shape: tuple[int, int, int]
) -> torch.Tensor:
    scores = torch.matmul(q, k.mT)
    if mask is not None:
        scores += mask
    return torch.matmul(scores.softmax(-1), v).reshape(shape)


def _split(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [1, H*G, Q, D]; k, v [1, H, T, D]. The rows of a group are folded for the stored part, which has no mask."""
    (_, heads, tokens, dim), (_, query_heads, queries, _) = k.shape, q.shape
    stored, group = tokens - queries, query_heads // heads
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    rows = q.view(1, heads, group * queries, dim)
    far, far_lse = flash(rows, k[:, :, :stored], v[:, :, :stored], scale=scale)
    own_k, own_v = (x[:, :, stored:].repeat_interleave(group, dim=1) for x in (k, v))
    near, near_lse = flash(q, own_k, own_v, is_causal=True, scale=scale)
    weight = torch.sigmoid(far_lse.reshape(1, query_heads, queries) - near_lse.reshape(1, query_heads, queries))
    far = far.reshape(1, query_heads, queries, dim)
    merged: torch.Tensor = torch.lerp(near.float(), far.float(), weight.unsqueeze(-1).float())
    return merged[0].to(q.dtype)


def candidates(problem: Problem) -> list[tuple[torch.dtype, str]]:
    """Every (dtype, layout) for this problem, the model's dtype first."""
    dtypes = dict.fromkeys((problem.k.dtype, torch.float32))
    one_to_one = problem.q.shape[0] == problem.k.shape[0]
    skip = {"expanded", "rows"} if one_to_one else set()  # equal to gqa then
    if problem.k.shape[1] == problem.q.shape[1]:
        skip.add("split")  # nothing is stored
    return [(dtype, layout) for dtype in dtypes for layout in layouts(problem.q.shape[1]) if layout not in skip]


def label(dtype: torch.dtype, layout: str) -> str:
    """As rows name it: `sdpa gqa bfloat16`."""
    return f"sdpa {layout} {str(dtype).removeprefix('torch.')}"


def fastest(
    problem: Problem, wanted: torch.Tensor, before: Callable[[str], object] | None, rounds: int = 4, keep: int = 2
) -> list[tuple[torch.dtype, str]]:
    """The `keep` fastest of all candidates that come within MOST_ERROR of `wanted`, the exact result.

    By their medians over some rounds; all are in memory at once.
    """
    calls = {pair: prepare(problem, *pair) for pair in candidates(problem)}
    calls = {pair: call for pair, call in calls.items() if oracle.relative_l2(call(), wanted) <= MOST_ERROR}
    named = {label(*pair): call for pair, call in calls.items()}
    times = interleave(named, rounds, warmup=1, before=before)
    return sorted(calls, key=lambda pair: Stats.of(times[label(*pair)]).median)[:keep]
