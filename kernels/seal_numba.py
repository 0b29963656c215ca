"""Blocks to records on the CPU: what formats/record.py encodes, byte for byte, straight into the records.

One task is one block and KV head. Input may be strided; only the last axis must be contiguous.
"""

from functools import cache

import numpy as np
import torch

from qkv.errors import ShapeError
from qkv.kernels.compiled import jit
from qkv.kernels.decode_llvm import copy_rows
from qkv.kernels.encode_llvm import (
    affine_codes,
    clear,
    extremes,
    finish_affine,
    finish_scaled,
    largest_bits,
    scaled_codes,
)
from qkv.kernels.planes_llvm import pack
from qkv.kernels.sides import AFFINE, DTYPES, RAW, numbers
from qkv.kernels.softmax_llvm import peek
from qkv.kernels.threads import share, threads_for
from qkv.kernels.unseal_numba import check_ids, refusal, work_space
from qkv.spec import BLOCK_TOKENS, PIECE_TOKENS, RecordLayout

__all__ = ["refusal", "seal", "store", "within"]

PIECE = PIECE_TOKENS
_FEWEST_HEADS = 4  # blocks times heads that are worth a thread: about 100 us
_WHOLE_TOKEN = 40  # log2 of a group that no head_dim reaches


def within(x: torch.Tensor, limit: float) -> bool:
    """Whether no value of x [N, H, T, D], D a multiple of 16, is inf, NaN or beyond +-limit. Copies odd strides."""
    x = _rows(x)
    (blocks, heads, tokens, dim), width = x.shape, x.element_size()
    block, head, token, _ = x.stride()
    size = (blocks, heads, block * width, head * width, token * width, tokens, dim, DTYPES[x.dtype])
    threads = threads_for(blocks * heads * tokens, 8 * _FEWEST_HEADS * BLOCK_TOKENS)
    if threads == 1:  # a decode step comes here in every layer
        return bool(_largest(x.data_ptr(), *size, 0, 1) <= _bits(limit, x.dtype))
    largest = [0] * threads

    def run(index: int) -> None:
        largest[index] = _largest(x.data_ptr(), *size, index, threads)

    share(run, threads)
    return max(largest) <= _bits(limit, x.dtype)


def store(k: torch.Tensor, v: torch.Tensor, pieces: torch.Tensor, ids: torch.Tensor, first: int, limit: float) -> bool:
    """Copy k, v [H, T, D], D a multiple of 16, to slots `first` and on of pieces [N, 2, H, 16, D], in place.

    Slots run over the pieces `ids` int64, one after the other. False, and nothing has changed, if a value is inf, NaN
    or beyond +-limit. For few tokens: runs on this thread.
    """
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    (heads, tokens, dim), width = k.shape, k.element_size()
    strides = (k.stride(0) * width, k.stride(1) * width, v.stride(0) * width, v.stride(1) * width)
    places, shape = (pieces.data_ptr(), ids.data_ptr(), first), (heads, tokens, dim, DTYPES[k.dtype])
    return bool(_store(k.data_ptr(), v.data_ptr(), strides, places, shape, _bits(limit, k.dtype)))


@cache
def _bits(limit: float, dtype: torch.dtype) -> int:
    """The bit pattern of `limit`, or of the dtype's largest value."""
    value = torch.tensor(min(limit, torch.finfo(dtype).max), dtype=dtype)
    return int(value.view(torch.int32 if dtype == torch.float32 else torch.int16).item())


