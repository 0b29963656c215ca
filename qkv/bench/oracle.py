"""Attention in float64 over the values that the records stand for: what a kernel's error is measured against."""

import torch

from qkv import ops
from qkv.spec import BLOCK_TOKENS, KVView

BLOCKS_AT_ONCE = 64


def dense(view: KVView) -> tuple[torch.Tensor, torch.Tensor]:
    """k, v float64 [H, T, D] of all tokens of the view, dequantised, not rounded to the model's dtype."""
    parts = [view.sink.double()]
    for first in range(0, len(view.block_ids), BLOCKS_AT_ONCE):
        run = slice(first, first + BLOCKS_AT_ONCE)
        sides = torch.stack(ops.unseal(view.records[view.block_ids[run]], view.layout)).double()  # [2, n, H, 128, D]
        lengths = view.block_lengths[run]
        if bool((lengths == BLOCK_TOKENS).all()):
            parts.append(sides.transpose(1, 2).flatten(2, 3))
        else:
            parts += [sides[:, i, :, :length] for i, length in enumerate(lengths.tolist())]
    k, v = torch.cat([*parts, view.tail.double(), view.new.double()], dim=2)
    return k, v


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [H*G, Q, D], the last Q positions of k, v [H, T, D]; causal -> float64 [H*G, Q, D]."""
    heads, tokens, dim = k.shape
    queries = q.shape[1]
    grouped = q.double().reshape(heads, -1, dim)
    later = torch.arange(tokens) > torch.arange(tokens - queries, tokens).unsqueeze(1)
    made = []
    for head in range(heads):  # one at a time: the scores of a long chunk are large
        scores = torch.matmul(grouped[head], k[head].double().mT).mul_(scale).view(-1, queries, tokens)
        weights = scores.masked_fill_(later, float("-inf")).softmax(-1).view(-1, tokens)
        made.append(torch.matmul(weights, v[head].double()))
    return torch.stack(made).view(-1, queries, dim)


def relative_l2(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """||got - wanted|| / ||wanted||, in float64, over as many of got's first heads as `wanted` has."""
    got = got[: wanted.shape[0]]
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())
