"""Records to dense K and V on the CPU: what formats/record.py decodes, bit for bit, into memory that is there already.

One task is one block and KV head: codes to one byte each in a work space that stays in the first-level cache, then
bytes to values, straight to where they are wanted.
"""

from typing import Any

import numpy as np
import torch

from qkv.errors import ShapeError
from qkv.kernels.compiled import jit
from qkv.kernels.decode_llvm import copy_rows, decode_rows, widen
from qkv.kernels.planes_llvm import unpack
from qkv.kernels.sides import AFFINE, DTYPES, RAW, numbers
from qkv.kernels.threads import share, threads_for
from qkv.spec import BLOCK_TOKENS, RecordLayout

_FEWEST_HEADS = 8  # blocks times heads that are worth a thread: about 50 us


def refusal(layout: RecordLayout) -> str | None:
    """Why records of this layout cannot be read or written here; None if they can."""
    if layout.layer.device.type != "cpu":
        return f"the K and V are on {layout.layer.device}"
    return "head_dim is not a multiple of 16" if layout.layer.head_dim % 16 else None


def unseal(records: torch.Tensor, layout: RecordLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode records uint8 [N, R] -> k, v float32 [N, H, 128, D]. Allocates.

    The caller has checked shapes and `refusal`.
    """
    records = records.contiguous()
    heads, dim = layout.layer.kv_heads, layout.layer.head_dim
    made = torch.empty(2, records.shape[0], heads, BLOCK_TOKENS, dim)
    rows = np.arange(records.shape[0], dtype=np.int64)
    items = np.empty((len(rows), 4), np.int64)
    items[:, 0] = records.data_ptr() + rows * layout.record_bytes
    items[:, 1] = BLOCK_TOKENS
    for side in (0, 1):
        items[:, 2 + side] = made[side].data_ptr() + rows * (made.stride(1) * 4)
    _decode(items, layout, (made.stride(2) * 4, dim * 4, 2), np.inf)
    return made[0], made[1]


def unseal_into(
    records: torch.Tensor, block_ids: torch.Tensor, lengths: torch.Tensor, layout: RecordLayout, out: torch.Tensor
) -> None:
    """The first `lengths` tokens of the records `block_ids` ([N], integers both), in order, to out [2, H, T, D].

    Mutates `out`, of the model's dtype or float32: K then V, the last axis contiguous, T the sum of the lengths. Values
    are those of `unseal`, at most the dtype's largest finite one, rounded to nearest even. Raises ShapeError.
    """
    heads, dim = layout.layer.kv_heads, layout.layer.head_dim
    ids, counts = (x.numpy().astype(np.int64, copy=False) for x in (block_ids, lengths))
    check_ids(ids, records, layout)
    total = int(counts.sum())
    if tuple(out.shape) != (2, heads, total, dim) or (total and out.stride(3) != 1):
        raise ShapeError(f"out: got shape {list(out.shape)}, wanted [2, {heads}, {total}, {dim}], rows contiguous")
    if out.dtype not in (layout.layer.dtype, torch.float32):
        raise ShapeError(f"out: got dtype {out.dtype}, wanted {layout.layer.dtype} or torch.float32")
    if len(counts) and not (counts.min() >= 0 and counts.max() <= BLOCK_TOKENS):
        raise ShapeError(f"lengths: got {counts.min()} to {counts.max()}, wanted 0 to {BLOCK_TOKENS}")
    width = out.element_size()
    items = np.empty((len(ids), 4), np.int64)
    items[:, 0] = records.data_ptr() + ids * layout.record_bytes
    items[:, 1] = counts
    starts = (counts.cumsum() - counts) * (out.stride(2) * width)
    for side in (0, 1):
        items[:, 2 + side] = out.data_ptr() + side * out.stride(0) * width + starts
    limit = torch.finfo(layout.layer.dtype).max
    _decode(items, layout, (out.stride(1) * width, out.stride(2) * width, DTYPES[out.dtype]), limit)


def check_ids(ids: Any, records: torch.Tensor, layout: RecordLayout) -> None:
    """Addresses are made of these: nothing else would notice a wrong one."""
    if records.dtype != torch.uint8 or records.shape[1:] != (layout.record_bytes,) or not records.is_contiguous():
        raise ShapeError(f"records: got {records.dtype} {list(records.shape)}, wanted uint8 [N, {layout.record_bytes}]")
    if len(ids) and not (ids.min() >= 0 and ids.max() < records.shape[0]):
        raise ShapeError(f"block ids: got {ids.min()} to {ids.max()}, wanted 0 to {records.shape[0] - 1}")


def work_space(layout: RecordLayout) -> tuple[tuple[int, int, int], list[Any]]:
    """One thread's: codes uint8 [128, D], two float32 arrays for metadata; addresses, and what must be held for them.

    Its size depends on head_dim, never on the context.
    """
    most = max(BLOCK_TOKENS, *(side.metadata for side in numbers(layout)))
    codes, floats = np.empty(BLOCK_TOKENS * layout.layer.head_dim, np.uint8), np.empty((2, most), np.float32)
    return (codes.ctypes.data, floats.ctypes.data, floats[1].ctypes.data), [codes, floats]


def _decode(items: Any, layout: RecordLayout, target: tuple[int, int, int], limit: float) -> None:
    """items int64 [n, 4]: a record's address, its tokens, head 0's K and V; target: bytes a head, bytes a row, dtype"""
    heads, layer = layout.layer.kv_heads, layout.layer
    threads = threads_for(len(items) * heads, _FEWEST_HEADS)
    geometry = (heads, layout.head_bytes, layer.head_dim, DTYPES[layer.dtype])

    def run(index: int) -> None:
        work, held = work_space(layout)
        _run(items, index, threads, *numbers(layout), geometry, target, np.float32(limit), work)
        del held

    share(run, threads)


@jit
def _run(items, first, step, k_side, v_side, geometry, target, limit, work):
    """Every step-th block and head, from the first-th on."""
    heads = geometry[0]
    for task in range(first, items.shape[0] * heads, step):
        item, head = task // heads, task % heads
        part, tokens = items[item, 0] + head * geometry[1], items[item, 1]
        offset = head * target[0]
        _side(k_side, part, items[item, 2] + offset, tokens, geometry, target, limit, work)
        _side(v_side, part, items[item, 3] + offset, tokens, geometry, target, limit, work)


@jit
def _side(side, part, out, tokens, geometry, target, limit, work):
    _, _, dim, dtype = geometry
    _, pitch, to = target
    if side.scheme == RAW:
        copy_rows(part + side.low, dim * (4 if dtype == 2 else 2), dim, tokens, out, pitch, dtype, to)
        return
    codes, scale, zero = work
    unpack(part + side.low, part + side.high, side.bits, side.is_value, dim, codes)
    widen(part + side.scale, side.metadata, scale, dtype)
    how = 2 + side.kind
    if side.scheme == AFFINE:
        widen(part + side.zero, side.metadata, zero, dtype)
        how = side.is_value
    decode_rows(codes, dim, tokens, scale, zero, how, side.group, out, pitch, to, limit)
