"""Tiles of codes to one byte a code and back, as LLVM code in numba. docs/record.md has the picture of a tile.

A unit is sixteen of the values that are summed over, for sixteen lanes: four vectors ("quads") whose lane l holds four
adjacent codes, whatever the bits. Bytes are uint8 [128, D], tokens first.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from qkv.kernels.vectors_llvm import I32, I64, V8, VI, at, broadcast, choose, every, loop, word

BITS = (2, 4, 8, 12)  # 10 * bits of the high plane + bits of the low one: 3-bit codes are 12
_N = types.intp
_PAIRS = ir.VectorType(I64, 8)
_ROW = ir.VectorType(I32, 4)


def _shuffled(b: Any, x: Any, y: Any, order: list[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(order)), order))


def _woven(b: Any, x: Any, y: Any) -> list[Any]:
    """x0 y0 x1 y1 ..., in two vectors."""
    n = x.type.count
    order = [i // 2 + n * (i % 2) for i in range(2 * n)]
    return [_shuffled(b, x, y, order[:n]), _shuffled(b, x, y, order[n:])]


def _parted(b: Any, x: Any, y: Any) -> list[Any]:
    """Inverse of `_woven`."""
    n = x.type.count
    return [_shuffled(b, x, y, [2 * i + odd for i in range(n)]) for odd in (0, 1)]


def _to_rows(b: Any, quads: list[Any]) -> list[Any]:
    """Four quads -> four vectors of four lanes each, a lane's sixteen codes in order."""
    low, high = _woven(b, *quads[:2]), _woven(b, *quads[2:])
    halves = [(b.bitcast(x, _PAIRS), b.bitcast(y, _PAIRS)) for x, y in zip(low, high, strict=True)]
    return [b.bitcast(row, VI) for half in halves for row in _woven(b, *half)]


def _from_rows(b: Any, rows: list[Any]) -> list[Any]:
    """Inverse of `_to_rows`."""
    pairs = [b.bitcast(row, _PAIRS) for row in rows]
    first, second = _parted(b, *pairs[:2]), _parted(b, *pairs[2:])
    halves = [(b.bitcast(x, VI), b.bitcast(y, VI)) for x, y in zip(first, second, strict=True)]
    return [quad for half in halves for quad in _parted(b, *half)]


