"""Attention over exact tokens, as LLVM code in numba: float32 sums, K and V widened from the model dtype.

Arguments are addresses; `count`, the channels, is a multiple of 16. Up to four query rows share each load.
"""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from qkv.kernels.vectors_llvm import (
    F32,
    VF,
    at,
    broadcast,
    choose,
    every,
    fma,
    four_totals,
    load_widened,
    loop,
    sixteen,
    sixteens,
    word,
)  # fmt: skip

DTYPES = (0, 1, 2)  # of `load_widened`
ROWS = (1, 2, 3, 4)
_TOKENS = 4  # whose sums over lanes are taken together
_N = types.intp


def _for_each_kind(b: Any, dtype: Any, rows: Any, emit: Callable[[int, int], None]) -> None:
    choose(b, dtype, DTYPES, lambda kind: choose(b, rows, ROWS, lambda many: emit(kind, many)))


@intrinsic
def exact_scores(
    typingctx: Any, q: Any, pitch: Any, keys: Any, tokens: Any, count: Any, scores: Any, dtype: Any, rows: Any
) -> Any:
    """scores float32 [rows, 128]: q float32 [rows, count] . keys [tokens, count] of `dtype`, for 1 to 128 tokens.

    Rows of q are `pitch` bytes apart. Scores up to the next multiple of four tokens are written, with anything.
    """
    signature = types.void(_N, _N, _N, _N, _N, _N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        q, pitch, keys, tokens, count, scores, dtype, rows = args
        last = b.sub(tokens, word(1))

        def emit(kind: int, many: int) -> None:
            sources = [b.add(q, b.mul(pitch, word(row))) for row in range(many)]
            size = b.mul(count, word(4 if kind == 2 else 2))

            def four(t: Any, carried: list[Any]) -> list[Any]:
                first = b.mul(t, word(_TOKENS))
                wanted = [b.add(first, word(i)) for i in range(_TOKENS)]
                # never beyond the last token, which may be the last bytes of their memory
                held = [b.select(b.icmp_signed("<", i, tokens), i, last) for i in wanted]
                addresses = [b.add(keys, b.mul(i, size)) for i in held]

                def step(i: Any, totals: list[Any]) -> list[Any]:
                    loaded = [load_widened(b, address, i, kind) for address in addresses]
                    queries = [b.load(sixteen(b, source, i), align=4) for source in sources]
                    return [fma(b, queries[n // _TOKENS], loaded[n % _TOKENS], total) for n, total in enumerate(totals)]

                totals = loop(b, sixteens(b, count), [every(0.0, VF)] * (many * _TOKENS), step)
                for row in range(many):
                    made = four_totals(b, totals[row * _TOKENS : (row + 1) * _TOKENS])
                    place = b.add(b.mul(first, word(4)), word(512 * row))
                    b.store(made, at(b, scores, place, made.type), align=4)
                return []

            loop(b, b.sdiv(b.add(tokens, word(_TOKENS - 1)), word(_TOKENS)), [], four)

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
                places = [sixteen(b, b.add(out, b.mul(count, word(4 * row))), i) for row in range(many)]

                def token(t: Any, totals: list[Any]) -> list[Any]:
                    value = load_widened(b, b.add(values, b.mul(t, size)), i, kind)
                    offsets = [b.add(b.mul(t, word(4)), word(512 * row)) for row in range(many)]
                    weights = [broadcast(b, b.load(at(b, scores, o, F32), align=4), VF) for o in offsets]
                    return [fma(b, weight, value, total) for weight, total in zip(weights, totals, strict=True)]

                totals = loop(b, tokens, [b.load(place, align=4) for place in places], token)
                for place, total in zip(places, totals, strict=True):
                    b.store(total, place, align=4)
                return []

            loop(b, sixteens(b, count), [], lanes)

        _for_each_kind(b, dtype, rows, emit)
        return context.get_dummy_value()

    return signature, generate
