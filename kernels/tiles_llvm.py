"""Rows of tiles times query rows, as LLVM code in numba: the inner loop of attention over codes.

Sixteen lanes (tokens for K, channels for V) are finished by one call: the tiles of a lane group are read once, for up
to four query rows, and every sum stays in a register until it is scaled. docs/record.md has the picture of a tile.

u8 x s8 dots use `vpdpbusd` where the CPU has AVX512-VNNI, else four widening multiplies; both are exact in int32.
"""

from typing import Any

from numba import types
from numba.extending import intrinsic

from qkv.kernels.vectors_llvm import (
    F32,
    I32,
    V16,
    VF,
    VI,
    at,
    broadcast,
    choose,
    dot_step,
    every,
    fma,
    half_to_float,
    has,
    loop,
    word,
)

CODE_KINDS = ("unsigned", "fp8_e4m3", "fp8_e5m2")
BITS = (2, 4, 8, 12)  # 10 * bits of the high plane + bits of the low one: 3-bit codes are 12
ROWS = (1, 2, 3, 4)
MOST_DOTS = 8  # sums in registers that hide the latency of a dot


def has_vnni() -> bool:
    """Whether code is generated for a CPU with 512-bit u8 x s8 dots."""
    return has("avx512vnni")


def _as_float(b: Any, code: Any, kind: str) -> Any:
    """One code a lane, int32x16 below 256, as float32x16. FP8 goes through binary16, which holds all of both types."""
    if kind == "unsigned":
        return b.sitofp(code, VF)
    shift, factor = (8, 1.0) if kind == "fp8_e5m2" else (7, 256.0)
    sign = b.shl(b.and_(code, every(128)), every(8))
    bits = b.trunc(b.or_(sign, b.shl(b.and_(code, every(127)), every(shift))), V16)
    return b.fmul(half_to_float(b, bits), every(factor, VF))


