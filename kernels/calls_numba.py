"""Which thread does which blocks of which sequence, and how their parts become one output. Compiled by numba.

A call is one sequence's attention: int64 numbers, `Call` by name. A task is one KV head of it and a run of its pieces
(at most 128 tokens each: exact tokens, then records, then exact tokens again).
"""

import math
from typing import NamedTuple

import numpy as np

from qkv.kernels.blocks_numba import (
    Side,
    hold_tiles,
    let_tiles_go,
    make_work,
    record_outputs,
    record_scores,
    softmax,
    start,
    token_outputs,
    token_scores,
)
from qkv.kernels.compiled import jit
from qkv.kernels.softmax_llvm import add_scaled, clear_bytes, get, narrow_row, peek, poke, put, scale_row
from qkv.spec import PIECE_TOKENS

PIECE = PIECE_TOKENS
IDS_A_RUN = 8 * 128 // PIECE  # bytes
TASK_FIELDS = 4  # call, KV head, first piece, behind its last


class Call(NamedTuple):
    """One sequence: addresses, sizes in tokens. New K and V [H, T, D], heads `stride` bytes apart."""

    q: int
    queries: int
    tokens: int
    records: int
    ids: int
    lengths: int
    blocks: int
    pieces: int  # of the model dtype [num_pieces, 2, H, 16, D]
    sink_ids: int
    sink: int
    tail_ids: int
    tail: int
    new_k: int
    new_v: int
    new_stride: int
    new: int
    out: int  # of q's dtype [H*G, Q, D]
    lse: int  # float32 [H*G, Q]; 0: not wanted


class Fixed(NamedTuple):
    """What all calls of a batch share."""

    heads: int
    group: int
    dim: int
    dtype: int
    record_bytes: int
    head_bytes: int
    precise: bool
    amx: bool
    window: int
    causal: bool
    q_dtype: int


CALL_FIELDS = len(Call._fields)


@jit
def _call(calls, index):
    """The index-th call."""
    p = calls + 8 * CALL_FIELDS * index
    return Call(
        peek(p, 0), peek(p, 1), peek(p, 2), peek(p, 3), peek(p, 4), peek(p, 5), peek(p, 6), peek(p, 7), peek(p, 8),
        peek(p, 9), peek(p, 10), peek(p, 11), peek(p, 12), peek(p, 13), peek(p, 14), peek(p, 15), peek(p, 16),
        peek(p, 17),
    )  # fmt: skip


@jit
def _fixed(p):
    return Fixed(
        peek(p, 0), peek(p, 1), peek(p, 2), peek(p, 3), peek(p, 4), peek(p, 5), peek(p, 6) != 0, peek(p, 7) != 0,
        peek(p, 8), peek(p, 9) != 0, peek(p, 10),
    )  # fmt: skip


@jit
def _side(p):
    return Side(
        peek(p, 0), peek(p, 1), peek(p, 2), peek(p, 3), peek(p, 4), peek(p, 5), peek(p, 6), peek(p, 7), peek(p, 8),
        peek(p, 9),
    )  # fmt: skip


