"""One side of a record, K or V, as the numbers that compiled code needs."""

from functools import cache
from typing import NamedTuple

import torch

from qkv.spec import BLOCK_TOKENS, RecordLayout

RAW, AFFINE, SCALED = 0, 1, 2  # Numbers.scheme
KINDS = ("int8", "fp8_e4m3", "fp8_e5m2")
DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}  # as in vectors_llvm.load_widened


class Numbers(NamedTuple):
    """Offsets are bytes within a head's part.

    low, high   the planes of codes; `high` equals `low` where there is one plane
    bits        10 * bits of the high plane + bits of the low one: 3-bit codes are 12
    kind        index in KINDS, of scheme SCALED
    group       log2 of the values that share a scale
    metadata    scales (and zeros) in one head
    is_value    0 for K, whose lanes are tokens and whose groups run over tokens; 1 for V, where both are channels

    numba's cache on disk names this class: a release that removes or renames it must clear old caches.
    """

    scheme: int
    low: int
    high: int
    bits: int
    kind: int
    scale: int
    zero: int
    group: int
    metadata: int
    is_value: int


@cache
def numbers(layout: RecordLayout) -> tuple[Numbers, Numbers]:
    """K's and V's."""
    return _numbers("k", layout), _numbers("v", layout)


def _numbers(prefix: str, layout: RecordLayout) -> Numbers:
    side, is_value = (layout.format.k, 0) if prefix == "k" else (layout.format.v, 1)
    if side.scheme == "raw":
        return Numbers(RAW, layout.fields[f"{prefix}_codes"].offset, 0, 0, 0, 0, 0, 0, 0, is_value)
    offsets = [layout.fields[f"{prefix}_codes_{i}"].offset for i in range(len(side.planes))]
    bits = 10 * side.planes[1] + side.planes[0] if len(side.planes) > 1 else side.planes[0]
    scale = layout.fields[f"{prefix}_scale"]
    if side.scheme == "scaled":
        kind = KINDS.index(side.id)
        return Numbers(SCALED, offsets[0], offsets[-1], bits, kind, scale.offset, 0, 0, BLOCK_TOKENS, is_value)
    zero, group = layout.fields[f"{prefix}_zero"].offset, side.group.bit_length() - 1
    count = scale.shape[0] * scale.shape[1]
    return Numbers(AFFINE, offsets[0], offsets[-1], bits, 0, scale.offset, zero, group, count, is_value)
