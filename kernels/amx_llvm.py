"""Rows of tiles times query rows on AMX, the matrix unit of Xeon CPUs since 2023, as LLVM code in numba.

A record's tile of operands is one row of AMX's B matrix: 16 lanes x 4 adjacent bytes. So sixteen operands, 64 values
that are summed over, are one B tile: 8-bit codes where they lie, smaller ones unpacked to a buffer in the cache first.
A holds the bytes of the weights. Registers: 0 sums, 1 weights, 2 codes (Intel Architecture Instruction Set Extensions
Programming Reference, chapter 3).
"""

import ctypes
import platform
import sys
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from qkv.kernels.vectors_llvm import F32, I8, I64, VF, VI, at, broadcast, choose, every, fma, has, loop, word

MOST_ROWS = 8  # query rows, two bytes a weight: the 16 rows of a tile
UNPACKED_BITS = (2, 4, 12)  # as BITS of tiles_llvm; 8 needs no unpacking
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux on x86-64
_SUMS, _WEIGHTS, _CODES = 0, 1, 2
_N = types.intp


@cache
def has_amx() -> bool:
    """Whether code for AMX can be generated and this process may run it: Linux asks for a permission first."""
    if not (has("amx-int8") and has("amx-tile") and sys.platform == "linux" and platform.machine() == "x86_64"):
        return False
    granted: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return granted == 0


def _do(b: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{name}"), args)


def _tile(number: int) -> Any:
    return ir.Constant(I8, number)


@intrinsic
def configure(typingctx: Any, rows: Any, scratch: Any) -> Any:
    """Give this thread tile registers for `rows` query rows, until `release`. scratch: 64 bytes."""
    signature = types.void(_N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        rows, scratch = args
        if not has("amx-tile"):
            return context.get_dummy_value()
        for i in range(8):
            b.store(ir.Constant(I64, 1 if i == 0 else 0), at(b, scratch, 8 * i, I64), align=1)
        pair = b.trunc(b.mul(rows, word(2)), I8)
        for register, count in ((_SUMS, pair), (_WEIGHTS, pair), (_CODES, ir.Constant(I8, 16))):
            b.store(ir.Constant(I8, 64), at(b, scratch, 16 + 2 * register, I8))
            b.store(count, at(b, scratch, 48 + register, I8))
        _do(b, "ldtilecfg", at(b, scratch, 0, I8))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def release(typingctx: Any) -> Any:
    """Give the tile registers back: a thread that holds them is slower to switch away from."""
    signature = types.void()

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if has("amx-tile"):
            _do(b, "tilerelease")
        return context.get_dummy_value()

    return signature, generate


def _operands(b: Any, codes: tuple[Any, Any], column: Any, kind: int) -> list[Any]:
    """The operands of one low-plane tile, int32x16 each: its slots, with the high plane's bit on top."""
    bits = kind % 10
    mask = every(((1 << bits) - 1) * 0x01010101)
    tile = b.load(at(b, codes[0], b.mul(column, word(64)), VI), align=1)
    slots = 8 // bits
    made = [b.and_(b.lshr(tile, every(bits * slot)) if slot else tile, mask) for slot in range(slots)]
    if kind < 10:
        return made
    # one bit of the high plane: a tile of it serves two of the low plane's
    high = b.load(at(b, codes[1], b.mul(b.ashr(column, word(1)), word(64)), VI), align=1)
    skip = b.trunc(b.mul(b.and_(column, word(1)), word(slots)), VI.element)
    high = b.lshr(high, broadcast(b, skip, VI))
    tops = [b.and_(b.lshr(high, every(slot)), every(0x01010101)) for slot in range(slots)]
    return [b.or_(low, b.shl(top, every(bits))) for low, top in zip(made, tops, strict=True)]


@intrinsic
def unpack(typingctx: Any, codes: Any, columns: Any, bits: Any, target: Any) -> Any:
    """target uint8 [operands, 64]: the codes of one lane group, a byte each. codes: addresses of low and high plane."""
    signature = types.void(types.UniTuple(_N, 2), _N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        codes, columns, bits, target = args
        planes = (b.extract_value(codes, 0), b.extract_value(codes, 1))

        def of_bits(kind: int) -> None:
            slots = 8 // (kind % 10)

            def column(i: Any, carried: list[Any]) -> list[Any]:
                place = b.add(target, b.mul(i, word(64 * slots)))
                for slot, operand in enumerate(_operands(b, planes, i, kind)):
                    b.store(operand, at(b, place, 64 * slot, VI), align=1)
                return []

            loop(b, columns, [], column)

        choose(b, bits, UNPACKED_BITS, of_bits)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def multiply(typingctx: Any, weights: Any, stride: Any, operands: Any, chunks: Any, sums: Any) -> Any:
    """sums int32 [2 * rows, 16] = weights int8 [2 * rows, 64 * chunks], `stride` bytes apart, x operands uint8."""
    signature = types.void(_N, _N, _N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        weights, stride, operands, chunks, sums = args
        if not has("amx-int8"):
            return context.get_dummy_value()
        _do(b, "tilezero", _tile(_SUMS))

        def chunk(c: Any, carried: list[Any]) -> list[Any]:
            _do(b, "tileloadd64", _tile(_WEIGHTS), at(b, weights, b.mul(c, word(64)), I8), stride)
            _do(b, "tileloadd64", _tile(_CODES), at(b, operands, b.mul(c, word(1024)), I8), word(64))
            _do(b, "tdpbsud", _tile(_SUMS), _tile(_WEIGHTS), _tile(_CODES))
            return []

        loop(b, chunks, [], chunk)
        _do(b, "tilestored64", _tile(_SUMS), at(b, sums, 0, I8), word(64))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def finish(typingctx: Any, sums: Any, ends: Any, out: Any, pitch: Any, rows: Any, add: Any) -> Any:
    """out float32 [rows, 16], `pitch` bytes apart, = step * (128 * high + low sum) + rest, or += if `add`.

    sums int32 [2 * rows, 16]; ends float32 [rows, 2]: step and rest.
    """
    signature = types.void(_N, _N, _N, _N, _N, types.boolean)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        sums, ends, out, pitch, rows, add = args

        def row(r: Any, carried: list[Any]) -> list[Any]:
            high, low = (b.load(at(b, sums, b.add(b.mul(r, word(128)), word(64 * i)), VI), align=4) for i in (0, 1))
            dot = b.sitofp(b.add(b.shl(high, every(7)), low), VF)
            step, rest = (
                broadcast(b, b.load(at(b, ends, b.add(b.mul(r, word(8)), word(4 * i)), F32), align=4), VF)
                for i in (0, 1)
            )
            place = at(b, out, b.mul(pitch, r), VF)
            there = b.select(add, b.load(place, align=4), every(0.0, VF))
            b.store(fma(b, dot, step, b.fadd(rest, there)), place, align=4)
            return []

        loop(b, rows, [], row)
        return context.get_dummy_value()

    return signature, generate