def _plane(b: Any, codes: Any, columns: Any, weights: list[Any], bits: int, sums: list[Any]) -> list[Any]:
    """One plane's dot products, added to `sums` int32x16, one a row of weights."""
    slots = 8 // bits
    split = max(1, min(slots, MOST_DOTS // len(weights)))
    parts = [part for total in sums for part in [total, *[every(0)] * (split - 1)]]

    def column(i: Any, parts: list[Any]) -> list[Any]:
        parts = list(parts)
        tile = b.load(at(b, codes, b.mul(i, word(64)), VI), align=1)
        first = b.mul(i, word(4 * slots))
        for slot in range(slots):
            operand = b.lshr(tile, every(bits * slot)) if slot else tile
            if bits < 8:
                operand = b.and_(operand, every(((1 << bits) - 1) * 0x01010101))
            for row, address in enumerate(weights):
                weight = b.load(at(b, address, b.add(first, word(4 * slot)), I32), align=1)
                place = row * split + slot % split
                parts[place] = dot_step(b, parts[place], operand, broadcast(b, weight, VI))
        return parts

    parts = loop(b, columns, parts, column)
    made = []
    for row in range(len(weights)):
        total = parts[row * split]
        for other in parts[row * split + 1 : (row + 1) * split]:
            total = b.add(total, other)
        made.append(total)
    return made


def _plane_float(b: Any, codes: Any, columns: Any, weights: Any, bits: int, kind: str) -> Any:
    """One plane's dot products with one row of float32 weights in byte order (see fold_llvm), float32x16."""
    slots = 8 // bits

    def column(i: Any, sums: list[Any]) -> list[Any]:
        sums = list(sums)
        tile = b.load(at(b, codes, b.mul(i, word(64)), VI), align=1)
        for slot in range(slots):
            four = b.add(b.mul(i, word(slots)), word(slot))
            first = b.add(b.mul(b.ashr(four, word(4)), word(256)), b.mul(b.and_(four, word(15)), word(4)))
            for byte in range(4):
                shift = 8 * byte + bits * slot
                code = b.and_(b.lshr(tile, every(shift)) if shift else tile, every((1 << bits) - 1))
                place = at(b, weights, b.add(first, word(64 * byte)), F32)
                weight = broadcast(b, b.load(place, align=4), VF)
                sums[byte] = fma(b, _as_float(b, code, kind), weight, sums[byte])
        return sums

    first, second, third, fourth = loop(b, columns, [every(0.0, VF)] * 4, column)
    return b.fadd(b.fadd(first, second), b.fadd(third, fourth))


def _finish(b: Any, dot: Any, ends: Any, row: int, target: tuple[Any, Any]) -> None:
    """out = step * dot + rest, plus what is there if `add`. `ends` float32 [rows, 2]: step and rest."""
    out, add = target
    step, rest = (broadcast(b, b.load(at(b, ends, 8 * row + 4 * i, F32), align=4), VF) for i in (0, 1))
    there = b.select(add, b.load(out, align=4), every(0.0, VF))
    b.store(fma(b, dot, step, b.fadd(rest, there)), out, align=4)


@intrinsic
def tile_row(
    typingctx: Any,
    codes: Any,
    columns: Any,
    weights: Any,
    stride: Any,
    ends: Any,
    out: Any,
    pitch: Any,
    bits: Any,
    rows: Any,
    add: Any,
) -> Any:
    """out float32 [rows, 16], `pitch` bytes apart, = step * (codes . weights) + rest, or += if `add`.

    codes, columns   addresses and tile counts of the low plane and the high one, as 2-tuples
    weights          int8 [rows, 2, stride]: high and low byte of each weight, 128 * high + low
    bits             one of BITS; rows: 1 to 4
    """
    pair, n = types.UniTuple(types.intp, 2), types.intp
    signature = types.void(pair, pair, n, n, n, n, n, n, n, types.boolean)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        codes, columns, weights, stride, ends, out, pitch, bits, rows, add = args
        low, high = ((b.extract_value(codes, i), b.extract_value(columns, i)) for i in (0, 1))

        def of_bits(kind: int) -> None:
            def of_rows(count: int) -> None:
                addresses = [b.add(weights, b.mul(stride, word(row))) for row in range(2 * count)]
                sums = [every(0)] * (2 * count)
                if kind // 10:
                    sums = [b.shl(x, every(kind % 10)) for x in _plane(b, *high, addresses, kind // 10, sums)]
                sums = _plane(b, *low, addresses, kind % 10, sums)
                for row in range(count):
                    whole = b.add(b.shl(sums[2 * row], every(7)), sums[2 * row + 1])
                    place = at(b, out, b.mul(pitch, word(row)), VF)
                    _finish(b, b.sitofp(whole, VF), ends, row, (place, add))

            choose(b, rows, ROWS, of_rows)

        choose(b, bits, BITS, of_bits)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def tile_row_float(
    typingctx: Any, codes: Any, columns: Any, weights: Any, ends: Any, out: Any, bits: Any, kind: Any, add: Any
) -> Any:
    """As `tile_row`, for one row of float32 weights; `kind` indexes CODE_KINDS."""
    pair, n = types.UniTuple(types.intp, 2), types.intp
    signature = types.void(pair, pair, n, n, n, n, n, types.boolean)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        codes, columns, weights, ends, out, bits, kind, add = args
        low, high = ((b.extract_value(codes, i), b.extract_value(columns, i)) for i in (0, 1))

        def unsigned(case: int) -> None:
            dot = _plane_float(b, *low, weights, case % 10, CODE_KINDS[0])
            if case // 10:
                upper = _plane_float(b, *high, weights, case // 10, CODE_KINDS[0])
                dot = fma(b, upper, every(float(1 << case % 10), VF), dot)
            _finish(b, dot, ends, 0, (at(b, out, 0, VF), add))

        def of_kind(case: int) -> None:
            if case == 0:
                choose(b, bits, BITS, unsigned)
            else:
                _finish(b, _plane_float(b, *low, weights, 8, CODE_KINDS[case]), ends, 0, (at(b, out, 0, VF), add))

        choose(b, kind, tuple(range(len(CODE_KINDS))), of_kind)
        return context.get_dummy_value()

    return signature, generate
