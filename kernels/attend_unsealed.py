"""Attention of many query rows over records on the CPU: a run of blocks is unsealed, torch's flash kernel reads it.

For prompts in chunks. Runs of blocks go through one scratch in the model's dtype, of SCRATCH_BYTES whatever the
context; the runs' outputs are merged by their log-sum-exps in float32. Against the reference this
rounds K and V once, to the model's dtype, and inherits what the flash kernel rounds (softmax weights and each run's
output, to that dtype). `precise` keeps float32 throughout.

Keys before the first query are seen by every query, so query heads of a KV head go as rows of one matrix. Later keys
(the chunk itself) are a square on the diagonal and full rows below it. Only a sliding window needs a mask, and only for
the rows whose window begins inside a run.
"""

from collections.abc import Iterator
from typing import Any

import torch

from qkv.kernels import unseal_numba
from qkv.kernels.merge_numba import merge
from qkv.spec import BLOCK_TOKENS, AttendOptions, KVView

SCRATCH_BYTES = 1 << 24
FEWEST_TOKENS, MOST_TOKENS = 512, 4096  # of a run: shorter ones cost the flash kernel 10 %, longer ones gain nothing
# A mask is at most this many rows of a run. Each row sees one of its first MASKED_ROWS keys, so the flash kernel,
# which takes 512 keys at a time, never begins with a row of -inf.
MASKED_ROWS = 256

Run = tuple[torch.Tensor, torch.Tensor, int]  # k, v [H, T, D] and the position of the first token


def missing() -> str | None:
    """What this installation lacks; None if nothing."""
    there = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    return None if there else "this torch has no flash attention for the CPU"


def refusal(q: torch.Tensor, view: KVView, options: AttendOptions) -> str | None:
    """Why this call cannot be served here; None if it can."""
    if options.softcap is not None:
        return "flash attention has no soft-cap"
    if not q.shape[1]:
        return "there are no queries"
    return missing() or unseal_numba.refusal(view.layout)


