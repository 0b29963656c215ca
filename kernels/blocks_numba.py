"""The compiled loops of attend_numba: one KV head's records and exact tokens, for a few query rows.

Addresses instead of arrays throughout: numba counts references of arrays atomically at every call, which costs more
than the arithmetic of a block. Not type-checked: numba compiles it, and what it calls has no Python body.
"""

import math
from typing import NamedTuple

import numpy as np

from qkv.kernels.amx_llvm import MOST_ROWS, configure, finish, multiply, release, unpack
from qkv.kernels.compiled import jit
from qkv.kernels.exact_llvm import exact_outputs, exact_scores
from qkv.kernels.fold_llvm import LARGEST_WEIGHT, fold_bytes, fold_floats, largest_product, read_meta, to_byte_order
from qkv.kernels.softmax_llvm import (
    clear_bytes,
    copy_bytes,
    get,
    multiply_widened,
    prefetch,
    put,
    scale_row,
    softmax_row,
    widen_row,
)
from qkv.kernels.tiles_llvm import tile_row, tile_row_float

SHARED_ROWS = 4  # query rows that share one unpacking without AMX
GROUPS = 4  # quantisation groups that share one reading of the values
RAW, AFFINE, SCALED = 0, 1, 2  # Side.scheme
_SMALLEST = np.float32(1e-25)  # products below it count as nothing: the inverse of a step must stay finite
_FOLD_SHARES = 3  # of what is prefetched, for each row of a fold; the other stages are shorter


