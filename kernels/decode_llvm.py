"""Codes to values, as LLVM code in numba: what formats/affine.py and formats/scaled.py decode, bit for bit.

Products and sums are rounded apart, never fused: the reference does so. Rows are [tokens, dim], dim a multiple of 16.
"""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from qkv.kernels.vectors_llvm import (
    F32,
    V8,
    V16,
    VF,
    VI,
    at,
    broadcast,
    choose,
    every,
    half_to_float,
    load_widened,
    loop,
    store_narrowed,
    word,
)

_N, _F = types.intp, types.float32
DTYPES = (0, 1, 2)
HOW = (0, 1, 2, 3, 4)  # affine K, affine V, int8, fp8_e4m3, fp8_e5m2


def each_sixteen(b: Any, tokens: Any, dim: Any, emit: Callable[[Any, Any], None]) -> None:
    """`emit(token, unit)` for every token and every sixteen channels."""

    def token(t: Any, carried: list[Any]) -> list[Any]:
        def unit(u: Any, carried: list[Any]) -> list[Any]:
            emit(t, u)
            return []

        loop(b, b.lshr(dim, word(4)), [], unit)
        return []

    loop(b, tokens, [], token)


def metadata(b: Any, t: Any, u: Any, dim: Any, group: Any, is_value: int) -> Callable[[Any], Any]:
    """Reads float32 scales or zeros, one a value, of sixteen channels: K [groups, dim] or V [groups, 128]."""
    if is_value:
        index = b.add(b.shl(b.lshr(b.shl(u, word(4)), group), word(7)), t)
        return lambda source: broadcast(b, b.load(at(b, source, b.shl(index, word(2)), F32), align=4), VF)
    index = b.add(b.mul(b.lshr(t, group), dim), b.shl(u, word(4)))
    return lambda source: b.load(at(b, source, b.shl(index, word(2)), VF), align=4)


def _as_float(b: Any, code: Any, how: int) -> Any:
    """int32x16 below 256 as float32x16. FP8 goes through binary16, which holds all finite values of both types."""
    if how < 3:
        value = b.sitofp(code, VF)
        return b.fsub(value, every(128.0, VF)) if how == 2 else value
    shift, factor = (8, 1.0) if how == 4 else (7, 256.0)
    sign, size = b.shl(b.and_(code, every(128)), every(8)), b.and_(code, every(127))
    bits = b.trunc(b.or_(sign, b.shl(size, every(shift))), V16)
    value = b.fmul(half_to_float(b, bits), every(factor, VF))
    if how == 3:  # e4m3 has a NaN and no infinity
        nan = b.bitcast(every(0x7FC00000), VF)
        value = b.select(b.icmp_unsigned("==", size, every(127)), nan, value)
    return value


def _clamped(b: Any, value: Any, limit: Any) -> Any:
    """NaN stays."""
    low = b.fneg(limit)
    value = b.select(b.fcmp_ordered(">", value, limit), limit, value)
    return b.select(b.fcmp_ordered("<", value, low), low, value)


@intrinsic
def widen(typingctx: Any, source: Any, count: Any, out: Any, dtype: Any) -> Any:
    """out float32 [count] from `source` of the dtype; count is a multiple of 16."""
    signature = types.void(_N, _N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, count, out, dtype = args

        def of_dtype(kind: int) -> None:
            def step(i: Any, carried: list[Any]) -> list[Any]:
                store_narrowed(b, load_widened(b, source, i, kind), out, i, 2)
                return []

            loop(b, b.lshr(count, word(4)), [], step)

        choose(b, dtype, DTYPES, of_dtype)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def copy_rows(
    typingctx: Any, source: Any, pitch: Any, dim: Any, tokens: Any, out: Any, out_pitch: Any, dtype: Any, to: Any
) -> Any:
    """out [tokens, dim] of dtype `to` = rows of `dtype`, which is `to` unless `to` is float32 (2)."""
    signature = types.void(_N, _N, _N, _N, _N, _N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, pitch, dim, tokens, out, out_pitch, dtype, to = args

        def emit(kind: int, made: int) -> None:
            def sixteen(t: Any, u: Any) -> None:
                values = load_widened(b, b.add(source, b.mul(t, pitch)), u, kind)
                store_narrowed(b, values, b.add(out, b.mul(t, out_pitch)), u, made)

            each_sixteen(b, tokens, dim, sixteen)

        def as_it_is(kind: int) -> None:
            def sixteen(t: Any, u: Any) -> None:
                vector, size = (VI, 64) if kind == 2 else (V16, 32)
                offset = b.mul(u, word(size))
                bits = b.load(at(b, b.add(source, b.mul(t, pitch)), offset, vector), align=1)
                b.store(bits, at(b, b.add(out, b.mul(t, out_pitch)), offset, vector), align=1)

            each_sixteen(b, tokens, dim, sixteen)

        with b.if_else(b.icmp_signed("==", dtype, to)) as (same, wider):
            with same:
                choose(b, dtype, DTYPES, as_it_is)
            with wider:
                choose(b, dtype, (0, 1), lambda kind: emit(kind, 2))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def decode_rows(
    typingctx: Any,
    codes: Any,
    dim: Any,
    tokens: Any,
    scale: Any,
    zero: Any,
    how: Any,
    group: Any,
    out: Any,
    pitch: Any,
    to: Any,
    limit: Any,
) -> Any:
    """out [tokens, dim] of dtype `to`, `pitch` bytes a row, from codes uint8 [128, dim]; clamped to +-limit.

    scale, zero   float32, as `metadata` reads them; one scale per token and no zero where `how` is not affine
    group         log2 of the values that share a scale
    """
    signature = types.void(_N, _N, _N, _N, _N, _N, _N, _N, _N, _N, _F)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        codes, dim, tokens, scale, zero, how, group, out, pitch, to, limit = args
        most = broadcast(b, limit, VF)

        def emit(kind: int, made: int) -> None:
            def sixteen(t: Any, u: Any) -> None:
                place = at(b, codes, b.add(b.mul(t, dim), b.shl(u, word(4))), V8)
                value = _as_float(b, b.zext(b.load(place, align=1), VI), kind)
                if kind < 2:
                    read = metadata(b, t, u, dim, group, kind)
                    value = b.fadd(b.fmul(value, read(scale)), read(zero))
                else:
                    step = b.load(at(b, scale, b.shl(t, word(2)), F32), align=4)
                    value = b.fmul(value, broadcast(b, step, VF))
                store_narrowed(b, _clamped(b, value, most), b.add(out, b.mul(t, pitch)), u, made)

            each_sixteen(b, tokens, dim, sixteen)

        choose(b, how, HOW, lambda kind: choose(b, to, DTYPES, lambda made: emit(kind, made)))
        return context.get_dummy_value()

    return signature, generate