def _place(b: Any, plane: Any, unit: Any, bits: int, quad: int) -> tuple[Any, Any]:
    """Where the tile of a unit's quad lies, and the quad's shift in it (a Python int, or a vector for one bit)."""
    if bits == 1:  # a tile is two units
        shift = b.shl(b.trunc(b.and_(unit, word(1)), I32), ir.Constant(I32, 2))
        moved = b.add(broadcast(b, shift, VI), every(quad))
        return at(b, plane, b.shl(b.lshr(unit, word(1)), word(6)), VI), moved
    slots = 8 // bits
    tile = b.add(b.mul(unit, word(4 // slots)), word(quad // slots))
    return at(b, plane, b.shl(tile, word(6)), VI), every(bits * (quad % slots))


def _read(b: Any, plane: Any, unit: Any, bits: int) -> list[Any]:
    """A unit's four quads from one plane."""
    quads = []
    for quad in range(4):
        tile, shift = _place(b, plane, unit, bits, quad)
        quads.append(b.and_(b.lshr(b.load(tile, align=1), shift), every(((1 << bits) - 1) * 0x01010101)))
    return quads


def _write(b: Any, quads: list[Any], plane: Any, unit: Any, bits: int) -> None:
    """Inverse of `_read`; into memory that is zero."""
    for quad, codes in enumerate(quads):
        tile, shift = _place(b, plane, unit, bits, quad)
        codes = b.and_(codes, every(((1 << bits) - 1) * 0x01010101))
        b.store(b.or_(b.load(tile, align=1), b.shl(codes, shift)), tile, align=1)


def _each_unit(b: Any, dim: Any, is_value: int, planes: tuple[Any, Any], bits: int, emit: Callable[..., None]) -> None:
    """`emit(group, unit, low plane, high plane)` for every lane group and every sixteen summed values."""
    lanes, summed = (dim, word(128)) if is_value else (word(128), dim)
    low, high = planes

    def group(g: Any, carried: list[Any]) -> list[Any]:
        def start(plane: Any, width: int) -> Any:
            columns = b.lshr(b.add(b.mul(summed, word(width)), word(31)), word(5))
            return b.add(plane, b.mul(g, b.shl(columns, word(6))))

        starts = start(low, bits % 10), start(high, bits // 10)

        def unit(u: Any, carried: list[Any]) -> list[Any]:
            emit(g, u, *starts)
            return []

        loop(b, b.lshr(summed, word(4)), [], unit)
        return []

    loop(b, b.lshr(lanes, word(4)), [], group)


def _byte_place(b: Any, codes: Any, dim: Any, token: tuple[Any, int], unit: Any, kind: ir.Type) -> Any:
    """Sixteen bytes: `unit` counts sixteen channels; token = sixteens, and one of them."""
    row = b.add(b.shl(token[0], word(4)), word(token[1]))
    return at(b, codes, b.add(b.mul(row, dim), b.shl(unit, word(4))), kind)


def _cases(b: Any, bits: Any, is_value: Any, emit: Callable[[int, int], None]) -> None:
    choose(b, is_value, (0, 1), lambda value: choose(b, bits, BITS, lambda case: emit(case, value)))


@intrinsic
def unpack(typingctx: Any, low: Any, high: Any, bits: Any, is_value: Any, dim: Any, codes: Any) -> Any:
    """codes uint8 [128, dim] from the planes at `low` and `high`, which is read for bits = 12 only."""
    signature = types.void(_N, _N, _N, _N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        low, high, bits, is_value, dim, codes = args

        def emit(case: int, value: int) -> None:
            def unit(g: Any, u: Any, lower: Any, upper: Any) -> None:
                quads = _read(b, lower, u, case % 10)
                if case // 10:
                    more = _read(b, upper, u, case // 10)
                    quads = [b.or_(x, b.shl(y, every(case % 10))) for x, y in zip(quads, more, strict=True)]
                if value:
                    for i in range(16):
                        byte = b.trunc(b.lshr(quads[i // 4], every(8 * (i % 4))), V8)
                        b.store(byte, _byte_place(b, codes, dim, (u, i), g, V8), align=1)
                    return
                rows = _to_rows(b, quads)
                for i in range(16):
                    row = _shuffled(b, rows[i // 4], rows[i // 4], [4 * (i % 4) + j for j in range(4)])
                    b.store(row, _byte_place(b, codes, dim, (g, i), u, _ROW), align=1)

            _each_unit(b, dim, value, (low, high), case, unit)

        _cases(b, bits, is_value, emit)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def pack(typingctx: Any, low: Any, high: Any, bits: Any, is_value: Any, dim: Any, codes: Any) -> Any:
    """Inverse of `unpack`: the planes, which must be zero before, from codes uint8 [128, dim]."""
    signature = types.void(_N, _N, _N, _N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        low, high, bits, is_value, dim, codes = args

        def four_rows(g: Any, u: Any, first: int) -> Any:
            parts = [b.load(_byte_place(b, codes, dim, (g, first + i), u, _ROW), align=1) for i in range(4)]
            halves = [_shuffled(b, parts[i], parts[i + 1], list(range(8))) for i in (0, 2)]
            return _shuffled(b, halves[0], halves[1], list(range(16)))

        def four_tokens(g: Any, u: Any, first: int) -> Any:
            total = every(0)
            for i in range(4):
                byte = b.zext(b.load(_byte_place(b, codes, dim, (u, first + i), g, V8), align=1), VI)
                total = b.or_(total, b.shl(byte, every(8 * i)))
            return total

        def emit(case: int, value: int) -> None:
            def unit(g: Any, u: Any, lower: Any, upper: Any) -> None:
                if value:
                    quads = [four_tokens(g, u, 4 * i) for i in range(4)]
                else:
                    quads = _from_rows(b, [four_rows(g, u, 4 * i) for i in range(4)])
                _write(b, quads, lower, u, case % 10)
                if case // 10:
                    _write(b, [b.lshr(quad, every(case % 10)) for quad in quads], upper, u, case // 10)

            _each_unit(b, dim, value, (low, high), case, unit)

        _cases(b, bits, is_value, emit)
        return context.get_dummy_value()

    return signature, generate
