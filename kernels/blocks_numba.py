"""The compiled loops of attend_numba: one KV head's records and exact tokens, for a few query rows.

Addresses instead of arrays throughout: numba counts references of arrays atomically at every call, which costs more
than the arithmetic of a block. Not type-checked: numba compiles it, and what it calls has no Python body.
"""

import math
from typing import NamedTuple

import numba
import numpy as np

from qkv.kernels.rows_llvm import (
    exact_outputs,
    exact_scores,
    exp_below,
    fold_bytes,
    fold_floats,
    get,
    multiply_row,
    prefetch,
    put,
    read_meta,
    row_max,
    scale_row,
)
from qkv.kernels.tiles_llvm import tile_row, tile_row_float

MOST_QUERIES = 4  # query rows that share one unpacking
RAW, AFFINE, SCALED = 0, 1, 2  # Side.scheme
# no fast-math: a NaN must stay visible, and what is worth vectorising is written as vectors already
_jit = numba.njit(cache=True, nogil=True, error_model="numpy")


class Side(NamedTuple):
    """K, or V, of a record as numbers: offsets in a head's part, bits (10 * high plane + low plane), middle code.

    numba's cache on disk names this class and `Work`: a release that removes or renames one must clear old caches.
    """

    scheme: int
    low: int
    high: int
    bits: int
    kind: int
    scale: int
    zero: int
    group: int
    groups: int
    middle: float


class Work(NamedTuple):
    """Addresses of one thread's work space (reference counts of arrays would cost more than the arithmetic).

    Sizes depend on rows and head_dim, never on the context. width = max(128, D).
    """

    rows: int
    dim: int
    width: int
    dtype: int
    precise: bool
    meta: int  # float32 [2, width]: factor and offset of each value that is summed over
    folded: int  # float32 [rows, width]
    weights: int  # int8 [rows, 2, width]: high and low byte
    ends: int  # float32 [rows, 2]: what a dot is multiplied with, what is added
    scores: int  # float32 [rows, 128]


@_jit
def _read_meta(side, part, index, count, work):
    """Factor and offset of group `index` of a side, offsets measured from the middle code."""
    place = index * count * (4 if work.dtype == 2 else 2)
    scale, zero = part + side.scale + place, part + side.zero + place if side.scheme == AFFINE else 0
    read_meta(scale, zero, count, np.float32(side.middle), work.meta, work.meta + 4 * work.width, work.dtype)


@_jit
def _fold(side, values, pitch, count, work):
    """values [rows, count] times the factors, as two bytes each (or as they are), and the ends of their dots."""
    middle, width = np.float32(side.middle), work.width
    if work.precise:
        for row in range(work.rows):
            place = work.folded + 4 * width * row
            fold_floats(values + pitch * row, work.meta, count, width, place, middle, work.ends + 8 * row)
        return
    for row in range(0, work.rows, MOST_QUERIES):
        source, weights, ends = values + pitch * row, work.weights + 2 * width * row, work.ends + 8 * row
        some = min(MOST_QUERIES, work.rows - row)
        fold_bytes(source, pitch, work.meta, count, weights, width, middle, ends, some)


@_jit
def _lane_group(side, part, group, count, out, pitch, work, add):
    """Sixteen lanes of out [rows] from the folded rows: `count` values are summed over."""
    low_columns, high_columns = (count * (side.bits % 10) + 31) // 32, (count * (side.bits // 10) + 31) // 32
    codes = (part + side.low + group * low_columns * 64, part + side.high + group * high_columns * 64)
    columns = (low_columns, high_columns)
    if work.precise:
        for row in range(work.rows):
            weights, ends = work.folded + 4 * work.width * row, work.ends + 8 * row
            tile_row_float(codes, columns, weights, ends, out + pitch * row, side.bits, side.kind, add)
        return
    for row in range(0, work.rows, MOST_QUERIES):
        weights, ends = work.weights + 2 * work.width * row, work.ends + 8 * row
        some = min(MOST_QUERIES, work.rows - row)
        tile_row(codes, columns, weights, work.width, ends, out + pitch * row, pitch, side.bits, some, add)


