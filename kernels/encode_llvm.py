"""Values to codes, as LLVM code in numba: what formats/affine.py and formats/scaled.py encode, byte for byte.

Every step is rounded to the model's dtype, as theirs. Rows are [128, dim], dim a multiple of 16. Metadata is kept as
`decode_llvm.metadata` reads it: K float32 [groups, dim], V [groups, 128].
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from qkv.kernels.decode_llvm import DTYPES, each_sixteen, metadata
from qkv.kernels.vectors_llvm import (
    F32,
    I32,
    LANES,
    MAGIC,
    MAGIC_BITS,
    V8,
    V16,
    VF,
    VI,
    at,
    broadcast,
    call,
    choose,
    every,
    float_to_half,
    half_to_float,
    load_widened,
    loop,
    rounded,
    store_narrowed,
    word,
)

_N, _F = types.intp, types.float32
_VD, _VL = ir.VectorType(ir.DoubleType(), LANES), ir.VectorType(ir.IntType(64), LANES)
_LARGEST = (127.0, 448.0, 57344.0)  # int8, fp8_e4m3, fp8_e5m2
_INFINITY = float("inf")


def _least(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered("<", x, y), x, y)


def _most(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _across(b: Any, name: str, lanes: Any) -> Any:
    """The least ("fmin") or largest ("fmax") lane; no lane is NaN."""
    kind = ir.FunctionType(F32, [VF])
    reduce = cgutils.get_or_insert_function(b.module, kind, f"llvm.vector.reduce.{name}.v16f32")
    return b.call(reduce, [lanes], fastmath=("nnan",))


@intrinsic
def largest_bits(typingctx: Any, source: Any, pitch: Any, dim: Any, tokens: Any, dtype: Any) -> Any:
    """The largest bit pattern, without sign, of [tokens, dim]: it grows with the magnitude; NaN comes last."""
    signature = types.int64(_N, _N, _N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, pitch, dim, tokens, dtype = args
        made = b.alloca(ir.IntType(32))

        def of_dtype(kind: int) -> None:
            def token(t: Any, carried: list[Any]) -> list[Any]:
                row = b.add(source, b.mul(t, pitch))

                def step(i: Any, tops: list[Any]) -> list[Any]:
                    vector, mask = (VI, 0x7FFFFFFF) if kind == 2 else (V16, 0x7FFF)
                    place = at(b, row, b.mul(i, word(64 if kind == 2 else 32)), vector)
                    size = b.and_(b.load(place, align=2), every(mask, vector))
                    return [b.select(b.icmp_signed(">", size, tops[0]), size, tops[0])]

                return loop(b, b.lshr(dim, word(4)), carried, step)

            (tops,) = loop(b, tokens, [every(0, VI if kind == 2 else V16)], token)
            wide = tops if kind == 2 else b.zext(tops, VI)
            b.store(call(b, "llvm.vector.reduce.umax.v16i32", I32, wide), made)

        choose(b, dtype, DTYPES, of_dtype)
        return b.zext(b.load(made), ir.IntType(64))

    return signature, generate


def _ends(b: Any, count: Any, read: Callable[[Any], Any]) -> list[Any]:
    """Least and largest, lane by lane, of `count` vectors; `read(i)` loads the i-th."""

    def step(i: Any, ends: list[Any]) -> list[Any]:
        x = read(i)
        return [_least(b, x, ends[0]), _most(b, x, ends[1])]

    return loop(b, count, [every(_INFINITY, VF), every(-_INFINITY, VF)], step)


def _key_extremes(b: Any, rows: tuple[Any, Any], dim: Any, group: Any, outs: tuple[Any, Any], dtype: int) -> None:
    source, pitch = rows

    def one(g: Any, u: Any) -> None:
        first = b.add(source, b.mul(b.shl(g, group), pitch))
        ends = _ends(b, b.shl(word(1), group), lambda t: load_widened(b, b.add(first, b.mul(t, pitch)), u, dtype))
        index = b.add(b.mul(g, b.lshr(dim, word(4))), u)
        for end, out in zip(ends, outs, strict=True):
            store_narrowed(b, b.fadd(end, every(0.0, VF)), out, index, 2)

    each_sixteen(b, b.lshr(word(128), group), dim, one)


def _value_extremes(b: Any, rows: tuple[Any, Any], dim: Any, group: Any, outs: tuple[Any, Any], dtype: int) -> None:
    units, size = b.lshr(dim, word(4)), b.lshr(b.shl(word(1), group), word(4))
    groups = b.udiv(b.add(units, b.sub(size, word(1))), size)

    def token(t: Any, carried: list[Any]) -> list[Any]:
        row = b.add(rows[0], b.mul(t, rows[1]))

        def one(g: Any, carried: list[Any]) -> list[Any]:
            first = b.mul(g, size)
            rest = b.sub(units, first)
            count = b.select(b.icmp_signed("<", rest, size), rest, size)
            ends = _ends(b, count, lambda u: load_widened(b, row, b.add(first, u), dtype))
            index = b.shl(b.add(b.shl(g, word(7)), t), word(2))
            for end, out, name in zip(ends, outs, ("fmin", "fmax"), strict=True):
                b.store(b.fadd(_across(b, name, end), ir.Constant(F32, 0.0)), at(b, out, index, F32), align=4)
            return []

        loop(b, groups, [], one)
        return []

    loop(b, word(128), [], token)


@intrinsic
def extremes(
    typingctx: Any,
    source: Any,
    pitch: Any,
    dim: Any,
    group: Any,
    is_value: Any,
    low: Any,
    high: Any,
    dtype: Any,
) -> Any:
    """low, high float32: each group's least and largest. A zero is +0: -0 would depend on the order of comparisons."""
    signature = types.void(_N, _N, _N, _N, _N, _N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, pitch, dim, group, is_value, low, high, dtype = args

        def of_side(value: int) -> None:
            emit = _value_extremes if value else _key_extremes
            choose(b, dtype, DTYPES, lambda kind: emit(b, (source, pitch), dim, group, (low, high), kind))

        choose(b, is_value, (0, 1), of_side)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def finish_affine(
    typingctx: Any, low: Any, high: Any, count: Any, levels: Any, scale_out: Any, zero_out: Any, dtype: Any
) -> Any:
    """Scale and minimum of `count` groups to a record; `high` becomes the scale in float32.

    A negative one marks a group whose range is beyond float16: its steps are float64, as the reference's.
    """
    signature = types.void(_N, _N, _N, _F, _N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        low, high, count, levels, scale_out, zero_out, dtype = args
        most = broadcast(b, levels, VF)

        def of_dtype(kind: int) -> None:
            def step(i: Any, carried: list[Any]) -> list[Any]:
                lo, hi = load_widened(b, low, i, 2), load_widened(b, high, i, 2)
                scale = rounded(b, b.fdiv(rounded(b, b.fsub(hi, lo), kind), most), kind)
                marked = scale
                if kind == 0:
                    wide = b.fcmp_ordered("==", scale, every(_INFINITY, VF))
                    exact = b.fdiv(b.fsub(b.fpext(hi, _VD), b.fpext(lo, _VD)), b.fpext(most, _VD))
                    scale = b.select(wide, rounded(b, b.fptrunc(exact, VF), kind), scale)
                    marked = b.select(wide, b.fneg(scale), scale)
                store_narrowed(b, scale, scale_out, i, kind)
                store_narrowed(b, lo, zero_out, i, kind)
                store_narrowed(b, marked, high, i, 2)
                return []

            loop(b, b.lshr(count, word(4)), [], step)

        choose(b, dtype, DTYPES, of_dtype)
        return context.get_dummy_value()

    return signature, generate


def _bytes_at(b: Any, codes: Any, t: Any, u: Any, dim: Any) -> Any:
    return at(b, codes, b.add(b.mul(t, dim), b.shl(u, word(4))), V8)


def _whole(b: Any, steps: Any) -> Any:
    """float32x16 within +-2^22 to the nearest int32, even at a tie."""
    return b.sub(b.bitcast(b.fadd(steps, every(MAGIC, VF)), VI), every(MAGIC_BITS))


def _wide_steps(b: Any, x: Any, lo: Any, scale: Any, levels: Any) -> Any:
    """As `_whole` of clamp((x - lo) / scale), all in float64."""
    steps = b.fdiv(b.fsub(b.fpext(x, _VD), b.fpext(lo, _VD)), b.fpext(scale, _VD))
    most = b.fpext(levels, _VD)
    steps = b.select(b.fcmp_ordered(">", steps, most), most, steps)
    magic = 1.5 * 2.0**52
    bits = b.bitcast(b.fadd(steps, ir.Constant(_VD, [magic] * LANES)), _VL)
    return b.trunc(bits, VI)  # the low half of magic's own pattern is 0


@intrinsic
def affine_codes(
    typingctx: Any,
    source: Any,
    pitch: Any,
    dim: Any,
    low: Any,
    scale: Any,
    group: Any,
    is_value: Any,
    levels: Any,
    codes: Any,
    dtype: Any,
) -> Any:
    """codes uint8 [128, dim] from what `extremes` and `finish_affine` left in `low` and `scale`."""
    signature = types.void(_N, _N, _N, _N, _N, _N, _N, _F, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, pitch, dim, low, scale, group, is_value, levels, codes, dtype = args
        most = broadcast(b, levels, VF)

        def emit(kind: int, value: int) -> None:
            def sixteen(t: Any, u: Any) -> None:
                x = load_widened(b, b.add(source, b.mul(t, pitch)), u, kind)
                read = metadata(b, t, u, dim, group, value)
                lo, marked = read(low), read(scale)
                size = call(b, "llvm.fabs.v16f32", VF, marked)
                steps = rounded(b, b.fdiv(rounded(b, b.fsub(x, lo), kind), size), kind)
                # x is never below lo: only the upper end needs a clamp
                steps = b.select(b.fcmp_ordered("==", size, every(0.0, VF)), every(0.0, VF), _least(b, steps, most))
                made = _whole(b, steps)
                place = _bytes_at(b, codes, t, u, dim)
                b.store(b.trunc(made, V8), place, align=1)
                if kind == 0:
                    wide = b.fcmp_ordered("<", marked, every(0.0, VF))
                    lanes = ir.IntType(LANES)
                    with b.if_then(b.icmp_unsigned("!=", b.bitcast(wide, lanes), ir.Constant(lanes, 0)), likely=False):
                        made = b.select(wide, _wide_steps(b, x, lo, size, most), made)
                        b.store(b.trunc(made, V8), place, align=1)

            each_sixteen(b, word(128), dim, sixteen)

        choose(b, is_value, (0, 1), lambda value: choose(b, dtype, DTYPES, lambda kind: emit(kind, value)))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def finish_scaled(typingctx: Any, low: Any, high: Any, kind: Any, scale_out: Any, dtype: Any) -> Any:
    """128 tokens' scales, rounded up, to a record; `high` becomes the scale in float32. kind: int8 and the FP8s."""
    signature = types.void(_N, _N, _N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        low, high, kind, scale_out, dtype = args

        def emit(of: int, to: int) -> None:
            most = ir.Constant(_VD, [_LARGEST[of]] * LANES)

            def step(i: Any, carried: list[Any]) -> list[Any]:
                largest = _most(b, b.fneg(load_widened(b, low, i, 2)), load_widened(b, high, i, 2))
                largest = b.fpext(largest, _VD)
                scale = rounded(b, b.fptrunc(b.fdiv(largest, most), VF), to)
                too_small = b.fcmp_ordered("<", b.fmul(b.fpext(scale, _VD), most), largest)
                # the next float above a finite non-negative one has the next bit pattern
                if to == 0:
                    bits = float_to_half(b, scale)
                    above = half_to_float(b, b.add(bits, every(1, V16)))
                else:
                    above = b.bitcast(b.add(b.bitcast(scale, VI), every(1 if to == 2 else 1 << 16)), VF)
                scale = b.select(too_small, above, scale)
                store_narrowed(b, scale, scale_out, i, to)
                store_narrowed(b, scale, high, i, 2)
                return []

            loop(b, word(128 // LANES), [], step)

        choose(b, kind, (0, 1, 2), lambda of: choose(b, dtype, DTYPES, lambda to: emit(of, to)))
        return context.get_dummy_value()

    return signature, generate


def _to_fp8(b: Any, values: Any, mantissa: int, bias: int) -> Any:
    """The codes of float32x16 within the type's range, rounded to nearest even, as int32x16."""
    bits = b.bitcast(values, VI)
    size, drop = b.and_(bits, every(0x7FFFFFFF)), 23 - mantissa
    odd = b.and_(b.lshr(size, every(drop)), every(1))
    up = b.add(b.add(size, every((1 << (drop - 1)) - 1)), odd)
    normal = b.lshr(b.sub(up, every((127 - bias) << 23)), every(drop))
    # adding this leaves multiples of the subnormal step in the low bits
    magic = (127 + 1 - bias + drop) << 23
    tiny = b.sub(b.bitcast(b.fadd(b.bitcast(size, VF), b.bitcast(every(magic), VF)), VI), every(magic))
    made = b.select(b.icmp_unsigned("<", size, every((128 - bias) << 23)), tiny, normal)
    return b.or_(made, b.and_(b.lshr(bits, every(24)), every(128)))


@intrinsic
def scaled_codes(
    typingctx: Any, source: Any, pitch: Any, dim: Any, scale: Any, kind: Any, codes: Any, dtype: Any
) -> Any:
    """codes uint8 [128, dim] from what `finish_scaled` left in `scale`."""
    signature = types.void(_N, _N, _N, _N, _N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, pitch, dim, scale, kind, codes, dtype = args

        def emit(of: int, dtype_: int) -> None:
            most, least = every(_LARGEST[of], VF), every(-_LARGEST[of], VF)

            def sixteen(t: Any, u: Any) -> None:
                x = load_widened(b, b.add(source, b.mul(t, pitch)), u, dtype_)
                size = broadcast(b, b.load(at(b, scale, b.shl(t, word(2)), F32), align=4), VF)
                steps = _least(b, _most(b, b.fdiv(x, size), least), most)
                steps = b.select(b.fcmp_ordered("==", size, every(0.0, VF)), every(0.0, VF), steps)
                if of == 0:
                    made = b.add(_whole(b, steps), every(128))
                else:
                    made = _to_fp8(b, steps, *((3, 7) if of == 1 else (2, 15)))
                b.store(b.trunc(made, V8), _bytes_at(b, codes, t, u, dim), align=1)

            each_sixteen(b, word(128), dim, sixteen)

        choose(b, kind, (0, 1, 2), lambda of: choose(b, dtype, DTYPES, lambda to: emit(of, to)))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def clear(typingctx: Any, address: Any, size: Any) -> Any:
    """Zeros `size` bytes, a multiple of 64."""
    signature = types.void(_N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        def step(i: Any, carried: list[Any]) -> list[Any]:
            b.store(every(0), at(b, args[0], b.shl(i, word(6)), VI), align=1)
            return []

        loop(b, b.lshr(args[1], word(6)), [], step)
        return context.get_dummy_value()

    return signature, generate
