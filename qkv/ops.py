"""The only door to kernels: `seal`, `unseal`, `attend`. Picks one implementation per call; `explain()` says why."""

import functools
import importlib
import sys
import threading
from dataclasses import dataclass
from typing import Any

import torch

from qkv.errors import ShapeError
from qkv.formats import record
from qkv.kernels import attend_sdpa, attend_torch
from qkv.shapes import check, check_like
from qkv.spec import AttendOptions, KVView, RecordLayout


@dataclass(frozen=True)
class Choice:
    """Which implementation serves an op, and why."""

    op: str
    implementation: str
    reason: str


def explain() -> list[Choice]:
    """One row for each op and case, as this installation would serve it."""
    return [
        Choice("seal", "torch", "the reference; no faster kernel is built yet"),
        Choice("unseal", "torch", "the reference; no faster kernel is built yet"),
        Choice(
            "attend, first pass", "sdpa", "all keys exact; the reference if soft-cap, sinks or a log-sum-exp is asked"
        ),
        _explain_attend(),
        Choice("attend, over records, long prompts", "torch", "the reference: dense tiles, a few blocks at a time"),
    ]


def _explain_attend() -> Choice:
    kernel, why = _cpu_kernel()
    if kernel is None:
        return Choice("attend, over records", "torch", f"the reference, slower than exact: {why}")
    return Choice("attend, over records", "numba", why)


@functools.cache
def _cpu_kernel() -> tuple[Any, str]:
    """The fused CPU kernel's module and what it runs on, or None and why not. Imported at the first use."""
    try:
        kernel = importlib.import_module("qkv.kernels.attend_numba")
    except ImportError as error:
        return None, f"numba cannot be imported ({error}); pip install 'qkv[cpu]'"
    return kernel, f"fused, on codes as they lie; {kernel.instructions()}"


@functools.cache
def _say_if_slow() -> threading.Timer:
    """Says on stderr why the first call takes long, if it does: compiled code is kept on disk for the next process."""
    text = "qkv: compiling the CPU kernels, once for this machine (about 10 s)"
    timer = threading.Timer(2.0, print, (text,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    return timer


def seal(k: torch.Tensor, v: torch.Tensor, layout: RecordLayout, out: torch.Tensor, block_ids: list[int]) -> None:
    """Encode k, v [N, H, 128, D] and write the records to rows `block_ids` of `out` uint8 [num_blocks, R], in place.

    Raises ShapeError, FormatError; then `out` is unchanged.
    """
    out[torch.tensor(block_ids, dtype=torch.int64, device=out.device)] = record.seal(k, v, layout)


def unseal(records: torch.Tensor, layout: RecordLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode records uint8 [N, R] -> float32 k, v [N, H, 128, D]. Allocates. Raises ShapeError."""
    return record.unseal(records, layout)


@torch.no_grad()
def attend(
    q: torch.Tensor, view: KVView, options: AttendOptions, need_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of q [H*G, Q, D] (the last Q positions of the view) -> out [H*G, Q, D], log-sum-exp float32 [H*G, Q].

    Never holds dense K and V of the whole context. Accumulates in float32. The log-sum-exp is None where `need_lse` is
    false and the implementation has none. Mutates nothing; records
    no gradient. Raises ShapeError.
    """
    layer = view.layout.layer
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
    if not need_lse and q.shape[1] and attend_sdpa.refusal(q, view, options) is None:
        return attend_sdpa.attend(q, view, options), None
    kernel, _ = _cpu_kernel() if layer.device.type == "cpu" else (None, "")
    if kernel is not None and kernel.refusal(q, view) is None:
        first_call = _say_if_slow()
        try:
            out, lse = kernel.attend(q, view, options)
        finally:
            first_call.cancel()
        return out, lse
    return attend_torch.attend(q, view, options, lambda rows: record.unseal(rows, view.layout))