@_jit
def _scores(side, part, q, work):
    """Scores [rows, 128] of a record's K."""
    for index in range(side.groups):
        if side.scheme == AFFINE:
            _read_meta(side, part, index, work.dim, work)
        else:
            for i in range(work.dim):
                put(work.meta, i, np.float32(1))
                put(work.meta, work.width + i, np.float32(0))
        _fold(side, q, 4 * work.dim, work.dim, work)
        for group in range(index * side.group // 16, (index + 1) * side.group // 16):
            _lane_group(side, part, group, work.dim, work.scores + 64 * group, 512, work, False)
    if side.scheme == SCALED:
        _read_meta(side, part, 0, 128, work)
        for row in range(work.rows):
            multiply_row(work.scores + 512 * row, work.meta, 128)


@_jit
def _outputs(side, part, out, work):
    """out [rows, D] += softmax weights in the scores' place times a record's V."""
    for index in range(side.groups):
        _read_meta(side, part, index, 128, work)
        _fold(side, work.scores, 512, 128, work)
        for group in range(index * side.group // 16, min((index + 1) * side.group, work.dim) // 16):
            _lane_group(side, part, group, 128, out + 64 * group, 4 * work.dim, work, True)


@_jit
def _exact_scores(address, q, tokens, work):
    """Scores [rows, 128] of exact keys [tokens, D]."""
    for row in range(0, work.rows, MOST_QUERIES):
        some = min(MOST_QUERIES, work.rows - row)
        exact_scores(q + 4 * work.dim * row, address, tokens, work.dim, work.scores + 512 * row, work.dtype, some)


@_jit
def _exact_outputs(address, tokens, out, work):
    """out [rows, D] += softmax weights in the scores' place times exact values [tokens, D]."""
    for row in range(0, work.rows, MOST_QUERIES):
        some = min(MOST_QUERIES, work.rows - row)
        exact_outputs(work.scores + 512 * row, address, tokens, work.dim, out + 4 * work.dim * row, work.dtype, some)


@_jit
def _softmax(rules, tokens, start, state, out, work):
    """Scores become weights, the running state moves on; returns whether any query row sees any of these tokens."""
    window, causal, softcap, first_position, queries = rules
    any_seen = False
    for row in range(work.rows):
        scores, position = work.scores + 512 * row, first_position + row % queries
        first = max(0, position - window + 1 - start) if window else 0
        last = min(tokens, position + 1 - start) if causal else tokens
        if last <= first:
            first, last = 0, 0
        for i in range(first):
            put(scores, i, np.float32(-np.inf))
        for i in range(last, 128):
            put(scores, i, np.float32(-np.inf))
        if last == 0:
            for i in range(128):
                put(scores, i, np.float32(0))
            continue
        any_seen = True
        if softcap:
            for i in range(first, last):
                put(scores, i, softcap * np.float32(math.tanh(get(scores, i) / softcap)))
        before, total = get(state, 2 * row), get(state, 2 * row + 1)
        top = max(before, row_max(scores, 128))
        fade = np.float32(math.exp(before - top))
        put(state, 2 * row, top)
        put(state, 2 * row + 1, total * fade + exp_below(scores, 128, top))
        if fade != 1:
            scale_row(out + 4 * work.dim * row, work.dim, fade)
    return any_seen


@_jit
def run_tasks(tasks, items, q, k_side, v_side, rules, state, out, work):
    """tasks int64 [n, 4]: head, its first and last item, where its state goes. items: see `_items`."""
    rows = work.rows
    for task in range(tasks.shape[0]):
        head, place = tasks[task, 0], tasks[task, 3]
        query, ends, made = q + 4 * rows * work.dim * head, state + 8 * rows * place, out + 4 * rows * work.dim * place
        for item in range(tasks[task, 1], tasks[task, 2]):
            is_record, stride = items[item, 0], items[item, 3]
            if rules[0] and items[item, 5] + items[item, 4] <= rules[3] - rules[0] + 1:
                continue  # all behind the first query's window
            k, v = items[item, 1] + head * stride, items[item, 2] + head * stride
            tokens = items[item, 4]
            if item + 1 < tasks[task, 2] and items[item + 1, 0]:
                prefetch(items[item + 1, 1] + head * stride, stride)
            if is_record and k_side.scheme:
                _scores(k_side, k, query, work)
            else:
                _exact_scores(k + (k_side.low if is_record else 0), query, tokens, work)
            if not _softmax(rules, tokens, items[item, 5], ends, made, work):
                continue
            if is_record and v_side.scheme:
                _outputs(v_side, v, made, work)
            else:
                _exact_outputs(v + (v_side.low if is_record else 0), tokens, made, work)
