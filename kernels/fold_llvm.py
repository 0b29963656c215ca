"""Scales and offsets folded into the values that are summed over, as LLVM code in numba.

Byte order: what is summed over comes in chunks of 64, of which vector j holds the values 4i + j. Four vectors of
rounded weights then interleave to bytes in their natural order by shifts alone, without a permutation. Chunks are
padded with zeros. Arguments are addresses.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from qkv.kernels.vectors_llvm import (
    F32,
    I32,
    LANES,
    MAGIC,
    VF,
    VI,
    at,
    bits_of,
    broadcast,
    call,
    choose,
    dot_step,
    every,
    fma,
    four_totals,
    larger,
    largest_of,
    load_widened,
    loop,
    total_of,
    word,
)  # fmt: skip

CHUNK = 64
DTYPES = (0, 1, 2)  # of `load_widened`
GROUPS = (1, 2, 3, 4)  # that share one reading of the values
LARGEST_WEIGHT = 127 * 128 + 127  # 128 * high + low, with high within +-127 and low 0 to 127
_N, _F = types.intp, types.float32


def _chunk(b: Any, address: Any, c: Any, j: int) -> Any:
    """A pointer to vector j of chunk c of float32."""
    return at(b, b.add(address, word(4 * LANES * j)), b.mul(c, word(4 * CHUNK)), VF)


def _pick(b: Any, first: Any, second: Any, odd: int) -> Any:
    """Every second lane of two vectors behind each other."""
    return b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, LANES), [2 * i + odd for i in range(LANES)]))


def _byte_order(b: Any, vectors: list[Any]) -> list[Any]:
    """Four vectors of a chunk from natural to byte order."""
    first, second, third, fourth = vectors
    even, odd = ((_pick(b, first, second, k), _pick(b, third, fourth, k)) for k in (0, 1))
    return _by_fours(b, even, odd)


def _by_fours(b: Any, even: tuple[Any, Any], odd: tuple[Any, Any]) -> list[Any]:
    """From the even and the odd values of a chunk to byte order."""
    (first, second), (third, fourth) = even, odd
    return [
        _pick(b, first, second, 0), _pick(b, third, fourth, 0), _pick(b, first, second, 1), _pick(b, third, fourth, 1)
    ]  # fmt: skip


def _load_chunk(b: Any, address: Any, c: Any, dtype: int) -> list[Any]:
    """A chunk of `dtype`, natural in memory, as float32 in byte order."""
    if dtype != 1:
        first = b.mul(c, word(4))
        return _byte_order(b, [load_widened(b, address, b.add(first, word(j)), dtype) for j in range(4)])
    # two bfloat16 a lane: the even ones shifted up, the odd ones masked
    pairs = [b.load(at(b, address, b.add(b.mul(c, word(128)), word(64 * i)), VI), align=2) for i in (0, 1)]
    shifted = [b.bitcast(b.shl(pair, every(16)), VF) for pair in pairs]
    masked = [b.bitcast(b.and_(pair, every(0xFFFF0000)), VF) for pair in pairs]
    return _by_fours(b, (shifted[0], shifted[1]), (masked[0], masked[1]))


@intrinsic
def to_byte_order(typingctx: Any, source: Any, dtype: Any, chunks: Any, factor: Any, target: Any) -> Any:
    """target float32 [64 * chunks] = factor * source, in byte order; dtype as in `load_widened`."""
    signature = types.void(_N, _N, _N, _F, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, dtype, chunks, factor, target = args
        wide = broadcast(b, factor, VF)

        def of_dtype(kind: int) -> None:
            def step(c: Any, carried: list[Any]) -> list[Any]:
                for j, vector in enumerate(_load_chunk(b, source, c, kind)):
                    b.store(b.fmul(vector, wide), _chunk(b, target, c, j), align=4)
                return []

            loop(b, chunks, [], step)

        choose(b, dtype, DTYPES, of_dtype)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def read_meta(
    typingctx: Any,
    scale: Any,
    zero: Any,
    pitch: Any,
    groups: Any,
    chunks: Any,
    middle: Any,
    meta: Any,
    width: Any,
    dtype: Any,
) -> Any:
    """meta float32 [1 + 2 * groups, width], in byte order: largest scale of any group; each group's scale and offset.

    offset = zero + middle * scale; `zero` 0: offset = 0. Groups of scale and zero are `pitch` bytes apart.
    """
    signature = types.void(_N, _N, _N, _N, _N, _F, _N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        scale, zero, pitch, groups, chunks, middle, meta, width, dtype = args
        grouped = b.icmp_signed("!=", zero, word(0))
        # without a zero the scales stand in for it, so that the load is of real memory
        source, mid, row = b.select(grouped, zero, scale), broadcast(b, middle, VF), b.mul(width, word(4))

        def of_dtype(kind: int) -> None:
            def chunk(c: Any, carried: list[Any]) -> list[Any]:
                def group(g: Any, largest: list[Any]) -> list[Any]:
                    skip, place = b.mul(g, pitch), b.add(meta, b.mul(row, b.add(b.mul(g, word(2)), word(1))))
                    scales = _load_chunk(b, b.add(scale, skip), c, kind)
                    zeros = _load_chunk(b, b.add(source, skip), c, kind)
                    for j, (s, z) in enumerate(zip(scales, zeros, strict=True)):
                        moved = b.select(grouped, fma(b, s, mid, z), every(0.0, VF))
                        b.store(s, _chunk(b, place, c, j), align=4)
                        b.store(moved, _chunk(b, b.add(place, row), c, j), align=4)
                    return [larger(b, s, x) for x, s in zip(largest, scales, strict=True)]

                for j, top in enumerate(loop(b, groups, [every(0.0, VF)] * 4, group)):
                    b.store(top, _chunk(b, meta, c, j), align=4)
                return []

            loop(b, chunks, [], chunk)

        choose(b, dtype, DTYPES, of_dtype)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def largest_product(typingctx: Any, values: Any, meta: Any, chunks: Any) -> Any:
    """The largest |value * meta| of float32 [64 * chunks] each, in the same order. NaN is passed over."""
    signature = types.float32(_N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        values, meta, chunks = args

        def step(c: Any, tops: list[Any]) -> list[Any]:
            made = []
            for j, top in enumerate(tops):
                size = b.fmul(*(b.load(_chunk(b, place, c, j), align=4) for place in (values, meta)))
                made.append(larger(b, call(b, "llvm.fabs.v16f32", VF, size), top))
            return made

        first, second, third, fourth = loop(b, chunks, [every(0.0, VF)] * 4, step)
        return largest_of(b, larger(b, larger(b, first, second), larger(b, third, fourth)))

    return signature, generate


def _to_bytes(b: Any, even: list[Any], odd: list[Any]) -> tuple[Any, Any]:
    """Weights of vectors 0 and 2 in their low 15 bits, of 1 and 3 eight bits further up -> high and low bytes, VI.

    The high byte is the weight over 128, rounded down; the low one its last seven bits, never negative.
    """
    lows = [bits_of(b, 0xFF, x, y) for x, y in zip(even, odd, strict=True)]
    highs = [bits_of(b, 0x7F80, x, y) for x, y in zip(even, odd, strict=True)]
    high = bits_of(b, 0xFFFF, b.lshr(highs[0], every(7)), b.shl(highs[1], every(9)))
    low = b.and_(bits_of(b, 0xFFFF, lows[0], b.shl(lows[1], every(16))), every(0x7F7F7F7F))
    # the magic number's own top bit lies on the sign of a weight that is further up
    return b.xor(high, every(0x80008000)), low


def _round_chunk(
    b: Any, scaled: list[Any], c: Any, meta: tuple[Any, Any], sums: list[Any]
) -> tuple[tuple[Any, Any], list[Any]]:
    """High and low bytes of a chunk's weights in one group, and the group's sums moved on.

    scaled  values over the row's step, odd vectors 256 times that: their weights are rounded eight bits further up,
            where 23 bits hold the 15 of a weight and 8 that rounding leaves behind
    sums    of values times offsets, even and odd vectors apart, and of the rounded weights
    """
    magic = [every(MAGIC, VF), every(MAGIC + 128, VF)]
    dots, rounded = sums[:2], []
    for j, x in enumerate(scaled):
        scale, offset = (b.load(_chunk(b, place, c, j), align=4) for place in meta)
        dots[j % 2] = fma(b, x, offset, dots[j % 2])
        rounded.append(b.bitcast(fma(b, x, scale, magic[j % 2]), VI))
    high, low = _to_bytes(b, rounded[::2], rounded[1::2])
    total = dot_step(b, sums[2], every(0x80808080), high)
    return (high, low), [*dots, dot_step(b, total, every(0x01010101), low)]


@intrinsic
def fold_bytes(
    typingctx: Any,
    values: Any,
    meta: Any,
    groups: Any,
    chunks: Any,
    width: Any,
    middle: Any,
    step: Any,
    inverse: Any,
    weights: Any,
    weights_pitch: Any,
    ends: Any,
    ends_pitch: Any,
) -> Any:
    """One row, 1 to 4 groups: weights int8 [2, width] a group, 128 * high + low = round(values * scale * inverse).

    values  float32 [64 * chunks], byte order; meta: scale and offset float32 [2 * groups, width] as `read_meta` leaves
            them; weights and ends of a group are `weights_pitch` and `ends_pitch` bytes behind those of the last
    step    1 / inverse
    ends    float32 [2] a group: step, and values . offset - middle * step * sum of the rounded weights
    """
    signature = types.void(_N, _N, _N, _N, _N, _F, _F, _F, _N, _N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        values, meta, groups, chunks, width, middle, step, inverse, weights, weights_pitch, ends, ends_pitch = args
        row = b.mul(width, word(4))
        factors = [broadcast(b, x, VF) for x in (inverse, b.fmul(inverse, ir.Constant(F32, 256.0)))]

        def of_groups(count: int) -> None:
            def chunk(c: Any, carried: list[Any]) -> list[Any]:
                scaled = [b.fmul(b.load(_chunk(b, values, c, j), align=4), factors[j % 2]) for j in range(4)]
                made = []
                for g in range(count):
                    place = b.add(meta, b.mul(row, word(2 * g)))
                    rounded, sums = _round_chunk(b, scaled, c, (place, b.add(place, row)), carried[3 * g : 3 * g + 3])
                    target = b.add(b.add(weights, b.mul(weights_pitch, word(g))), b.mul(c, word(CHUNK)))
                    for i, half in enumerate(rounded):
                        b.store(half, at(b, target, b.mul(width, word(i)), VI), align=1)
                    made += sums
                return made

            sums = loop(b, chunks, [every(0.0, VF), every(0.0, VF), every(0)] * count, chunk)
            rests = []
            for g in range(count):
                dot = fma(b, sums[3 * g + 1], every(1 / 256, VF), sums[3 * g])
                rests.append(fma(b, broadcast(b, b.fneg(middle), VF), b.sitofp(sums[3 * g + 2], VF), dot))
            totals = four_totals(b, [*rests, *rests[:1] * (4 - count)])
            for g in range(count):
                place = b.add(ends, b.mul(ends_pitch, word(g)))
                rest = b.fmul(step, b.extract_element(totals, ir.Constant(I32, g)))
                b.store(step, at(b, place, 0, F32), align=4)
                b.store(rest, at(b, place, 4, F32), align=4)

        choose(b, groups, GROUPS, of_groups)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def fold_floats(
    typingctx: Any, values: Any, meta: Any, chunks: Any, width: Any, middle: Any, folded: Any, ends: Any
) -> Any:
    """As `fold_bytes` for one group, but folded float32 [64 * chunks] = values * scale, in byte order, with step 1."""
    signature = types.void(_N, _N, _N, _N, _F, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        values, meta, chunks, width, middle, folded, ends = args
        offset = b.add(meta, b.mul(width, word(4)))

        def step(c: Any, carried: list[Any]) -> list[Any]:
            dot, total = carried
            for j in range(4):
                x = b.load(_chunk(b, values, c, j), align=4)
                y = b.fmul(x, b.load(_chunk(b, meta, c, j), align=4))
                b.store(y, _chunk(b, folded, c, j), align=4)
                dot = fma(b, x, b.load(_chunk(b, offset, c, j), align=4), dot)
                total = b.fadd(total, y)
            return [dot, total]

        dot, total = loop(b, chunks, [every(0.0, VF)] * 2, step)
        rest = b.fsub(total_of(b, dot), b.fmul(middle, total_of(b, total)))
        b.store(ir.Constant(F32, 1.0), at(b, ends, 0, F32), align=4)
        b.store(rest, at(b, ends, 4, F32), align=4)
        return context.get_dummy_value()

    return signature, generate
