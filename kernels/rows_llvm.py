"""What attention does to rows of float32, as LLVM code in numba: fold metadata in, round to bytes, exp, scale, add.

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
    LANES,
    V8,
    VF,
    VI,
    at,
    broadcast,
    call,
    choose,
    every,
    fma,
    load_widened,
    loop,
    total_of,
    word,
)  # fmt: skip

_N, _F = types.intp, types.float32
DTYPES = (0, 1, 2)  # of `load_widened`
ROWS = (1, 2, 3, 4)


def _sixteens(b: Any, count: Any) -> Any:
    return b.sdiv(count, word(LANES))


def _row(b: Any, address: Any, i: Any) -> Any:
    return at(b, address, b.mul(i, word(LANES * 4)), VF)


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
def prefetch(typingctx: Any, address: Any, size: Any) -> Any:
    """Ask for `size` bytes, to be in the second-level cache soon. Any address will do."""
    signature = types.void(_N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        pointer, number = I8.as_pointer(), ir.Constant(I32, 0)
        kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
        ask = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0i8")

        def step(i: Any, carried: list[Any]) -> list[Any]:
            read, second_level, data = number, ir.Constant(I32, 2), ir.Constant(I32, 1)
            b.call(ask, [at(b, args[0], b.mul(i, word(64)), I8), read, second_level, data])
            return []

        loop(b, b.sdiv(b.add(args[1], word(63)), word(64)), [], step)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def read_meta(
    typingctx: Any, scale: Any, zero: Any, count: Any, middle: Any, factor: Any, offset: Any, dtype: Any
) -> Any:
    """factor = scale, offset = zero + middle * scale, float32; `zero` 0: offset = 0. dtype as in `load_widened`."""
    signature = types.void(_N, _N, _N, _F, _N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        scale, zero, count, middle, factor, offset, dtype = args
        grouped = b.icmp_signed("!=", zero, word(0))
        # without a zero the scales stand in for it, so that the load is of real memory
        source = b.select(grouped, zero, scale)
        mid = broadcast(b, middle, VF)

        def of_dtype(kind: int) -> None:
            def step(i: Any, carried: list[Any]) -> list[Any]:
                s = load_widened(b, scale, i, kind)
                b.store(s, _row(b, factor, i), align=4)
                moved = fma(b, s, mid, load_widened(b, source, i, kind))
                b.store(b.select(grouped, moved, every(0.0, VF)), _row(b, offset, i), align=4)
                return []

            loop(b, _sixteens(b, count), [], step)

        choose(b, dtype, DTYPES, of_dtype)
        return context.get_dummy_value()

    return signature, generate


LARGEST_WEIGHT = 127 * 128 + 63  # both bytes of it are within +-127
_MAGIC, _MAGIC_BITS = 12582912.0, 0x4B400000  # 1.5 * 2^23: adding it leaves the rounded value in the low bits


@intrinsic
def fold_bytes(
    typingctx: Any,
    values: Any,
    pitch: Any,
    meta: Any,
    count: Any,
    weights: Any,
    width: Any,
    middle: Any,
    ends: Any,
    rows: Any,
) -> Any:
    """weights int8 [rows, 2, width]: 128 * high + low = round_half_even(values * factor / step), and the dots' ends.

    values float32 [rows, count] `pitch` bytes apart; meta float32 [2, width]: factor, offset. A row's step is the
    largest magnitude of values * factor over LARGEST_WEIGHT. ends float32 [rows, 2]: step, and values . offset -
    middle * step * sum of the rounded weights. Rows go together so that their reductions overlap.
    """
    signature = types.void(_N, _N, _N, _N, _N, _N, _F, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        values, pitch, meta, count, weights, width, middle, ends, rows = args

        def of_rows(many: int) -> None:
            sources = [b.add(values, b.mul(pitch, word(row))) for row in range(many)]
            steps, rests = _measure(b, sources, meta, width, count)
            places = [b.add(weights, b.mul(width, word(2 * row))) for row in range(many)]
            sums = _write_bytes(b, sources, [_inverse(b, step) for step in steps], meta, count, (places, width))
            for row, (total, step, rest) in enumerate(zip(sums, steps, rests, strict=True)):
                shift = b.fmul(middle, b.fmul(step, b.sitofp(total, F32)))
                b.store(step, at(b, ends, 8 * row, F32), align=4)
                b.store(b.fsub(rest, shift), at(b, ends, 8 * row + 4, F32), align=4)

        choose(b, rows, ROWS, of_rows)
        return context.get_dummy_value()

    return signature, generate


def _measure(b: Any, sources: list[Any], meta: Any, width: Any, count: Any) -> tuple[list[Any], list[Any]]:
    """Each row's step and its dot product with the offsets."""
    offset = b.add(meta, b.mul(width, word(4)))

    def step(i: Any, carried: list[Any]) -> list[Any]:
        factors, offsets = b.load(_row(b, meta, i), align=4), b.load(_row(b, offset, i), align=4)
        made = []
        for row, source in enumerate(sources):
            x = b.load(_row(b, source, i), align=4)
            size = call(b, "llvm.fabs.v16f32", VF, b.fmul(x, factors))
            made.append(call(b, "llvm.maxnum.v16f32", VF, carried[2 * row], size))
            made.append(fma(b, x, offsets, carried[2 * row + 1]))
        return made

    parts = loop(b, _sixteens(b, count), [every(0.0, VF)] * (2 * len(sources)), step)
    tops = [call(b, "llvm.vector.reduce.fmax.v16f32", F32, top) for top in parts[::2]]
    steps = [b.fdiv(top, ir.Constant(F32, float(LARGEST_WEIGHT))) for top in tops]
    return steps, [total_of(b, dot) for dot in parts[1::2]]


