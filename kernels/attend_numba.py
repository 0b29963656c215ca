"""Attention over records on the CPU, fused: codes are multiplied as they lie, dense K and V never exist.

For few query rows (decode, verify). One task is one KV head and a run of blocks; its state (maximum, sum, output) is
merged with the others' at the end, so heads and context are split over threads without a reduction inside.

A block, for every query row, with c the codes and c0 their middle (affine: x = s (c - c0) + (z + s c0)):
    K  score_t = a (sum_d w_d c_td - c0 sum_d w_d) + sum_d q_d (z_d + s_d c0),   w = round(q s / a)
    V  out_d  += a (sum_t w_t c_td - c0 sum_t w_t) + sum_t p_t (z_t + s_t c0),   w = round(p s / a)
Measuring codes from the middle bounds the rounding error by half the group's range whatever the keys' offset is
(Qwen2.5's key biases are 50 times the rest). Both terms in c use the same rounded w; the offset term is float32.
w is a pair of int8, 128 high + low: one byte costs 1 % of the output on real keys, two cost 0.02 %, and the second
byte's dots share the unpacking. `precise` keeps w in float32.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch

from qkv.kernels.blocks_numba import AFFINE, RAW, SCALED, Side, Work, run_tasks
from qkv.kernels.tiles_llvm import CODE_KINDS, has_vnni
from qkv.spec import BLOCK_TOKENS, AttendOptions, KVView, LayerSpec, RecordLayout, SideSpec

MOST_ROWS = 64  # query rows (G * Q) of one KV head
DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_FEWEST_BLOCKS = 16  # a task smaller than this costs more to hand over than it saves


@cache
def _sides(layout: RecordLayout) -> tuple[Side, Side]:
    """K's and V's numbers for the compiled code."""
    return _side("k", layout.format.k, layout), _side("v", layout.format.v, layout)


def _side(prefix: str, side: SideSpec, layout: RecordLayout) -> Side:
    """One side's numbers for the compiled code."""
    if side.scheme == "raw":
        return Side(RAW, layout.fields[f"{prefix}_codes"].offset, 0, 0, 0, 0, 0, 0, 0, 0.0)
    offsets = [layout.fields[f"{prefix}_codes_{i}"].offset for i in range(len(side.planes))]
    bits = 10 * side.planes[1] + side.planes[0] if len(side.planes) > 1 else side.planes[0]
    scale = layout.fields[f"{prefix}_scale"]
    if side.scheme == "scaled":
        kind = CODE_KINDS.index(side.id) if side.id in CODE_KINDS else 0
        lanes = BLOCK_TOKENS if prefix == "k" else layout.layer.head_dim
        return Side(SCALED, offsets[0], offsets[-1], bits, kind, scale.offset, 0, lanes, 1, 0.0 if kind else 128.0)
    zero, middle = layout.fields[f"{prefix}_zero"].offset, ((1 << side.bits) - 1) / 2
    return Side(AFFINE, offsets[0], offsets[-1], bits, 0, scale.offset, zero, side.group, scale.shape[0], middle)


def _items(view: KVView) -> Any:
    """int64 [n, 6], at most 128 tokens each: is a record, head 0's K and V address, bytes a head, tokens, position."""
    lengths = view.block_lengths.numpy()
    records = np.empty((len(lengths), 6), np.int64)
    ends = view.sink.shape[2] + lengths.cumsum()
    records[:, 0] = 1
    records[:, 1] = view.records.data_ptr() + view.block_ids.numpy() * view.layout.record_bytes
    records[:, 2], records[:, 3] = records[:, 1], view.layout.head_bytes
    records[:, 4], records[:, 5] = lengths, ends - lengths
    behind = view.stored_tokens - view.tail.shape[2]
    exact = [_exact_items(view.sink, 0), _exact_items(view.tail, behind), _exact_items(view.new, view.stored_tokens)]
    return np.concatenate([exact[0], records, exact[1], exact[2]])


def _exact_items(piece: torch.Tensor, position: int) -> Any:
    """As `_items`, for exact K and V [2, H, T, D]."""
    width, token = piece.element_size(), piece.shape[3] * piece.element_size()
    k, v = piece.data_ptr(), piece.data_ptr() + piece.stride(0) * width
    rows = [
        (0, k + first * token, v + first * token, piece.stride(1) * width, min(BLOCK_TOKENS, piece.shape[2] - first),
         position + first)
        for first in range(0, piece.shape[2], BLOCK_TOKENS)
    ]  # fmt: skip
    return np.array(rows, dtype=np.int64).reshape(-1, 6)


def _work(rows: int, layer: LayerSpec, precise: bool) -> tuple[Work, list[Any]]:
    """A work space, and the arrays that its addresses belong to."""
    width = max(BLOCK_TOKENS, layer.head_dim)
    arrays: list[Any] = [
        np.zeros((2, width), np.float32),
        np.zeros((rows, width), np.float32),
        np.zeros((rows, 2, width), np.int8),
        np.zeros((rows, 2), np.float32),
        np.zeros((rows, BLOCK_TOKENS), np.float32),
    ]
    places = [array.ctypes.data for array in arrays]
    return Work(rows, layer.head_dim, width, DTYPES[layer.dtype], precise, *places), arrays


