"""The only door to kernels: `seal`, `unseal`, `attend`. Picks one implementation per call; `explain()` says why."""

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qkv.errors import ShapeError
from qkv.formats import record
from qkv.kernels import attend_sdpa, attend_torch
from qkv.shapes import check, check_like
from qkv.spec import PIECE_TOKENS, AttendOptions, KVView, RecordLayout


@dataclass(frozen=True)
class Choice:
    """Which implementation serves an op, and why."""

    op: str
    implementation: str
    reason: str


def explain() -> list[Choice]:
    """One row for each op and case, as this installation would serve it."""
    return [
        _explain("seal", "seal_numba", "compiled; byte for byte the reference's records"),
        _explain("unseal", "unseal_numba", "compiled; the reference's values, into memory that is there already"),
        Choice(
            "attend, first pass",
            "sdpa",
            "all keys exact; see over records if soft-cap, sinks or a log-sum-exp is asked",
        ),
        _explain("attend, over records", "attend_numba", "fused, on codes as they lie"),
        _explain_long(),
    ]


def workspace() -> int:
    """Bytes that kernels keep between calls, of all threads."""
    kernel = sys.modules.get("qkv.kernels.attend_numba")
    return int(kernel.workspace()) if kernel is not None else 0


def _explain(op: str, name: str, what: str) -> Choice:
    kernel, why = _cpu_kernel(name)
    if kernel is None:
        return Choice(op, "torch", f"the reference, much slower: {why}")
    how = f"; {kernel.instructions()}" if hasattr(kernel, "instructions") else ""
    return Choice(op, "numba", f"{what}{how}")


def _explain_long() -> Choice:
    op = "attend, over records, long prompts"
    kernel, why = _cpu_kernel("attend_unsealed")
    why = why if kernel is None else kernel.missing()
    if why:
        return Choice(op, "torch", f"the reference, dense tiles of a few blocks at a time: {why}")
    what = f"{kernel.SCRATCH_BYTES >> 20} MiB of K and V are decoded at a time, then torch's flash attention"
    return Choice(op, "numba + flash", f"{what}; the reference for soft-cap")


@functools.cache
def _cpu_kernel(name: str) -> tuple[Any, str]:
    """A compiled CPU kernel's module, or None and why not. Imported at the first use."""
    try:
        return importlib.import_module(f"qkv.kernels.{name}"), ""
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("numba", "llvmlite"):
            raise  # a fault of ours: the reference in its place would be slow in silence
        return None, f"numba cannot be imported ({error}); pip install 'qkv[cpu]'"


def _fast(name: str, layout: RecordLayout, *tensors: torch.Tensor) -> Any:
    """The compiled module that serves this layout and these tensors; None: the reference does."""
    kernel = _cpu_kernel(name)[0] if all(tensor.device.type == "cpu" for tensor in tensors) else None
    return kernel if kernel is not None and kernel.refusal(layout) is None else None


_called: set[str] = set()
_NOTHING = contextlib.nullcontext()


def _compiled(name: str) -> contextlib.AbstractContextManager[None]:
    """Around every call of compiled code."""
    return _NOTHING if name in _called else _first_call(name)