def _inverse(b: Any, step: Any) -> Any:
    """1 / step in all lanes; 0 for a row of (nearly) nothing, whose inverse would be infinite."""
    one = ir.Constant(F32, 1.0)
    some = b.fcmp_ordered(">", step, ir.Constant(F32, 1e-34))
    return broadcast(b, b.select(some, b.fdiv(one, b.select(some, step, one)), ir.Constant(F32, 0.0)), VF)


def _write_bytes(
    b: Any, sources: list[Any], inverses: list[Any], meta: Any, count: Any, target: tuple[list[Any], Any]
) -> list[Any]:
    """The two bytes of each weight, to `target` (addresses, bytes from high to low); returns each row's sum."""
    places, width = target

    def step(i: Any, carried: list[Any]) -> list[Any]:
        factors, lane, made = b.load(_row(b, meta, i), align=4), b.mul(i, word(LANES)), []
        for source, inverse, place, total in zip(sources, inverses, places, carried, strict=True):
            folded = b.fmul(b.load(_row(b, source, i), align=4), factors)
            rounded = b.sub(b.bitcast(fma(b, folded, inverse, every(_MAGIC, VF)), VI), every(_MAGIC_BITS))
            upper = b.ashr(b.add(rounded, every(64)), every(7))
            lower = b.sub(rounded, b.shl(upper, every(7)))
            b.store(b.trunc(upper, V8), at(b, place, lane, V8), align=1)
            b.store(b.trunc(lower, V8), at(b, b.add(place, width), lane, V8), align=1)
            made.append(b.add(total, rounded))
        return made

    sums = loop(b, _sixteens(b, count), [every(0)] * len(sources), step)
    return [call(b, "llvm.vector.reduce.add.v16i32", I32, total) for total in sums]


