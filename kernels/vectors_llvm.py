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
