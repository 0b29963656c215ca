"""Two attentions over different keys as one, on the CPU: out = keep * out + add * part, a factor a row, in one pass."""

from typing import Any

import torch
from numba import types
from numba.extending import intrinsic

from qkv.kernels.compiled import jit
from qkv.kernels.decode_llvm import DTYPES as KINDS
from qkv.kernels.sides import DTYPES
from qkv.kernels.threads import share, threads_for
from qkv.kernels.vectors_llvm import F32, VF, at, broadcast, choose, fma, load_widened, loop, store_narrowed, word

_FEWEST_ROWS = 512  # rows that are worth a thread: about 20 us
_N = types.intp


@intrinsic
def _weighted_rows(typingctx: Any, out: Any, part: Any, keep: Any, add: Any, rows: Any, dim: Any, dtype: Any) -> Any:
    """out float32 [rows, dim] = keep * out + add * part, part of the dtype; keep, add float32 [rows]."""
    signature = types.void(_N, _N, _N, _N, _N, _N, _N)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        out, part, keep, add, rows, dim, dtype = args

        def of_dtype(kind: int) -> None:
            def row(r: Any, carried: list[Any]) -> list[Any]:
                offset = b.shl(r, word(2))
                factors = [broadcast(b, b.load(at(b, x, offset, F32), align=4), VF) for x in (keep, add)]
                first = b.mul(r, dim)
                target = b.add(out, b.shl(first, word(2)))
                source = b.add(part, b.shl(first, word(2 if kind == 2 else 1)))

                def unit(u: Any, carried: list[Any]) -> list[Any]:
                    kept = b.fmul(load_widened(b, target, u, 2), factors[0])
                    store_narrowed(b, fma(b, load_widened(b, source, u, kind), factors[1], kept), target, u, 2)
                    return []

                loop(b, b.lshr(dim, word(4)), [], unit)
                return []

            loop(b, rows, [], row)

        choose(b, dtype, KINDS, of_dtype)
        return context.get_dummy_value()

    return signature, generate


@jit
def _run(out, pitch, part, keep, add, groups, rows, dim, dtype, width):
    """Row groups of `out`, `pitch` bytes apart; those of the others follow each other."""
    for g in range(groups):
        place = g * rows
        _weighted_rows(out + g * pitch, part + place * dim * width, keep + 4 * place, add + 4 * place, rows, dim, dtype)


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Adds the attention `part` [N, T, D], of any model dtype, over other keys to `out` float32 [N, T, D], in place.

    lse, part_lse float32 [N, T]: log-sum-exp of each row, -inf for a row that saw nothing; lse is updated. Rows of
    `out` are contiguous, D is a multiple of 16. A NaN on either side is in the result.
    """
    groups, rows, dim = part.shape
    both = torch.logaddexp(lse, part_lse)
    safe = torch.where(torch.isneginf(both), torch.zeros_like(both), both)
    # the flash kernel's log-sum-exp has its axes in another order, and sums take after it
    keep, add = torch.exp(lse - safe).contiguous(), torch.exp(part_lse - safe).contiguous()
    part = part.contiguous()
    lse.copy_(both)
    threads = min(groups, threads_for(groups * rows, _FEWEST_ROWS))
    cuts = [groups * i // threads for i in range(threads + 1)]
    width, pitch = part.element_size(), out.stride(0) * 4

    def run(index: int) -> None:
        first, count = cuts[index], cuts[index + 1] - cuts[index]
        place = first * rows
        addresses = (out.data_ptr() + first * pitch, part.data_ptr() + place * dim * width)
        factors = (keep.data_ptr() + 4 * place, add.data_ptr() + 4 * place)
        _run(addresses[0], pitch, addresses[1], *factors, count, rows, dim, DTYPES[part.dtype], width)

    share(run, threads)