@intrinsic
def fold_floats(
    typingctx: Any, values: Any, meta: Any, count: Any, width: Any, folded: Any, middle: Any, ends: Any
) -> Any:
    """As `fold_bytes` for one row, but folded float32 = values * factor as it is; its step is 1."""
    signature = types.void(_N, _N, _N, _N, _N, _F, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        values, meta, count, width, folded, middle, ends = args
        offset = b.add(meta, b.mul(width, word(4)))

        def step(i: Any, carried: list[Any]) -> list[Any]:
            x = b.load(_row(b, values, i), align=4)
            y = b.fmul(x, b.load(_row(b, meta, i), align=4))
            b.store(y, _row(b, folded, i), align=4)
            return [fma(b, x, b.load(_row(b, offset, i), align=4), carried[0]), b.fadd(carried[1], y)]

        dot, total = loop(b, _sixteens(b, count), [every(0.0, VF)] * 2, step)
        rest = b.fsub(total_of(b, dot), b.fmul(middle, total_of(b, total)))
        b.store(ir.Constant(F32, 1.0), at(b, ends, 0, F32), align=4)
        b.store(rest, at(b, ends, 4, F32), align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def exp_below(typingctx: Any, scores: Any, count: Any, highest: Any) -> Any:
    """scores float32 [count] become e^(score - highest), in place; returns their sum. Scores are at most `highest`.

    e^x = 2^n 2^f with n = round(x log2 e), |f| <= 1/2, and 2^f by its Taylor polynomial of degree 6 (error 1.2e-7). The
    rounding of x log2 e adds |x| 2^-24. Below -87 the result is 0, as for -inf.
    """
    signature = types.float32(_N, _N, _F)
    terms = [0.000154035, 0.001333356, 0.009618129, 0.055504109, 0.240226507, 0.693147181, 1.0]  # ln(2)^k / k!

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        scores, count, highest = args
        top = broadcast(b, highest, VF)

        def step(i: Any, carried: list[Any]) -> list[Any]:
            x = b.fsub(b.load(_row(b, scores, i), align=4), top)
            tiny = b.fcmp_ordered("<", x, every(-87.0, VF))  # NaN is not tiny: it must stay visible
            y = b.fmul(b.select(tiny, every(0.0, VF), x), every(1.4426950408889634, VF))
            n = call(b, "llvm.rint.v16f32", VF, y)
            f = b.fsub(y, n)
            value = every(terms[0], VF)
            for term in terms[1:]:
                value = fma(b, value, f, every(term, VF))
            power = b.bitcast(b.shl(b.add(b.fptosi(n, VI), every(127)), every(23)), VF)
            value = b.select(tiny, every(0.0, VF), b.fmul(value, power))
            b.store(value, _row(b, scores, i), align=4)
            return [b.fadd(carried[0], value)]

        (total,) = loop(b, _sixteens(b, count), [every(0.0, VF)], step)
        return total_of(b, total)

    return signature, generate


@intrinsic
def row_max(typingctx: Any, row: Any, count: Any) -> Any:
    """The largest of float32 [count]; NaN is passed over."""
    signature = types.float32(_N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        row, count = args

        def step(i: Any, carried: list[Any]) -> list[Any]:
            return [call(b, "llvm.maxnum.v16f32", VF, carried[0], b.load(_row(b, row, i), align=4))]

        (top,) = loop(b, _sixteens(b, count), [every(float("-inf"), VF)], step)
        return call(b, "llvm.vector.reduce.fmax.v16f32", F32, top)

    return signature, generate


@intrinsic
def scale_row(typingctx: Any, row: Any, count: Any, factor: Any) -> Any:
    """row float32 [count] *= factor."""
    signature = types.void(_N, _N, _F)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        row, count, factor = args
        wide = broadcast(b, factor, VF)

        def step(i: Any, carried: list[Any]) -> list[Any]:
            b.store(b.fmul(b.load(_row(b, row, i), align=4), wide), _row(b, row, i), align=4)
            return []

        loop(b, _sixteens(b, count), [], step)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def multiply_row(typingctx: Any, row: Any, other: Any, count: Any) -> Any:
    """row float32 [count] *= other float32 [count]."""
    signature = types.void(_N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        row, other, count = args

        def step(i: Any, carried: list[Any]) -> list[Any]:
            product = b.fmul(b.load(_row(b, row, i), align=4), b.load(_row(b, other, i), align=4))
            b.store(product, _row(b, row, i), align=4)
            return []

        loop(b, _sixteens(b, count), [], step)
        return context.get_dummy_value()

    return signature, generate


def _for_each_kind(b: Any, dtype: Any, rows: Any, emit: Callable[[int, int], None]) -> None:
    choose(b, dtype, DTYPES, lambda kind: choose(b, rows, ROWS, lambda many: emit(kind, many)))


@intrinsic
def exact_scores(typingctx: Any, q: Any, keys: Any, tokens: Any, count: Any, scores: Any, dtype: Any, rows: Any) -> Any:
    """scores float32 [rows, 128]: q float32 [rows, count] . keys [tokens, count] of `dtype`, for the first `tokens`."""
    signature = types.void(_N, _N, _N, _N, _N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        q, keys, tokens, count, scores, dtype, rows = args

        def emit(kind: int, many: int) -> None:
            sources = [b.add(q, b.mul(count, word(4 * row))) for row in range(many)]

            def token(t: Any, carried: list[Any]) -> list[Any]:
                address = b.add(keys, b.mul(t, b.mul(count, word(4 if kind == 2 else 2))))

                def step(i: Any, totals: list[Any]) -> list[Any]:
                    key = load_widened(b, address, i, kind)
                    queries = [b.load(_row(b, source, i), align=4) for source in sources]
                    return [fma(b, query, key, total) for query, total in zip(queries, totals, strict=True)]

                totals = loop(b, _sixteens(b, count), [every(0.0, VF)] * many, step)
                for row, total in enumerate(totals):
                    b.store(total_of(b, total), at(b, scores, b.add(b.mul(t, word(4)), word(512 * row)), F32), align=4)
                return []

            loop(b, tokens, [], token)

        _for_each_kind(b, dtype, rows, emit)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def exact_outputs(
    typingctx: Any, scores: Any, values: Any, tokens: Any, count: Any, out: Any, dtype: Any, rows: Any
) -> Any:
    """out float32 [rows, count] += scores float32 [rows, 128] . values [tokens, count] of `dtype`."""
    signature = types.void(_N, _N, _N, _N, _N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        scores, values, tokens, count, out, dtype, rows = args

        def emit(kind: int, many: int) -> None:
            size = b.mul(count, word(4 if kind == 2 else 2))

            def lanes(i: Any, carried: list[Any]) -> list[Any]:
                places = [_row(b, b.add(out, b.mul(count, word(4 * row))), i) for row in range(many)]

                def token(t: Any, totals: list[Any]) -> list[Any]:
                    value = load_widened(b, b.add(values, b.mul(t, size)), i, kind)
                    offsets = [b.add(b.mul(t, word(4)), word(512 * row)) for row in range(many)]
                    weights = [broadcast(b, b.load(at(b, scores, o, F32), align=4), VF) for o in offsets]
                    return [fma(b, weight, value, total) for weight, total in zip(weights, totals, strict=True)]

                totals = loop(b, tokens, [b.load(place, align=4) for place in places], token)
                for place, total in zip(places, totals, strict=True):
                    b.store(total, place, align=4)
                return []

            loop(b, _sixteens(b, count), [], lanes)

        _for_each_kind(b, dtype, rows, emit)
        return context.get_dummy_value()

    return signature, generate
