"""Attention over records on the CPU, fused: codes are multiplied as they lie, dense K and V never exist.

For few query rows (decode, verify), of one sequence or of many in one call. One task is one KV head of a sequence and a
run of blocks; its state (maximum, sum, output) is merged with the others' at the end, so sequences, heads and context
are split over threads without a reduction inside.

A block, for every query row, with c the codes and c0 their middle (affine: x = s (c - c0) + (z + s c0)):
    K  score_t = a (sum_d w_d c_td - c0 sum_d w_d) + sum_d q_d (z_d + s_d c0),   w = round(q s / a)
    V  out_d  += a (sum_t w_t c_td - c0 sum_t w_t) + sum_t p_t (z_t + s_t c0),   w = round(p s / a)
Measuring codes from the middle bounds the rounding error by half the group's range whatever the keys' offset is
(Qwen2.5's key biases are 50 times the rest). Both terms in c use the same rounded w; the offset term is float32.
w is a pair of int8, 128 high + low: one byte costs 1 % of the output on real keys, two cost 0.02 %, and the second
byte's dots share the unpacking. `precise` keeps w in float32.
"""

import threading
import weakref
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch

from qkv.kernels import amx_llvm, calls_numba
from qkv.kernels.blocks_numba import AFFINE, RAW, SCALED, Side
from qkv.kernels.threads import share, threads_for
from qkv.kernels.tiles_llvm import CODE_KINDS, has_vnni
from qkv.spec import BLOCK_TOKENS, AttendOptions, KVView, RecordLayout, SideSpec

Attended = tuple[torch.Tensor, torch.Tensor | None]  # out, log-sum-exp
_RECORDS, _PIECES, _NEW, _OUT = map(calls_numba.Call._fields.index, ("records", "pieces", "new_k", "out"))
MOST_ROWS = 128  # query rows (G * Q) of one KV head; from 170 (bfloat16) on, decoding blocks first is faster
DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_FEWEST_PIECES = 16  # a thread with less to do costs more to wake than it saves


@cache
def _fixed(
    layout: RecordLayout, group: int, q_dtype: int, rules: tuple[bool, int, bool], amx: bool
) -> tuple[tuple[int, int, int], list[Any]]:
    """For the compiled code: addresses of calls_numba.Fixed, K's Side and V's Side, and the arrays that hold them.

    rules: precise, window, causal.
    """
    sides = [_side("k", layout.format.k, layout), _side("v", layout.format.v, layout)]
    precise = rules[0] or any(side.kind for side in sides)
    layer = layout.layer
    shared = calls_numba.Fixed(
        layer.kv_heads, group, layer.head_dim, DTYPES[layer.dtype], layout.record_bytes, layout.head_bytes, precise,
        amx and not precise, *rules[1:], q_dtype,
    )  # fmt: skip
    arrays = [np.array(numbers, dtype=np.int64) for numbers in (shared, *sides)]
    return (arrays[0].ctypes.data, arrays[1].ctypes.data, arrays[2].ctypes.data), arrays


def _side(prefix: str, side: SideSpec, layout: RecordLayout) -> Side:
    """One side's numbers for the compiled code."""
    if side.scheme == "raw":
        return Side(RAW, layout.fields[f"{prefix}_codes"].offset, 0, 0, 0, 0, 0, 0, 0, 0)
    offsets = [layout.fields[f"{prefix}_codes_{i}"].offset for i in range(len(side.planes))]
    bits = 10 * side.planes[1] + side.planes[0] if len(side.planes) > 1 else side.planes[0]
    places = offsets[0], offsets[-1], bits
    scale = layout.fields[f"{prefix}_scale"]
    if side.scheme == "scaled":
        kind = CODE_KINDS.index(side.id) if side.id in CODE_KINDS else 0
        lanes = BLOCK_TOKENS if prefix == "k" else layout.layer.head_dim
        return Side(SCALED, *places, kind, scale.offset, 0, lanes, 1, 0 if kind else 256)
    zero, middle = layout.fields[f"{prefix}_zero"].offset, (1 << side.bits) - 1
    return Side(AFFINE, *places, 0, scale.offset, zero, side.group, scale.shape[0], middle)