@cache
def _workers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="qkv-attend")


# threads do not survive a fork: a child that kept the executor would wait for them for ever
if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_workers.cache_clear)


def instructions() -> str:
    """What the dot products compile to here, for a person."""
    return "AVX512-VNNI dot products" if has_vnni() else "generic vector code: no AVX512-VNNI here"


def refusal(q: torch.Tensor, view: KVView) -> str | None:
    """Why this call cannot be served here; None if it can."""
    layer = view.layout.layer
    if layer.device.type != "cpu":
        return f"the K and V are on {layer.device}"
    if not q.shape[1]:
        return "there are no queries"
    if layer.head_dim % 16:
        return "head_dim is not a multiple of 16"
    if (rows := q.shape[0] // layer.kv_heads * q.shape[1]) > MOST_ROWS:
        return f"{rows} query rows a KV head are more than {MOST_ROWS}: the dense tiles of the reference are faster"
    return None


def attend(q: torch.Tensor, view: KVView, options: AttendOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """q [H*G, Q, D], the last Q positions of the view -> out [H*G, Q, D] in q's dtype, log-sum-exp float32 [H*G, Q].

    A query that sees no key gets 0 and -inf. Allocates; mutates nothing. Runs on torch.get_num_threads() threads.
    """
    layer = view.layout.layer
    (query_heads, queries, dim), heads = q.shape, layer.kv_heads
    rows = query_heads // heads * queries
    scaled = (q.float() * options.scale).reshape(heads, rows, dim).contiguous()
    items = _items(view)
    sides = _sides(view.layout)
    precise = options.precise or any(side.kind for side in sides)
    tasks, threads = _split(len(items), heads)
    state = np.zeros((len(tasks), rows, 2), np.float32)
    state[..., 0] = -np.inf
    out = np.zeros((len(tasks), rows, dim), np.float32)
    rules = (options.window or 0, options.causal, np.float32(options.softcap or 0), view.tokens - queries, queries)

    def run(index: int) -> None:
        work, arrays = _work(rows, layer, precise)
        own = np.ascontiguousarray(tasks[index::threads])
        run_tasks(own, items, scaled.data_ptr(), *sides, rules, state.ctypes.data, out.ctypes.data, work)
        del arrays  # held until here

    others = [_workers(threads - 1).submit(run, index) for index in range(1, threads)]
    run(0)
    for other in others:
        other.result()
    merged, lse = _merge(state, out, heads, options)
    made = torch.from_numpy(merged).view(query_heads, queries, dim).to(q.dtype)
    return made, torch.from_numpy(lse).view(query_heads, queries)


def _split(items: int, heads: int) -> tuple[np.ndarray[Any, Any], int]:
    """Tasks int64 [n, 4] and the threads to run them on. The context is split only when heads are too few."""
    threads = max(1, min(torch.get_num_threads(), heads * items // _FEWEST_BLOCKS))
    pieces = 1 if heads % threads == 0 else min(threads, max(1, items))
    cuts = [items * i // pieces for i in range(pieces + 1)]
    tasks = [(head, cuts[i], cuts[i + 1], head * pieces + i) for head in range(heads) for i in range(pieces)]
    return np.array(tasks, dtype=np.int64), threads


def _merge(state: Any, out: Any, heads: int, options: AttendOptions) -> tuple[Any, Any]:
    """The pieces of each head as one: out [H, rows, D], log-sum-exp [H, rows]. A sink logit is a key of value zero."""
    rows, dim = out.shape[1:]
    if options.sinks is None and len(state) == heads:
        whole, safe = state[..., 1], np.where(state[..., 1] == 0, np.float32(1), state[..., 1])
        with np.errstate(divide="ignore"):
            return out / safe[..., None], state[..., 0] + np.log(whole)
    state, out = state.reshape(heads, -1, rows, 2), out.reshape(heads, -1, rows, dim)
    highest, total = state[..., 0], state[..., 1]
    top = highest.max(1)
    if options.sinks is not None:
        logits = options.sinks.detach().float().numpy().reshape(heads, -1)
        sinks = np.repeat(logits, rows // logits.shape[1], axis=1)
        top = np.maximum(top, sinks)
    finite = np.where(np.isneginf(top), np.float32(0), top)
    weight = np.exp(highest - finite[:, None])
    whole = (total * weight).sum(1)
    if options.sinks is not None:
        whole += np.exp(sinks - finite)
    summed = out[:, 0] * weight[:, 0, :, None] if out.shape[1] == 1 else (out * weight[..., None]).sum(1)
    summed /= np.where(whole == 0, np.float32(1), whole)[..., None]
    with np.errstate(divide="ignore"):
        return summed, top + np.log(whole)