class Side(NamedTuple):
    """K, or V, of a record as numbers: offsets in a head's part, bits (10 * high plane + low plane), groups.

    middle is twice the middle code. numba's cache on disk names this class and those below: a release that removes or
    renames one must clear old caches.
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
    middle: int


class Summed(NamedTuple):
    """Addresses of one side's values that are summed over (q for K, softmax weights for V), folded.

    values   float32 [rows, width], byte order (fold_llvm)
    weights  int8 [groups, rows, 2, width]: high and low byte; precise: float32 [groups, rows, width]
    ends     float32 [groups, rows, 2]: what a dot is multiplied with, what is added
    """

    values: int
    weights: int
    ends: int
    chunks: int


class Work(NamedTuple):
    """Addresses of one thread's work space; its size depends on rows and head_dim, never on the context.

    width = max(128, head_dim up to the next 64). The rows of `weights` and `ends` are padded to whole passes.
    """

    rows: int
    padded: int
    some: int  # rows of one pass
    dim: int
    width: int
    dtype: int
    precise: bool
    amx: bool
    query: int  # float32 [rows, width]: scaled, as they are
    k: Summed
    v: Summed
    meta: int  # float32 [1 + 2 * groups, width]
    staging: int  # of `dtype` [2, groups, width]: metadata whose rows are no multiple of 64
    scores: int  # float32 [rows, 128]
    cursor: int  # int64 [2]: what is left to prefetch
    share: int  # cache lines to ask for at a time
    operands: int  # uint8 [lanes / 16, width, 16]: a block's codes, a byte each
    sums: int  # int32 [lanes / 16, 16, 16]
    end: int


@jit
def make_work(rows, dim, dtype, precise, amx, k_groups, v_groups, lines, base):
    """The work space from address `base` on; `end - base` is its size, for any base. lines: cache lines of a block."""
    passes = -(-rows // (MOST_ROWS if amx else SHARED_ROWS))
    some = -(-rows // passes)
    padded, width, groups = some * passes, max(128, -(-dim // 64) * 64), max(k_groups, v_groups)
    weight_bytes = padded * width * (4 if precise else 2)
    query = base
    scores = query + 4 * rows * width
    cursor = scores + 512 * rows
    k_values = cursor + 64
    k_weights = k_values + 4 * rows * width
    k_ends = k_weights + k_groups * weight_bytes
    v_values = k_ends + 64 * (-(-8 * k_groups * padded // 64))
    v_weights = v_values + 4 * rows * width
    v_ends = v_weights + v_groups * weight_bytes
    meta = v_ends + 64 * (-(-8 * v_groups * padded // 64))
    staging = meta + 4 * width * (1 + 2 * groups)
    operands = staging + 8 * width * groups
    sums = operands + 16 * width * width // 16
    # shares are taken by every row in two folds (twice) and a softmax, and by every vector of lanes, twice with AMX
    share = lines // (_FOLD_SHARES * 2 * rows + rows + (8 + dim // 16) * (2 if amx else 1)) + 1
    k, v = Summed(k_values, k_weights, k_ends, -(-dim // 64)), Summed(v_values, v_weights, v_ends, 2)
    return Work(
        rows, padded, some, dim, width, dtype, precise, amx, query, k, v, meta, staging, scores, cursor, share,
        operands, sums, sums + 64 * width,
    )  # fmt: skip


@jit
def start(q, q_dtype, scale, k_side, work):
    """Take in the query rows [rows, D] of one KV head; work space that must be zero becomes it."""
    size = 4 if q_dtype == 2 else 2
    clear_bytes(work.query, 4 * work.rows * work.width)
    clear_bytes(work.staging, 8 * work.width * max(k_side.groups, 1))
    for row in range(work.rows):
        natural = work.query + 4 * work.width * row
        widen_row(q + size * work.dim * row, q_dtype, work.dim, scale, natural)
        to_byte_order(natural, 2, work.k.chunks, np.float32(1), work.k.values + 4 * work.width * row)
    if k_side.scheme == SCALED:  # the scales come after the dots, so the weights are the same for every block
        for i in range(work.width):
            put(work.meta, i, np.float32(1))
            put(work.meta, work.width + i, np.float32(1))
            put(work.meta, 2 * work.width + i, np.float32(0))
        _fold(k_side, work.k, 1, work)


@jit
def _read_meta(side, summed, part, count, work):
    """Factors and offsets of all groups of a side, `count` values each, offsets measured from the middle code."""
    size = 4 if work.dtype == 2 else 2
    scale, zero, pitch = part + side.scale, part + side.zero if side.scheme == AFFINE else 0, count * size
    if count % 64:
        staged, row = work.staging + size * work.width * side.groups, size * work.width
        for group in range(side.groups):
            copy_bytes(scale + pitch * group, work.staging + row * group, pitch)
            if zero:
                copy_bytes(zero + pitch * group, staged + row * group, pitch)
        scale, zero, pitch = work.staging, staged if zero else 0, row
    middle = np.float32(0.5) * np.float32(side.middle)
    read_meta(scale, zero, pitch, side.groups, summed.chunks, middle, work.meta, work.width, work.dtype)


@jit
def _fold(side, summed, groups, work):
    """The values times the factors, as two bytes each (or as they are), and the ends of their dots."""
    middle, line = np.float32(0.5) * np.float32(side.middle), 4 * work.width
    if work.precise:
        for row in range(work.rows):
            for group in range(groups):
                place = group * work.padded + row
                meta = work.meta + line * (1 + 2 * group)
                weights, ends = summed.weights + line * place, summed.ends + 8 * place
                fold_floats(summed.values + line * row, meta, summed.chunks, work.width, middle, weights, ends)
        return
    # all largest products before the first fold: each is a long chain, and they overlap
    for row in range(work.rows):
        top = largest_product(summed.values + line * row, work.meta, summed.chunks)
        some = top > _SMALLEST
        put(summed.ends, 2 * row, top * np.float32(1 / LARGEST_WEIGHT) if some else np.float32(1))
        put(summed.ends, 2 * row + 1, np.float32(LARGEST_WEIGHT) / top if some else np.float32(1))
    pitch = 2 * work.width * work.padded
    for row in range(work.rows):
        prefetch(work.cursor, _FOLD_SHARES * work.share)
        step, inverse = get(summed.ends, 2 * row), get(summed.ends, 2 * row + 1)
        for group in range(0, groups, GROUPS):
            meta, some = work.meta + line * (1 + 2 * group), min(GROUPS, groups - group)
            weights = summed.weights + pitch * group + 2 * work.width * row
            ends = summed.ends + 8 * (work.padded * group + row)
            fold_bytes(
                summed.values + line * row, meta, some, summed.chunks, work.width, middle, step, inverse, weights,
                pitch, ends, 8 * work.padded,
            )  # fmt: skip


@jit
def _tiles(side, summed, part, lanes, count, out, pitch, work, add):
    """out [rows, 16 * lanes] = (or +=) a record's codes times the folded weights: `count` values are summed over."""
    low_bits, high_bits = side.bits % 10, side.bits // 10
    columns = ((count * low_bits + 31) // 32, (count * high_bits + 31) // 32)
    if work.amx:
        _tiles_amx(side, summed, part, lanes, columns, out, pitch, work, add)
        return
    run = side.group // 16
    for group in range(side.groups):
        for lane in range(group * run, min((group + 1) * run, lanes)):
            prefetch(work.cursor, work.share)
            codes = (part + side.low + lane * columns[0] * 64, part + side.high + lane * columns[1] * 64)
            target = out + 64 * lane
            if work.precise:
                for row in range(work.rows):
                    place = group * work.padded + row
                    weights, ends = summed.weights + 4 * work.width * place, summed.ends + 8 * place
                    tile_row_float(codes, columns, weights, ends, target + pitch * row, side.bits, side.kind, add)
                continue
            for row in range(0, work.rows, work.some):
                place, some = group * work.padded + row, min(work.some, work.rows - row)
                weights, ends = summed.weights + 2 * work.width * place, summed.ends + 8 * place
                tile_row(codes, columns, weights, work.width, ends, target + pitch * row, pitch, side.bits, some, add)


@jit
def _tiles_amx(side, summed, part, lanes, columns, out, pitch, work, add):
    """As `_tiles`. Each step runs over the whole block: a tile load waits for stores under way to its bytes."""
    # 8-bit codes are read where they lie, in chunks of 64: up to 768 bytes behind K's, which are V's part of the record
    operands, size = part + side.low, columns[0] * 64
    if side.bits != 8:
        operands, size = work.operands, 1024 * summed.chunks
        for lane in range(lanes):
            prefetch(work.cursor, work.share)
            codes = (part + side.low + lane * columns[0] * 64, part + side.high + lane * columns[1] * 64)
            unpack(codes, columns[0], side.bits, operands + size * lane)
    run = side.group // 16
    for row in range(0, work.rows, work.some):
        for group in range(side.groups):
            weights = summed.weights + 2 * work.width * (group * work.padded + row)
            for lane in range(group * run, min((group + 1) * run, lanes)):
                prefetch(work.cursor, work.share)
                multiply(weights, work.width, operands + size * lane, summed.chunks, work.sums + 1024 * lane)
        some = min(work.some, work.rows - row)
        for group in range(side.groups):
            ends = summed.ends + 8 * (group * work.padded + row)
            for lane in range(group * run, min((group + 1) * run, lanes)):
                finish(work.sums + 1024 * lane, ends, out + pitch * row + 64 * lane, pitch, some, add)


@jit
def record_scores(side, part, work):
    """Scores [rows, 128] of a record's K."""
    if side.scheme == AFFINE:
        _read_meta(side, work.k, part, work.dim, work)
        _fold(side, work.k, side.groups, work)
    _tiles(side, work.k, part, 8, work.dim, work.scores, 512, work, False)
    if side.scheme == SCALED:
        for row in range(work.rows):
            multiply_widened(part + side.scale, work.dtype, 128, work.scores + 512 * row)


@jit
def record_outputs(side, part, out, work):
    """out [rows, D] += softmax weights in the scores' place times a record's V."""
    _read_meta(side, work.v, part, 128, work)
    for row in range(work.rows):
        to_byte_order(work.scores + 512 * row, 2, 2, np.float32(1), work.v.values + 4 * work.width * row)
    _fold(side, work.v, side.groups, work)
    _tiles(side, work.v, part, work.dim // 16, 128, out, 4 * work.dim, work, True)


@jit
def token_scores(address, tokens, first, work):
    """Scores [rows, 128], from the first-th on, of exact keys [tokens, D]."""
    for row in range(0, work.rows, SHARED_ROWS):
        some = min(SHARED_ROWS, work.rows - row)
        place = work.query + 4 * work.width * row
        scores = work.scores + 512 * row + 4 * first
        exact_scores(place, 4 * work.width, address, tokens, work.dim, scores, work.dtype, some)


@jit
def token_outputs(address, tokens, first, out, work):
    """out [rows, D] += softmax weights in the scores' place times exact values [tokens, D]."""
    for row in range(0, work.rows, SHARED_ROWS):
        some = min(SHARED_ROWS, work.rows - row)
        weights = work.scores + 512 * row + 4 * first
        exact_outputs(weights, address, tokens, work.dim, out + 4 * work.dim * row, work.dtype, some)


@jit
def softmax(window, causal, softcap, first_position, queries, tokens, position, state, out, work):
    """Scores become weights, the running state moves on; returns whether any query row sees any of these tokens.

    Row r is the query at first_position + r % queries; the tokens are those at `position` and after.
    """
    any_seen, turn = False, 0
    for row in range(work.rows):
        scores, at = work.scores + 512 * row, first_position + turn
        turn = turn + 1 if turn + 1 < queries else 0
        first = max(0, at - window + 1 - position) if window else 0
        last = min(tokens, at + 1 - position) if causal else tokens
        if last <= first:
            clear_bytes(scores, 512)
            continue
        for i in range(first):
            put(scores, i, np.float32(-np.inf))
        for i in range(last, 128):
            put(scores, i, np.float32(-np.inf))
        any_seen = True
        if softcap:
            for i in range(first, last):
                put(scores, i, softcap * np.float32(math.tanh(get(scores, i) / softcap)))
        prefetch(work.cursor, work.share)
        before = get(state, 2 * row)
        top, added = softmax_row(scores, before)
        fade = np.float32(1) if before == top else np.float32(math.exp(before - top))
        put(state, 2 * row, top)
        put(state, 2 * row + 1, get(state, 2 * row + 1) * fade + added)
        if fade != 1:
            scale_row(out + 4 * work.dim * row, work.dim, fade)
    return any_seen


@jit
def hold_tiles(work):
    """Before the first block of a thread's task."""
    if work.amx:
        configure(work.some, work.sums)


@jit
def let_tiles_go(work):
    """After its last."""
    if work.amx:
        release()