class _Held:
    """The work space of one thread: sizes, addresses and memory by purpose."""

    def __init__(self) -> None:
        self.by_purpose: dict[str, tuple[int, int, Any]] = {}


_every_held: "weakref.WeakSet[_Held]" = weakref.WeakSet()


class _Scratch(threading.local):
    """Work space of one thread by purpose, allocated once and grown."""

    def __init__(self) -> None:
        self.held = _Held()
        _every_held.add(self.held)

    def address(self, purpose: str, size: int) -> int:
        """At least `size` bytes, at a multiple of 64."""
        held = self.held.by_purpose.get(purpose)
        if held is None or held[0] < size:
            # zeros: stale bytes may be read as float, and a NaN among them would not stay unread
            memory = np.zeros(size + 64, np.uint8)
            held = self.held.by_purpose[purpose] = (size, -(-memory.ctypes.data // 64) * 64, memory)
        return held[1]


_scratch = _Scratch()


def workspace() -> int:
    """Bytes of work space that threads keep between calls."""
    return sum(size + 64 for held in list(_every_held) for size, _, _ in list(held.by_purpose.values()))


def instructions() -> str:
    """What the dot products compile to here, for a person."""
    if amx_llvm.has_amx():
        return "AMX tiles"
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
        return f"{rows} query rows a KV head are more than {MOST_ROWS}: dense tiles are faster"
    return None


def attend(q: torch.Tensor, view: KVView, options: AttendOptions) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q [H*G, Q, D], the last Q positions of the view -> out [H*G, Q, D] in q's dtype, log-sum-exp float32 [H*G, Q].

    A query that sees no key gets 0 and -inf. Allocates; mutates nothing. Runs on torch.get_num_threads() threads.
    """
    return attend_many([q], [view], options)[0]


class _Plan:
    """How one step's calls are cut over threads: the same in every layer, for the same tables mean the same lengths.

    Holds calls_numba.Call of every sequence; `aim` sets what differs from layer to layer.
    """

    def __init__(self, queries: Sequence[torch.Tensor], views: Sequence[KVView], options: AttendOptions) -> None:
        layout, first = views[0].layout, queries[0]
        heads, self.dim, self.dtype = layout.layer.kv_heads, first.shape[2], first.dtype
        self.layout, self.group, self.options = layout, first.shape[0] // heads, options
        self.tables = [view.table for view in views]  # held, so that no other table can take the identity of one
        self.counts = [(q.shape[1], view.new.shape[2]) for q, view in zip(queries, views, strict=True)]
        self.most_threads, self.amx = torch.get_num_threads(), amx_llvm.has_amx()
        rules = options.precise, options.window or 0, options.causal
        self.fixed, self._held = _fixed(layout, self.group, DTYPES[self.dtype], rules, self.amx)
        self.calls = array("q", chain.from_iterable(map(_places, queries, views)))
        self.at, count = self.calls.buffer_info()
        count //= calls_numba.CALL_FIELDS
        self.rows = self.group * max(q.shape[1] for q in queries)
        self.threads = threads_for(heads * calls_numba.count_pieces(self.at, count), _FEWEST_PIECES)
        self.most = count * heads + self.threads - 1
        self._table = np.zeros(calls_numba.TASK_FIELDS * self.most + self.threads + 1, np.int64)
        self.tasks = self._table.ctypes.data
        self.starts = self.tasks + 8 * calls_numba.TASK_FIELDS * self.most
        self.planned = calls_numba.plan(self.at, count, heads, self.threads, self.tasks, self.starts)
        self.size = calls_numba.scratch_bytes(self.rows, *self.fixed)

    def fits(self, queries: Sequence[torch.Tensor], views: Sequence[KVView], options: AttendOptions) -> bool:
        """Whether these calls differ from the planned ones in addresses, scale, soft-cap and sinks only."""
        q, own = queries[0], self.options
        return (
            len(views) == len(self.tables)
            and (views[0].layout is self.layout or views[0].layout == self.layout)
            and (q.dtype, q.shape[0]) == (self.dtype, self.group * self.layout.layer.kv_heads)
            and (
                options is own
                or (options.precise, options.window, options.causal) == (own.precise, own.window, own.causal)
            )
            and all(view.table is table for view, table in zip(views, self.tables, strict=True))
            and all(
                (q.shape[1], view.new.shape[2]) == n for q, view, n in zip(queries, views, self.counts, strict=True)
            )
            and (torch.get_num_threads(), amx_llvm.has_amx()) == (self.most_threads, self.amx)
        )

    def aim(self, queries: Sequence[torch.Tensor], views: Sequence[KVView], made: list[Attended]) -> None:
        """The addresses of one layer."""
        calls, at = self.calls, 0
        for q, view, (out, lse) in zip(queries, views, made, strict=True):
            new = view.new
            calls[at], calls[at + _RECORDS], calls[at + _PIECES] = (
                q.data_ptr(), view.records.data_ptr(), view.pieces.data_ptr()
            )  # fmt: skip
            if new.shape[2]:
                k, width, (side, head) = new.data_ptr(), new.element_size(), new.stride()[:2]
                calls[at + _NEW], calls[at + _NEW + 1], calls[at + _NEW + 2] = k, k + side * width, head * width
            calls[at + _OUT], calls[at + _OUT + 1] = out.data_ptr(), 0 if lse is None else lse.data_ptr()
            at += calls_numba.CALL_FIELDS


def _places(q: torch.Tensor, view: KVView) -> tuple[int, ...]:
    """calls_numba.Call, as plain numbers; `aim` fills in what is 0."""
    table = view.table
    ids = table.block_ids
    return (
        0, q.shape[1], view.tokens, 0, ids.data_ptr(), table.block_lengths.data_ptr(), len(ids), 0,
        table.sink_ids.data_ptr(), table.sink_tokens, table.tail_ids.data_ptr(), table.tail_tokens,
        0, 0, 0, view.new.shape[2], 0, 0,
    )  # fmt: skip


_plans = threading.local()


def attend_many(
    queries: Sequence[torch.Tensor], views: Sequence[KVView], options: AttendOptions, need_lse: bool = True
) -> list[Attended]:
    """As `attend`, for many sequences of one layer in one go: lengths and query counts may differ.

    Calls one after the other over the same tables (the layers of a step) are planned once.
    """
    plan: _Plan | None = getattr(_plans, "last", None)
    if plan is None or not plan.fits(queries, views, options):
        plan = _plans.last = _Plan(queries, views, options)
    queries = [q.contiguous() for q in queries]
    made: list[Attended] = [(torch.empty_like(q), torch.empty(q.shape[:2]) if need_lse else None) for q in queries]
    plan.aim(queries, views, made)
    space, rows, fixed = _scratch.address, plan.rows, plan.fixed
    state, out = space("state", 8 * rows * plan.most), space("out", 4 * rows * plan.dim * plan.most)
    numbers = float(options.scale), float(options.softcap or 0)
    if plan.threads == 1:
        own = space("work", plan.size)
        calls_numba.run(plan.at, plan.tasks, plan.starts, rows, *fixed, *numbers, state, out, own)
    else:

        def run(thread: int) -> None:
            own = _scratch.address("work", plan.size)  # of the thread that runs this
            calls_numba.run(plan.at, plan.tasks, plan.starts + 8 * thread, rows, *fixed, *numbers, state, out, own)

        share(run, plan.threads)
    sinks = None if options.sinks is None else options.sinks.detach().float().contiguous()
    logits = 0 if sinks is None else sinks.data_ptr()
    calls_numba.merge(plan.at, plan.tasks, plan.planned, rows, fixed[0], logits, state, out)
    return made
