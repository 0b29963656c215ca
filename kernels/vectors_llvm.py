"""Building blocks of 16-lane LLVM code for numba intrinsics. Loads assume no alignment beyond that of the element."""

import platform
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, config

LANES = 16
I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F16, F32 = ir.HalfType(), ir.FloatType()
VI, VF, V8, V16 = (ir.VectorType(kind, LANES) for kind in (I32, F32, I8, I16))
VH = ir.VectorType(F16, LANES)
MAGIC, MAGIC_BITS = 12582912.0, 0x4B400000  # 1.5 * 2^23: adding it leaves the rounded value in the low bits


def has(feature: str) -> bool:
    """Whether code is generated for an x86 CPU with `feature`; obeys NUMBA_CPU_NAME and NUMBA_CPU_FEATURES."""
    features, name = getattr(config, "CPU_FEATURES", None), getattr(config, "CPU_NAME", None)
    if features is not None:
        return f"+{feature}" in features.split(",")
    return name is None and bool(llvm.get_host_cpu_features().get(feature))


def word(value: int) -> Any:
    """An address-sized constant."""
    return ir.Constant(I64, value)


def every(value: float, kind: ir.VectorType = VI) -> Any:
    """The same constant in all lanes."""
    return ir.Constant(kind, [value] * LANES)


def at(b: Any, address: Any, offset: Any, kind: ir.Type) -> Any:
    """A pointer to `kind` at address + offset bytes."""
    return b.inttoptr(b.add(address, word(offset) if isinstance(offset, int) else offset), kind.as_pointer())


def sixteens(b: Any, count: Any) -> Any:
    """How many vectors `count` values are."""
    return b.sdiv(count, word(LANES))


def sixteen(b: Any, address: Any, i: Any) -> Any:
    """A pointer to the i-th vector of float32 at an address."""
    return at(b, address, b.mul(i, word(LANES * 4)), VF)


def broadcast(b: Any, scalar: Any, kind: ir.VectorType) -> Any:
    """The same run-time value in all lanes."""
    undefined = ir.Constant(kind, ir.Undefined)
    return b.shuffle_vector(b.insert_element(undefined, scalar, ir.Constant(I32, 0)), undefined, every(0))


def call(b: Any, name: str, result: ir.Type, *args: Any) -> Any:
    """An LLVM intrinsic by its name."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return call(b, "llvm.fma.v16f32", VF, x, y, z)


def total_of(b: Any, lanes: Any) -> Any:
    """The sum over float lanes, in any order."""
    kind = ir.FunctionType(F32, [F32, VF])
    sum_ = cgutils.get_or_insert_function(b.module, kind, "llvm.vector.reduce.fadd.v16f32")
    return b.call(sum_, [ir.Constant(F32, 0.0), lanes], fastmath=("reassoc",))


def larger(b: Any, x: Any, y: Any) -> Any:
    """Lane by lane, x where it is greater than y, else y: a NaN in x is passed over."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def largest_of(b: Any, lanes: Any) -> Any:
    """The largest of float lanes, none of them NaN."""
    count = LANES
    while count > 1:
        count //= 2
        parts = (ir.Constant(ir.VectorType(I32, count), list(range(first, first + count))) for first in (0, count))
        lanes = larger(b, *(b.shuffle_vector(lanes, lanes, part) for part in parts))
    return b.extract_element(lanes, ir.Constant(I32, 0))


def four_totals(b: Any, vectors: list[Any]) -> Any:
    """The sums over lanes of four float32x16, as float32x4, in any order."""

    def shuffled(first: Any, second: Any, lanes: list[int]) -> Any:
        return b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))

    def halves(first: Any, second: Any, low: list[int]) -> Any:
        return b.fadd(shuffled(first, second, low), shuffled(first, second, [lane + 2 for lane in low]))

    # within each four lanes: a0 b0 a1 b1 + a2 b2 a3 b3, then the same by twos
    ones = [four + lane for four in range(0, LANES, 4) for lane in (0, LANES, 1, LANES + 1)]
    twos = [four + lane for four in range(0, LANES, 4) for lane in (0, 1, LANES, LANES + 1)]
    first, second, third, fourth = vectors
    quads = halves(halves(first, second, ones), halves(third, fourth, ones), twos)
    half = b.fadd(*(shuffled(quads, quads, list(range(first, first + 8))) for first in (0, 8)))
    return b.fadd(*(shuffled(half, half, list(range(first, first + 4))) for first in (0, 4)))


def dot_step(b: Any, total: Any, codes: Any, weights: Any) -> Any:
    """total int32x16 + u8 codes . s8 weights, four bytes a lane: one instruction with AVX512-VNNI."""
    if has("avx512vnni"):
        return call(b, "llvm.x86.avx512.vpdpbusd.512", VI, total, codes, weights)
    for byte in range(4):
        code = b.and_(b.lshr(codes, every(8 * byte)), every(255))
        signed = b.ashr(b.shl(weights, every(24 - 8 * byte)), every(24))
        total = b.add(total, b.mul(code, signed))
    return total


def bits_of(b: Any, mask: int, first: Any, second: Any) -> Any:
    """Bits of `first` where `mask` has ones, of `second` elsewhere; int32x16."""
    if has("avx512f"):  # as one instruction: left to itself, LLVM may make it a dearer byte permutation
        return call(b, "llvm.x86.avx512.pternlog.d.512", VI, every(mask), first, second, ir.Constant(I32, 0xCA))
    return b.or_(b.and_(first, every(mask)), b.and_(second, every(mask ^ 0xFFFFFFFF)))


