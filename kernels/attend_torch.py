"""Attention over sink, records and tail by online softmax, in plain torch: slow, general, and the truth.

o = sum_t softmax_t(scale * q.k_t) v_t, piece by piece: a piece is the sink, a run of at most PIECE_BLOCKS unsealed
blocks, the tail, or what is not appended yet. With running maximum m, sum l and output a per query
(Milakov & Gimelshein, arXiv 1805.02867):
m' = max(m, max s);  l' = l e^(m-m') + sum e^(s-m');  a' = a e^(m-m') + e^(s-m') V
Everything is float32. Dense K and V exist for one piece at a time, so the workspace does not depend on the context.
"""

from collections.abc import Callable, Iterator

import torch

from qkv.spec import BLOCK_TOKENS, AttendOptions, KVView

PIECE_BLOCKS = 8
QUERY_TILE = 512
FLOAT16_MAX = torch.finfo(torch.float16).max

Unseal = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Piece = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # k, v float32 [H, T, D]; positions int64 [T], -1: no token


def attend(q: torch.Tensor, view: KVView, options: AttendOptions, unseal: Unseal) -> tuple[torch.Tensor, torch.Tensor]:
    """q [H*G, Q, D], the last Q positions of the view -> out [H*G, Q, D] in q's dtype, log-sum-exp float32 [H*G, Q].

    `unseal` maps records uint8 [N, R] to float32 k, v [N, H, 128, D]. A query that sees no key gets 0 and -inf.
    Allocates; mutates nothing.
    """
    heads, (query_heads, queries, dim) = view.layout.layer.kv_heads, q.shape
    grouped = q.float().view(heads, query_heads // heads, queries, dim)
    state = _start(grouped, options)
    positions = torch.arange(view.tokens - queries, view.tokens, device=q.device)
    for k, v, key_positions in _pieces(view, options, queries, unseal):
        for first in range(0, queries, QUERY_TILE):
            tile = slice(first, first + QUERY_TILE)
            seen = _visible(positions[tile], key_positions, options)
            if bool(seen.any()):
                _accumulate(state, tile, grouped[:, :, tile], (k, v, seen), options)
    highest, total, out = state
    lse = highest + total.log()
    # a total of 0 is a query that sees nothing; a total that is NaN must stay visible
    out = torch.where(total.unsqueeze(-1) == 0, torch.zeros_like(out), out / total.unsqueeze(-1))
    return out.reshape(query_heads, queries, dim).to(q.dtype), lse.reshape(query_heads, queries)


def _start(q: torch.Tensor, options: AttendOptions) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Running maximum and sum [H, G, Q], output [H, G, Q, D]. A sink logit is a key whose value is zero."""
    if options.sinks is None:
        highest, total = torch.full_like(q[..., 0], float("-inf")), torch.zeros_like(q[..., 0])
    else:
        highest = options.sinks.float().view(*q.shape[:2], 1).expand(q.shape[:3]).clone()
        total = torch.ones_like(highest)
    return highest, total, torch.zeros_like(q)


def _pieces(view: KVView, options: AttendOptions, queries: int, unseal: Unseal) -> Iterator[Piece]:
    sink, tail = view.sink, view.tail
    device, sink_tokens = sink.device, sink.shape[2]
    if sink_tokens:
        yield sink[0].float(), sink[1].float(), torch.arange(sink_tokens, device=device)
    ends = sink_tokens + view.block_lengths.cumsum(0)
    oldest_seen = 0 if options.window is None else view.tokens - queries - options.window + 1
    for first in range(0, len(view.block_ids), PIECE_BLOCKS):
        run = slice(first, first + PIECE_BLOCKS)
        if int(ends[run][-1]) <= oldest_seen:
            continue
        k, v = unseal(view.records[view.block_ids[run]])
        if view.layout.layer.dtype == torch.float16:
            # scale * code + minimum may round past the largest float16, in float32
            k, v = (side.clamp_(-FLOAT16_MAX, FLOAT16_MAX) for side in (k, v))
        slots = torch.arange(BLOCK_TOKENS, device=device)
        lengths = view.block_lengths[run].unsqueeze(1)
        positions = torch.where(slots < lengths, ends[run].unsqueeze(1) - lengths + slots, -1)
        yield k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2), positions.flatten()
    start = view.stored_tokens - tail.shape[2]
    for exact in (tail, view.new):
        # a whole prompt may be in `new`: keep the score tiles small
        for chunk in torch.split(exact, PIECE_BLOCKS * BLOCK_TOKENS, dim=2):
            if tokens := chunk.shape[2]:
                yield chunk[0].float(), chunk[1].float(), torch.arange(start, start + tokens, device=device)
            start += chunk.shape[2]


def _visible(queries: torch.Tensor, keys: torch.Tensor, options: AttendOptions) -> torch.Tensor:
    """bool [Q, T]."""
    distance = queries.unsqueeze(1) - keys
    seen = (keys >= 0).expand_as(distance)
    if options.causal:
        seen = seen & (distance >= 0)
    if options.window is not None:
        seen = seen & (distance < options.window)
    return seen


def _accumulate(
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tile: slice,
    q: torch.Tensor,
    piece: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    options: AttendOptions,
) -> None:
    """Add one piece to the rows `tile` of the running state, in place."""
    highest, total, out = (part[:, :, tile] for part in state)
    k, v, seen = piece
    heads, group, queries, dim = q.shape
    scores = torch.matmul(q.reshape(heads, group * queries, dim), k.mT).mul_(options.scale)
    scores = scores.view(heads, group, queries, -1)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    new_highest = torch.maximum(highest, scores.amax(-1))
    # a row that has seen nothing keeps -inf; 0 stands in so that e^(-inf - -inf) is not NaN
    shift = torch.where(torch.isinf(new_highest), torch.zeros_like(new_highest), new_highest)
    weights = torch.exp(scores - shift.unsqueeze(-1))
    fade = torch.exp(highest - shift)
    total.mul_(fade).add_(weights.sum(-1))
    added = torch.matmul(weights.view(heads, group * queries, -1), v).view(heads, group, queries, dim)
    out.mul_(fade.unsqueeze(-1)).add_(added)
    highest.copy_(new_highest)
