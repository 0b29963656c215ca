"""What softmax does to rows of float32, as LLVM code in numba, and single values by address.

Arguments are addresses; `count` is a multiple of 16 everywhere.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from qkv.kernels.vectors_llvm import (
    F32,
    I8,
    I32,
    I64,
    MAGIC,
    VF,
    VI,
    at,
    broadcast,
    choose,
    every,
    fma,
    larger,
    largest_of,
    load_widened,
    loop,
    sixteen,
    sixteens,
    store_narrowed,
    total_of,
    word,
)  # fmt: skip

_N, _F = types.intp, types.float32
_TERMS = [0.000154035, 0.001333356, 0.009618129, 0.055504109, 0.240226507, 0.693147181, 1.0]  # ln(2)^k / k!


@intrinsic
def peek(typingctx: Any, address: Any, index: Any) -> Any:
    """The index-th int64 at an address."""
    signature = types.intp(_N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load(at(b, args[0], b.mul(args[1], word(8)), I64), align=8)

    return signature, generate


@intrinsic
def get(typingctx: Any, address: Any, index: Any) -> Any:
    """The index-th float32 at an address. Arrays passed by address cost no reference counting."""
    signature = types.float32(_N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load(at(b, args[0], b.mul(args[1], word(4)), F32), align=4)

    return signature, generate


@intrinsic
def put(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Sets the index-th float32 at an address."""
    signature = types.void(_N, _N, _F)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(args[2], at(b, args[0], b.mul(args[1], word(4)), F32), align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def prefetch(typingctx: Any, cursor: Any, lines: Any) -> Any:
    """Ask for the next `lines` cache lines at a cursor, int64 [2]: first byte that is not asked for, behind the last.

    A few lines at a time, among arithmetic: a burst fills the queue of memory requests and holds everything up.
    """
    signature = types.void(_N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        cursor, lines = args
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        ask = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0i8")
        first, end = (b.load(at(b, cursor, 8 * i, I64), align=8) for i in (0, 1))
        wanted = b.add(first, b.mul(lines, word(64)))
        last = b.select(b.icmp_signed("<", wanted, end), wanted, end)
        read, second_level, data = (ir.Constant(I32, number) for number in (0, 2, 1))

        def line(i: Any, carried: list[Any]) -> list[Any]:
            b.call(ask, [at(b, first, b.mul(i, word(64)), I8), read, second_level, data])
            return []

        loop(b, b.ashr(b.add(b.sub(last, first), word(63)), word(6)), [], line)
        b.store(last, at(b, cursor, 0, I64), align=8)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def poke(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Sets the index-th int64 at an address."""
    signature = types.void(_N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(args[2], at(b, args[0], b.mul(args[1], word(8)), I64), align=8)
        return context.get_dummy_value()

    return signature, generate


def _exp(b: Any, x: Any) -> Any:
    """e^x for float32x16 at most 0.

    e^x = 2^n 2^f with n = round(x log2 e), |f| <= 1/2, and 2^f by its Taylor polynomial of degree 6 (error 1.2e-7). The
    rounding of x log2 e adds |x| 2^-24. Below -87 the result is 0, as for -inf.
    """
    tiny = b.fcmp_ordered("<", x, every(-87.0, VF))  # NaN is not tiny: it must stay visible
    y = b.fmul(b.select(tiny, every(0.0, VF), x), every(1.4426950408889634, VF))
    shifted = b.fadd(y, every(MAGIC, VF))
    f = b.fsub(y, b.fsub(shifted, every(MAGIC, VF)))
    value = every(_TERMS[0], VF)
    for term in _TERMS[1:]:
        value = fma(b, value, f, every(term, VF))
    power = b.bitcast(b.add(b.shl(b.bitcast(shifted, VI), every(23)), every(127 << 23)), VF)
    return b.select(tiny, every(0.0, VF), b.fmul(value, power))


@intrinsic
def softmax_row(typingctx: Any, scores: Any, before: Any) -> Any:
    """scores float32 [128] become e^(score - top), in place; returns top = max(before, scores) and their sum.

    A NaN is not the largest of anything, but its e^x is NaN.
    """
    signature = types.UniTuple(_F, 2)(_N, _F)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        scores, before = args
        places = [sixteen(b, scores, word(i)) for i in range(8)]
        values = [b.load(place, align=4) for place in places]
        tops = [larger(b, value, broadcast(b, before, VF)) for value in values]
        while len(tops) > 1:
            tops = [larger(b, *tops[i : i + 2]) for i in range(0, len(tops), 2)]
        top = largest_of(b, tops[0])
        wide = broadcast(b, top, VF)
        made = [_exp(b, b.fsub(value, wide)) for value in values]
        for value, place in zip(made, places, strict=True):
            b.store(value, place, align=4)
        while len(made) > 1:
            made = [b.fadd(*made[i : i + 2]) for i in range(0, len(made), 2)]
        return context.make_tuple(b, signature.return_type, (top, total_of(b, made[0])))

    return signature, generate


@intrinsic
def scale_row(typingctx: Any, row: Any, count: Any, factor: Any) -> Any:
    """row float32 [count] *= factor."""
    signature = types.void(_N, _N, _F)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        row, count, factor = args
        wide = broadcast(b, factor, VF)

        def step(i: Any, carried: list[Any]) -> list[Any]:
            b.store(b.fmul(b.load(sixteen(b, row, i), align=4), wide), sixteen(b, row, i), align=4)
            return []

        loop(b, sixteens(b, count), [], step)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def add_scaled(typingctx: Any, source: Any, factor: Any, count: Any, target: Any) -> Any:
    """target float32 [count] += factor * source."""
    signature = types.void(_N, _F, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, factor, count, target = args
        wide = broadcast(b, factor, VF)

        def step(i: Any, carried: list[Any]) -> list[Any]:
            there = b.load(sixteen(b, target, i), align=4)
            b.store(fma(b, b.load(sixteen(b, source, i), align=4), wide, there), sixteen(b, target, i), align=4)
            return []

        loop(b, sixteens(b, count), [], step)
        return context.get_dummy_value()

    return signature, generate


def _widened(row_of: Callable[[Any, list[Any]], Callable[[Any], Any]], signature: Any) -> tuple[Any, Any]:
    """target float32 [count] = source [count] of a dtype, times what `row_of` gives for the i-th vector."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, dtype, count, target = args[0], args[1], args[2], args[-1]
        factor = row_of(b, args)

        def of_dtype(kind: int) -> None:
            def step(i: Any, carried: list[Any]) -> list[Any]:
                b.store(b.fmul(load_widened(b, source, i, kind), factor(i)), sixteen(b, target, i), align=4)
                return []

            loop(b, sixteens(b, count), [], step)

        choose(b, dtype, (0, 1, 2), of_dtype)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def multiply_widened(typingctx: Any, factors: Any, dtype: Any, count: Any, row: Any) -> Any:
    """row float32 [count] *= factors [count] of `dtype`, as in `load_widened`."""
    return _widened(lambda b, args: lambda i: b.load(sixteen(b, args[-1], i), align=4), types.void(_N, _N, _N, _N))


@intrinsic
def widen_row(typingctx: Any, source: Any, dtype: Any, count: Any, factor: Any, target: Any) -> Any:
    """target float32 [count] = factor * source [count] of `dtype`, as in `load_widened`."""

    def constant(b: Any, args: list[Any]) -> Callable[[Any], Any]:
        wide = broadcast(b, args[3], VF)
        return lambda i: wide

    return _widened(constant, types.void(_N, _N, _N, _F, _N))


@intrinsic
def narrow_row(typingctx: Any, source: Any, factor: Any, count: Any, target: Any, dtype: Any) -> Any:
    """target [count] of `dtype` = factor * source float32 [count], rounded to nearest even."""
    signature = types.void(_N, _F, _N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, factor, count, target, dtype = args
        wide = broadcast(b, factor, VF)

        def of_dtype(kind: int) -> None:
            def step(i: Any, carried: list[Any]) -> list[Any]:
                store_narrowed(b, b.fmul(b.load(sixteen(b, source, i), align=4), wide), target, i, kind)
                return []

            loop(b, sixteens(b, count), [], step)

        choose(b, dtype, (0, 1, 2), of_dtype)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def copy_bytes(typingctx: Any, source: Any, target: Any, count: Any) -> Any:
    """Copies `count` bytes that do not overlap."""
    signature = types.void(_N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, target, count = args
        cgutils.raw_memcpy(b, at(b, target, 0, I8), at(b, source, 0, I8), count, 1)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def clear_bytes(typingctx: Any, target: Any, count: Any) -> Any:
    """Sets `count` bytes to zero."""
    signature = types.void(_N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        cgutils.memset(b, at(b, args[0], 0, I8), args[1], 0)
        return context.get_dummy_value()

    return signature, generate