def loop(b: Any, count: Any, initial: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """`body(i, values) -> values` for i in 0..count-1, with values carried in registers. count may be 0."""
    entry = b.block
    head, done = b.append_basic_block("loop"), b.append_basic_block("done")
    b.cbranch(b.icmp_signed(">", count, word(0)), head, done)
    b.position_at_end(head)
    i = b.phi(I64)
    carried = [b.phi(value.type) for value in initial]
    made = body(i, carried)
    following = b.add(i, word(1))
    for phi, start, value in zip([i, *carried], [word(0), *initial], [following, *made], strict=True):
        phi.add_incoming(start, entry)
        phi.add_incoming(value, b.block)
    end = b.block
    b.cbranch(b.icmp_signed("<", following, count), head, done)
    b.position_at_end(done)
    results = [b.phi(value.type) for value in initial]
    for phi, start, value in zip(results, initial, made, strict=True):
        phi.add_incoming(start, entry)
        phi.add_incoming(value, end)
    return results


def choose(b: Any, value: Any, cases: tuple[int, ...], emit: Callable[[int], None]) -> None:
    """Code for each case of a run-time value; `emit(case)` writes it. The last case stands for any other value."""
    done = b.append_basic_block("chosen")
    blocks = [b.append_basic_block(f"case{case}") for case in cases]
    switch = b.switch(value, blocks[-1])
    for case, block in zip(cases, blocks, strict=True):
        if block is not blocks[-1]:
            switch.add_case(ir.Constant(value.type, case), block)
        b.position_at_end(block)
        emit(case)
        b.branch(done)
    b.position_at_end(done)


def half_to_float(b: Any, bits: Any) -> Any:
    """float32x16 from the bit patterns of sixteen float16, int16x16. LLVM's own conversion is a call without F16C."""
    if has("f16c") or platform.machine() in ("aarch64", "arm64"):
        return b.fpext(b.bitcast(bits, VH), VF)
    wide = b.zext(bits, VI)
    # exponent and mantissa moved into place are the value times 2^-112, subnormal ones too
    size = b.fmul(b.bitcast(b.shl(b.and_(wide, every(0x7FFF)), every(13)), VF), every(2.0**112, VF))
    special = b.icmp_unsigned(">=", b.and_(wide, every(0x7FFF)), every(0x7C00))
    magnitude = b.or_(b.bitcast(size, VI), b.select(special, every(0x7F800000), every(0)))
    return b.bitcast(b.or_(magnitude, b.shl(b.and_(wide, every(0x8000)), every(16))), VF)


def load_widened(b: Any, address: Any, index: Any, dtype: int) -> Any:
    """float32x16 from the index-th sixteen values of float16 (dtype 0), bfloat16 (1) or float32 (2)."""
    offset = b.mul(index, word(LANES * (4 if dtype == 2 else 2)))
    if dtype == 2:
        return b.load(at(b, address, offset, VF), align=4)
    short = b.load(at(b, address, offset, V16), align=2)
    if dtype == 0:
        return half_to_float(b, short)
    return b.bitcast(b.shl(b.zext(short, VI), every(16)), VF)


def float_to_half(b: Any, values: Any) -> Any:
    """Bit patterns int16x16 of float32x16 rounded to float16, nearest even. LLVM's own is a call without F16C."""
    if has("f16c") or platform.machine() in ("aarch64", "arm64"):
        return b.bitcast(b.fptrunc(values, VH), V16)
    bits = b.bitcast(values, VI)
    size = b.and_(bits, every(0x7FFFFFFF))
    odd = b.and_(b.lshr(size, every(13)), every(1))
    normal = b.lshr(b.sub(b.add(b.add(size, every(0xFFF)), odd), every(112 << 23)), every(13))
    # adding 1/2 leaves multiples of 2^-24, the subnormal step, in the low bits
    tiny = b.sub(b.bitcast(b.fadd(b.bitcast(size, VF), every(0.5, VF)), VI), every(126 << 23))
    made = b.select(b.icmp_unsigned("<", size, every(113 << 23)), tiny, normal)
    made = b.select(b.icmp_unsigned(">=", size, every(0x477FF000)), every(0x7C00), made)
    made = b.select(b.icmp_unsigned(">", size, every(0x7F800000)), every(0x7E00), made)
    return b.trunc(b.or_(made, b.and_(b.lshr(bits, every(16)), every(0x8000))), V16)


def _float_to_bfloat(b: Any, values: Any) -> Any:
    """float32x16 rounded to bfloat16, nearest even, in the high half of int32x16; the low half is not cleared."""
    bits = b.bitcast(values, VI)
    odd = b.and_(b.lshr(bits, every(16)), every(1))
    nan = b.fcmp_unordered("uno", values, values)
    return b.select(nan, every(0x7FC00000), b.add(b.add(bits, every(0x7FFF)), odd))


def rounded(b: Any, values: Any, dtype: int) -> Any:
    """float32x16 rounded to the dtype (as in `load_widened`), still float32x16."""
    if dtype == 2:
        return values
    if dtype == 0:
        return half_to_float(b, float_to_half(b, values))
    return b.bitcast(b.and_(_float_to_bfloat(b, values), every(0xFFFF0000)), VF)


def store_narrowed(b: Any, values: Any, address: Any, index: Any, dtype: int) -> None:
    """float32x16 to the index-th sixteen values of the dtype, rounded to nearest even; `load_widened` reads them."""
    offset = b.mul(index, word(LANES * (4 if dtype == 2 else 2)))
    if dtype == 2:
        b.store(values, at(b, address, offset, VF), align=4)
        return
    short = float_to_half(b, values) if dtype == 0 else b.trunc(b.lshr(_float_to_bfloat(b, values), every(16)), V16)
    b.store(short, at(b, address, offset, V16), align=2)