def attend(q: torch.Tensor, view: KVView, options: AttendOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """q [H*G, Q, D], the last Q positions of the view -> out [H*G, Q, D] in q's dtype, log-sum-exp float32 [H*G, Q].

    A query that sees no key gets 0 and -inf. Allocates; mutates nothing. Runs on torch.get_num_threads() threads.
    """
    heads, (query_heads, queries, dim) = view.layout.layer.kv_heads, q.shape
    dtype = torch.float32 if options.precise else view.layout.layer.dtype
    grouped = q.to(dtype).reshape(heads, query_heads // heads, queries, dim)
    out = torch.zeros(query_heads, queries, dim)
    lse = torch.full((query_heads, queries), float("-inf"))
    if options.sinks is not None:  # a sink logit is a key whose value is zero
        lse.copy_(options.sinks.detach().float().unsqueeze(1))
    first = view.tokens - queries
    for k, v, start in _runs(view, options, first, dtype):
        for rows, keys, mask in _rectangles(start, k.shape[1], (first, queries), options):
            part, part_lse = _flash(grouped[:, :, rows], k[:, keys], v[:, keys], mask, options.scale)
            merge(out[:, rows], lse[:, rows], part, part_lse)
    return out.to(q.dtype), lse


def run_tokens(view: KVView, dtype: torch.dtype) -> int:
    """Tokens of the scratch, whole blocks."""
    layer = view.layout.layer
    fit = SCRATCH_BYTES // (2 * layer.kv_heads * layer.head_dim * dtype.itemsize)
    return max(FEWEST_TOKENS, min(MOST_TOKENS, fit)) // BLOCK_TOKENS * BLOCK_TOKENS


def _runs(view: KVView, options: AttendOptions, first: int, dtype: torch.dtype) -> Iterator[Run]:
    """All keys and values that a query may see, cut where the queries begin. A run is valid until the next."""
    oldest = 0 if options.window is None else first - options.window + 1
    most = run_tokens(view, dtype)
    pieces = [_exact(view.sink, 0, dtype, most), _sealed(view, oldest, dtype, most)]
    start = view.stored_tokens - view.table.tail_tokens
    pieces += [_exact(view.tail, start, dtype, most), _exact(view.new, view.stored_tokens, dtype, most)]
    for piece in pieces:
        for k, v, start in piece:
            tokens = k.shape[1]
            if start + tokens <= oldest:
                continue
            if options.causal and start < first < start + tokens:
                cut = first - start
                yield k[:, :cut], v[:, :cut], start
                yield k[:, cut:], v[:, cut:], first
            else:
                yield k, v, start


def _exact(exact: torch.Tensor, start: int, dtype: torch.dtype, most: int) -> Iterator[Run]:
    for piece in torch.split(exact, most, dim=2):
        if piece.shape[2]:
            k, v = piece.to(dtype)
            yield k, v, start
        start += piece.shape[2]


def _sealed(view: KVView, oldest: int, dtype: torch.dtype, most: int) -> Iterator[Run]:
    """Runs of records of at most `most` tokens, in one scratch."""
    layer, blocks, lengths = view.layout.layer, len(view.block_ids), view.block_lengths
    if not blocks:
        return
    ends = view.table.sink_tokens + lengths.cumsum(0)
    seen = int((ends <= oldest).sum())  # blocks before this are behind every window
    if seen == blocks:
        return
    tokens = min(most, int(lengths[seen:].sum()))
    scratch = torch.empty(2, layer.kv_heads, tokens, layer.head_dim, dtype=dtype)
    for begin in range(seen, blocks, most // BLOCK_TOKENS):
        run = slice(begin, begin + most // BLOCK_TOKENS)
        here = int(lengths[run].sum())
        part = scratch[:, :, :here]
        unseal_numba.unseal_into(view.records, view.block_ids[run], lengths[run], view.layout, part)
        yield part[0], part[1], int(ends[begin] - lengths[begin])


def _rectangles(
    start: int, tokens: int, queries: tuple[int, int], options: AttendOptions
) -> Iterator[tuple[slice, slice, torch.Tensor | bool | None]]:
    """Which query rows see which of the run's keys: row and key ranges, and None (all), True (causal) or a mask.

    Query row i is at position first + i. Every row of a rectangle sees at least one of its keys.
    """
    first, count = queries
    every, window = slice(0, tokens), options.window
    diagonal = options.causal and start >= first
    begin = start - first if diagonal else 0  # earlier rows see nothing yet
    end = count if window is None else min(count, start + tokens - 1 + window - first)  # later rows see nothing more
    whole = count if window is None else max(begin, min(count, start + window - first))  # later rows see a part
    if diagonal and begin + tokens <= whole:
        yield slice(begin, begin + tokens), every, True
        begin += tokens
    elif diagonal:
        whole = begin
    if begin < whole:
        yield slice(begin, whole), every, None
    yield from _masked(range(max(begin, whole), end), range(start, start + tokens), first, options)


def _masked(
    rows: range, keys: range, first: int, options: AttendOptions
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """The rows whose window begins inside the run, a few at a time, and the keys (positions) that they see."""
    assert not rows or options.window is not None
    window = options.window or 0
    for begin in range(rows.start, rows.stop, MASKED_ROWS):
        queries = range(first + begin, first + min(begin + MASKED_ROWS, rows.stop))
        seen = range(
            max(keys.start, queries.start - window + 1), min(keys.stop, queries.stop) if options.causal else keys.stop
        )
        ends = (torch.arange(part.start, part.stop, dtype=torch.int32) for part in (queries, seen))
        distance = next(ends).unsqueeze(1) - next(ends)
        mask = distance < window
        if options.causal:
            mask &= distance >= 0
        yield slice(begin, begin + len(queries)), slice(seen.start - keys.start, seen.stop - keys.start), mask


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | bool | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [H, G, Q, D], k, v [H, T, D] -> out [H*G, Q, D] in q's dtype, log-sum-exp float32 [H*G, Q]."""
    heads, group, queries, dim = q.shape
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if mask is None:
        rows = q.reshape(1, heads, group * queries, dim)
        out, lse = flash(rows, k.unsqueeze(0), v.unsqueeze(0), scale=scale)
    else:
        shape = (heads, group, k.shape[1], dim)
        bias = None
        if isinstance(mask, torch.Tensor):
            bias = (
                torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, float("-inf")).expand(heads, group, -1, -1)
            )
        out, lse = flash(
            q,
            k.unsqueeze(1).expand(shape),
            v.unsqueeze(1).expand(shape),
            0.0,
            mask is True,
            attn_mask=bias,
            scale=scale,
        )
    return out.reshape(heads * group, queries, dim), lse.reshape(heads * group, queries)