@jit
def _pieces(call):
    return -(-call.sink // 128) + call.blocks + -(-call.tail // 128) + -(-call.new // 128)


@jit
def _work(rows, shared, k, v, base):
    groups, lines = (max(k.groups, 1), max(v.groups, 1)), shared.head_bytes // 64
    return make_work(rows, shared.dim, shared.dtype, shared.precise, shared.amx, groups[0], groups[1], lines, base)


@jit
def scratch_bytes(rows, fixed, k_side, v_side):
    """Bytes of work space that a thread needs for so many query rows a KV head."""
    shared, k, v = _fixed(fixed), _side(k_side), _side(v_side)
    return _work(rows, shared, k, v, 0).end


@jit
def count_pieces(calls, count):
    """Pieces of one KV head of all calls."""
    total = 0
    for index in range(count):
        total += _pieces(_call(calls, index))
    return total


@jit
def _put_task(tasks, index, call, head, first, last):
    place = tasks + 8 * TASK_FIELDS * index
    poke(place, 0, call)
    poke(place, 1, head)
    poke(place, 2, first)
    poke(place, 3, last)


@jit
def plan(calls, count, heads, threads, tasks, starts):
    """Writes tasks int64 [n, 4] and starts int64 [threads + 1], each thread's first task, to addresses; returns n.

    All pieces of all heads, in a row, are cut into equal parts; n is at most count * heads + threads - 1.
    """
    total = heads * count_pieces(calls, count)
    made, passed, thread = 0, 0, 1
    poke(starts, 0, 0)
    for index in range(count):
        pieces = _pieces(_call(calls, index))
        for head in range(heads):
            first = 0
            while thread < threads and passed + pieces - total * thread // threads > 0:
                cut = max(first, total * thread // threads - passed)
                if cut > first:
                    _put_task(tasks, made, index, head, first, cut)
                    made += 1
                poke(starts, thread, made)
                thread += 1
                first = cut
            if first < pieces or pieces == 0:
                _put_task(tasks, made, index, head, first, pieces)
                made += 1
            passed += pieces
    while thread <= threads:
        poke(starts, thread, made)
        thread += 1
    return made


@jit
def _exact_run(call, index):
    """Exact run `index` (at most 128 tokens): address of its piece ids (0: the tokens are new), first token of it among
    those of its kind, tokens, position. The sink's runs come first, then the tail's, then the new ones."""
    sinks, tails = -(-call.sink // 128), -(-call.tail // 128)
    if index < sinks:
        return call.sink_ids + IDS_A_RUN * index, 128 * index, min(128, call.sink - 128 * index), 128 * index
    index -= sinks
    if index < tails:
        first = call.tokens - call.new - call.tail + 128 * index
        return call.tail_ids + IDS_A_RUN * index, 128 * index, min(128, call.tail - 128 * index), first
    index -= tails
    return 0, 128 * index, min(128, call.new - 128 * index), call.tokens - call.new + 128 * index


@jit
def _exact_scores(call, shared, head, ids, first, tokens, work):
    """Scores of an exact run: piece by piece, or where the new tokens lie."""
    row = shared.dim * (4 if shared.dtype == 2 else 2)
    if not ids:
        token_scores(call.new_k + head * call.new_stride + first * row, tokens, 0, work)
        return
    for at in range(0, tokens, PIECE):
        piece = call.pieces + (2 * shared.heads * peek(ids, at // PIECE) + head) * PIECE * row
        token_scores(piece, min(PIECE, tokens - at), at, work)


@jit
def _exact_outputs(call, shared, head, ids, first, tokens, out, work):
    """As `_exact_scores`: softmax weights times the run's V."""
    row = shared.dim * (4 if shared.dtype == 2 else 2)
    if not ids:
        token_outputs(call.new_v + head * call.new_stride + first * row, tokens, 0, out, work)
        return
    for at in range(0, tokens, PIECE):
        piece = call.pieces + (2 * shared.heads * peek(ids, at // PIECE) + shared.heads + head) * PIECE * row
        token_outputs(piece, min(PIECE, tokens - at), at, out, work)


@jit
def _sealed_before(call, block):
    """Tokens of sink and blocks before this one; crops leave short blocks."""
    tokens = call.sink
    for i in range(block):
        tokens += peek(call.lengths, i)
    return tokens


@jit
def run(calls, tasks, starts, rows_most, fixed, k_side, v_side, scale, softcap, state, out, scratch):
    """Does one thread's tasks, to state float32 [n, rows_most, 2] (top, sum) and out float32 [n, rows_most, D]."""
    shared, k_kind, v_kind = _fixed(fixed), _side(k_side), _side(v_side)
    scale, softcap = np.float32(scale), np.float32(softcap)
    for task in range(peek(starts, 0), peek(starts, 1)):
        place = tasks + 8 * TASK_FIELDS * task
        call, head = _call(calls, peek(place, 0)), peek(place, 1)
        rows = shared.group * call.queries
        work = _work(rows, shared, k_kind, v_kind, scratch)
        ends, made = state + 8 * rows_most * task, out + 4 * rows_most * shared.dim * task
        clear_bytes(made, 4 * rows * shared.dim)
        for row in range(rows):
            put(ends, 2 * row, np.float32(-np.inf))
            put(ends, 2 * row + 1, np.float32(0))
        poke(work.cursor, 0, 0)
        poke(work.cursor, 1, 0)
        hold_tiles(work)
        width = shared.dim * (4 if shared.q_dtype == 2 else 2)
        start(call.q + head * rows * width, shared.q_dtype, scale, k_kind, work)
        _run_task(call, shared, k_kind, v_kind, (head, peek(place, 2), peek(place, 3)), softcap, ends, made, work)
        let_tiles_go(work)


@jit
def _run_task(call, shared, k_kind, v_kind, task, softcap, ends, made, work):
    head, first, last = task
    before, skip = -(-call.sink // 128), head * shared.head_bytes
    first_query = call.tokens - call.queries
    oldest = first_query - shared.window + 1 if shared.window else 0
    position, ids, place = _sealed_before(call, max(0, min(first - before, call.blocks))), 0, 0
    for piece in range(first, last):
        block = piece - before
        if 0 <= block < call.blocks:
            tokens, begin = peek(call.lengths, block), position
            position += tokens
            if begin + tokens <= oldest:
                continue  # all behind the first query's window
            part = call.records + peek(call.ids, block) * shared.record_bytes + skip
            if piece + 1 < last and block + 1 < call.blocks:
                following = call.records + peek(call.ids, block + 1) * shared.record_bytes + skip
                poke(work.cursor, 0, following)
                poke(work.cursor, 1, following + shared.head_bytes)
            if k_kind.scheme == 0:
                token_scores(part + k_kind.low, tokens, 0, work)
            else:
                record_scores(k_kind, part, work)
        else:
            part = 0
            ids, place, tokens, begin = _exact_run(call, piece if block < 0 else piece - call.blocks)
            if begin + tokens <= oldest:
                continue
            _exact_scores(call, shared, head, ids, place, tokens, work)
        if not softmax(
            shared.window, shared.causal, softcap, first_query, call.queries, tokens, begin, ends, made, work
        ):
            continue
        if not part:
            _exact_outputs(call, shared, head, ids, place, tokens, made, work)
        elif v_kind.scheme == 0:
            token_outputs(part + v_kind.low, tokens, 0, made, work)
        else:
            record_outputs(v_kind, part, made, work)


@jit
def _same_head(tasks, one, other):
    one, other = TASK_FIELDS * one, TASK_FIELDS * other
    return peek(tasks, one) == peek(tasks, other) and peek(tasks, one + 1) == peek(tasks, other + 1)


@jit
def merge(calls, tasks, count, rows_most, fixed, sinks, state, out):
    """The tasks of each head as one, into its call's output. sinks: float32 [H*G], keys of value zero, or 0."""
    shared = _fixed(fixed)
    task = 0
    while task < count:
        behind = task + 1
        while behind < count and _same_head(tasks, task, behind):
            behind += 1
        call, head = _call(calls, peek(tasks, TASK_FIELDS * task)), peek(tasks, TASK_FIELDS * task + 1)
        rows = shared.group * call.queries
        for row in range(rows):
            sink = np.float32(-np.inf)
            if sinks:
                sink = get(sinks, head * shared.group + row // call.queries)
            top = sink
            for i in range(task, behind):
                top = max(top, get(state, 2 * (rows_most * i + row)))
            whole = np.float32(0) if sink == -np.inf else np.float32(math.exp(sink - top))
            source = out + 4 * shared.dim * (rows_most * task + row)  # the first task's place takes the sum
            for i in range(task, behind):
                place = 2 * (rows_most * i + row)
                before, total = get(state, place), get(state, place + 1)
                fade = np.float32(1) if before == top else np.float32(math.exp(before - top))
                whole += total * fade
                if i > task:
                    add_scaled(out + 4 * shared.dim * (rows_most * i + row), fade, shared.dim, source)
                elif fade != 1:
                    scale_row(source, shared.dim, fade)
            if call.lse:
                put(call.lse, head * rows + row, top + np.float32(math.log(whole)))
            inverse = np.float32(1) / whole if whole != 0 else np.float32(1)
            width = shared.dim * (4 if shared.q_dtype == 2 else 2)
            narrow_row(source, inverse, shared.dim, call.out + width * (head * rows + row), shared.q_dtype)
        task = behind