def seal(k: torch.Tensor, v: torch.Tensor, layout: RecordLayout, out: torch.Tensor, block_ids: list[int]) -> None:
    """Encode k, v [N, H, 128, D] into the rows `block_ids` of `out` uint8 [num_blocks, R], in place.

    The caller has checked shapes, dtypes, `refusal`, and that all values are finite. Raises ShapeError.
    """
    k, v = _rows(k), _rows(v)
    ids = np.array(block_ids, dtype=np.int64)
    check_ids(ids, out, layout)
    if len(ids) != k.shape[0]:
        raise ShapeError(f"block ids: got {len(ids)}, wanted {k.shape[0]}, one for each block")
    heads, layer, width = layout.layer.kv_heads, layout.layer, k.element_size()
    items = np.empty((len(ids), 3), np.int64)
    items[:, 0] = out.data_ptr() + ids * layout.record_bytes
    index = np.arange(len(ids), dtype=np.int64)
    for side, x in enumerate((k, v)):
        items[:, 1 + side] = x.data_ptr() + index * (x.stride(0) * width)
    geometry = (heads, layout.head_bytes, layer.head_dim, DTYPES[layer.dtype])
    strides = tuple(step * width for x in (k, v) for step in x.stride()[1:3])
    levels = tuple(np.float32((1 << side.bits) - 1) for side in (layout.format.k, layout.format.v))
    threads = threads_for(len(ids) * heads, _FEWEST_HEADS)

    def run(first: int) -> None:
        work, held = work_space(layout)
        _run(items, first, threads, *numbers(layout), geometry, strides, levels, work)
        del held

    share(run, threads)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


@jit
def _largest(source, blocks, heads, block, head, token, tokens, dim, dtype, first, step):
    """Over every step-th block and head, from the first-th on; block, head, token: strides in bytes."""
    largest = 0
    for row in range(first, blocks * heads, step):
        place = source + row // heads * block + row % heads * head
        largest = max(largest, largest_bits(place, token, dim, tokens, dtype))
    return largest


@jit
def _store(k, v, strides, places, shape, limit):
    (pieces, ids, first), (heads, tokens, dim, dtype) = places, shape
    for head in range(heads):
        if largest_bits(k + head * strides[0], strides[1], dim, tokens, dtype) > limit:
            return False
        if largest_bits(v + head * strides[2], strides[3], dim, tokens, dtype) > limit:
            return False
    size = dim * (4 if dtype == 2 else 2)
    done = 0
    while done < tokens:
        slot = (first + done) % PIECE
        some = min(PIECE - slot, tokens - done)
        base = pieces + 2 * heads * PIECE * size * peek(ids, (first + done) // PIECE) + slot * size
        for head in range(heads):
            source = k + head * strides[0] + done * strides[1]
            copy_rows(source, strides[1], dim, some, base + head * PIECE * size, size, dtype, dtype)
            source = v + head * strides[2] + done * strides[3]
            copy_rows(source, strides[3], dim, some, base + (heads + head) * PIECE * size, size, dtype, dtype)
        done += some
    return True


@jit
def _run(items, first, step, k_side, v_side, geometry, strides, levels, work):
    """Every step-th block and head, from the first-th on."""
    heads, head_bytes = geometry[0], geometry[1]
    for task in range(first, items.shape[0] * heads, step):
        item, head = task // heads, task % heads
        part = items[item, 0] + head * head_bytes
        clear(part, head_bytes)
        _side(k_side, part, items[item, 1] + head * strides[0], strides[1], geometry, levels[0], work)
        _side(v_side, part, items[item, 2] + head * strides[2], strides[3], geometry, levels[1], work)


@jit
def _side(side, part, source, pitch, geometry, levels, work):
    _, _, dim, dtype = geometry
    codes, low, scale = work
    if side.scheme == RAW:
        copy_rows(source, pitch, dim, 128, part + side.low, dim * (4 if dtype == 2 else 2), dtype, dtype)
        return
    if side.scheme == AFFINE:
        extremes(source, pitch, dim, side.group, side.is_value, low, scale, dtype)
        finish_affine(low, scale, side.metadata, levels, part + side.scale, part + side.zero, dtype)
        affine_codes(source, pitch, dim, low, scale, side.group, side.is_value, levels, codes, dtype)
    else:
        extremes(source, pitch, dim, _WHOLE_TOKEN, 1, low, scale, dtype)
        finish_scaled(low, scale, side.kind, part + side.scale, dtype)
        scaled_codes(source, pitch, dim, scale, side.kind, codes, dtype)
    pack(part + side.low, part + side.high, side.bits, side.is_value, dim, codes)