@contextlib.contextmanager
def _first_call(name: str) -> Iterator[None]:
    """Says on stderr why a kernel's first call takes long, if it does: compiled code is kept for the next process."""
    text = f"qkv: compiling a CPU kernel ({name}), once for this machine (about 10 s)"
    timer = threading.Timer(2.0, print, (text,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    _called.add(name)


def seal(
    k: torch.Tensor,
    v: torch.Tensor,
    layout: RecordLayout,
    out: torch.Tensor,
    block_ids: list[int],
    *,
    checked: bool = False,
) -> None:
    """Encode k, v [N, H, 128, D] and write the records to rows `block_ids` of `out` uint8 [num_blocks, R], in place.

    checked: the caller has passed all of k and v to `check_finite`. Raises ShapeError, FormatError; then `out` is
    unchanged.
    """
    kernel = _fast("seal_numba", layout, k, v, out)
    if kernel is None:
        out[torch.tensor(block_ids, dtype=torch.int64, device=out.device)] = record.seal(k, v, layout)
        return
    record.check_blocks(k, v, layout)
    for name, blocks in (("k", k), ("v", v)):
        if not checked:
            check_finite(name, blocks, record.BLOCK_AXES)
    with _compiled("seal_numba"):
        kernel.seal(k, v, layout, out, block_ids)


def check_finite(name: str, x: torch.Tensor, axes: tuple[str, ...]) -> None:
    """Raises FormatError with the position in x [H, T, D] or [N, H, T, D] of what a record cannot hold: inf, NaN."""
    kernel = _cpu_kernel("seal_numba")[0] if x.device.type == "cpu" and x.shape[-1] % 16 == 0 else None
    if kernel is not None:
        with _compiled("seal_numba"):
            if kernel.within(x if x.dim() == 4 else x.unsqueeze(0), record.LARGEST_VALUE):
                return
    record.check_finite(name, x, axes)


def store_tokens(k: torch.Tensor, v: torch.Tensor, pieces: torch.Tensor, ids: torch.Tensor, first: int) -> None:
    """Copy a few exact tokens k, v [H, T, D] to pieces [num_pieces, 2, H, 16, D], in place.

    They go to slots `first` and on, counted over the pieces `ids` int64 one after the other. All in one dtype and on
    one device, with room for T. Raises FormatError (inf, NaN); then nothing has changed.
    """
    kernel = _cpu_kernel("seal_numba")[0] if pieces.device.type == "cpu" and k.shape[-1] % 16 == 0 else None
    if kernel is not None:
        with _compiled("seal_numba"):
            if kernel.store(k, v, pieces, ids, first, record.LARGEST_VALUE):
                return
    for name, x in (("k", k), ("v", v)):
        record.check_finite(name, x, record.BLOCK_AXES[1:])
    slots = torch.arange(first, first + k.shape[1], device=pieces.device)
    places = ids[slots // PIECE_TOKENS], slots % PIECE_TOKENS
    for side, x in enumerate((k, v)):
        pieces[places[0], side, :, places[1]] = x.transpose(0, 1)


def unseal(records: torch.Tensor, layout: RecordLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode records uint8 [N, R] -> float32 k, v [N, H, 128, D]. Allocates. Raises ShapeError."""
    kernel = _fast("unseal_numba", layout, records)
    if kernel is None:
        return record.unseal(records, layout)
    record.check_records(records, layout)
    with _compiled("unseal_numba"):
        k, v = kernel.unseal(records, layout)
    return k, v


def unseal_into(view: KVView, out: torch.Tensor) -> None:
    """The view's records, block after block, to out [2, H, T, D] in the model dtype, in place: K, then V.

    T is the sum of the view's block lengths. Values beyond the dtype's largest finite one become it. Allocates for one
    block at most. Raises ShapeError.
    """
    layout = view.layout
    spec, lengths = layout.layer, view.block_lengths
    check("2 H T D", {"H": spec.kv_heads, "T": int(lengths.sum()), "D": spec.head_dim}, out=out)
    check_like("out", out, spec.dtype, spec.device)
    kernel = _fast("unseal_numba", layout, out, view.records)
    if kernel is not None and out.stride(3) == 1:
        with _compiled("unseal_numba"):
            kernel.unseal_into(view.records, view.block_ids, lengths, layout, out)
        return
    first, largest = 0, torch.finfo(spec.dtype).max
    for block_id, length in zip(view.block_ids.tolist(), lengths.tolist(), strict=True):
        for side, values in enumerate(unseal(view.records[block_id].unsqueeze(0), layout)):
            # scale * code + minimum may round past the dtype's largest value
            out[side, :, first : first + length] = values[0, :, :length].clamp(-largest, largest)
        first += length


Attended = tuple[torch.Tensor, torch.Tensor | None]  # out, log-sum-exp


def attend(q: torch.Tensor, view: KVView, options: AttendOptions, need_lse: bool = True) -> Attended:
    """Attention of q [H*G, Q, D] (the last Q positions of the view) -> out [H*G, Q, D], log-sum-exp float32 [H*G, Q].

    Never holds dense K and V of the whole context. Accumulates in float32. The log-sum-exp is None where `need_lse` is
    false and the implementation has none. Mutates nothing; records no gradient. Raises ShapeError.
    """
    return attend_many([q], [view], options, need_lse)[0]


@torch.no_grad()
def attend_many(
    queries: Sequence[torch.Tensor], views: Sequence[KVView], options: AttendOptions, need_lse: bool = True
) -> list[Attended]:
    """`attend` for many sequences of one layer: lengths and query counts may differ, heads and head_dim may not.

    Few queries on a CPU (decode, verify) go to one call of compiled code, which splits all of them over the threads.
    """
    for q, view in zip(queries, views, strict=True):
        _check_query(q, view, options)
    done: dict[int, Attended] = {}
    together: list[int] = []
    fused = _cpu_kernel("attend_numba")[0] if views and views[0].layout.layer.device.type == "cpu" else None
    for index, (q, view) in enumerate(zip(queries, views, strict=True)):
        other = view.layout is not views[0].layout and view.layout != views[0].layout
        if other or q.shape[0] != queries[0].shape[0]:
            raise ShapeError(
                f"sequence {index}: got {q.shape[0]} query heads and layout {view.layout}, wanted those of the first, "
                f"{queries[0].shape[0]} and {views[0].layout}; call once for each layer"
            )
        if not need_lse and q.shape[1] and attend_sdpa.refusal(q, view, options) is None:
            done[index] = attend_sdpa.attend(q, view, options), None
        elif fused is not None and fused.refusal(q, view) is None:
            together.append(index)
        else:
            done[index] = _attend_long(q, view, options)
    if fused is not None and together:
        with _compiled("attend_numba"):
            made = fused.attend_many([queries[i] for i in together], [views[i] for i in together], options, need_lse)
        done.update(zip(together, made, strict=True))
    return [done[index] for index in range(len(views))]


def _check_query(q: torch.Tensor, view: KVView, options: AttendOptions) -> None:
    layer = view.layout.layer
    if q.dim() != 3 or q.shape[2] != layer.head_dim or q.dtype != layer.dtype or q.device != layer.device:
        check("* Q D", {"D": layer.head_dim}, q=q)
        check_like("q", q, layer.dtype, layer.device)
    if q.shape[0] % layer.kv_heads:
        raise ShapeError(f"q: got {q.shape[0]} query heads, wanted a multiple of the {layer.kv_heads} KV heads")
    if (options.causal or options.window is not None) and q.shape[1] > view.tokens:
        raise ShapeError(
            f"q: got {q.shape[1]} queries over {view.tokens} tokens; append their K and V, or pass them along"
        )
    if options.window is not None and options.window < 1:
        raise ShapeError(f"window: got {options.window}, wanted at least 1, or None for all keys")
    if options.sinks is not None:
        check(str(q.shape[0]), sinks=options.sinks)


def _attend_long(q: torch.Tensor, view: KVView, options: AttendOptions) -> Attended:
    """Many query rows over records, or what no compiled kernel serves."""
    unsealed = _cpu_kernel("attend_unsealed")[0] if view.layout.layer.device.type == "cpu" else None
    if unsealed is not None and unsealed.refusal(q, view, options) is None:
        with _compiled("attend_unsealed"):
            out, lse = unsealed.attend(q, view, options)
        return out, lse
    return attend_torch.attend(q, view, options, lambda rows: unseal(rows, view.layout))
