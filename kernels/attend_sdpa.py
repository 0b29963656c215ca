"""torch's scaled_dot_product_attention for the one case it fits: a prompt's own first pass, all keys exact and at hand.

Equal to kernels/attend_torch.py up to the rounding of the model dtype; gives no log-sum-exp.
"""

import torch

from qkv.spec import AttendOptions, KVView

MAX_MASK_BYTES = 1 << 26


def refusal(q: torch.Tensor, view: KVView, options: AttendOptions) -> str | None:
    """Why this call cannot be served here; None if it can."""
    if view.stored_tokens:
        return "there are stored tokens"
    if options.softcap is not None or options.sinks is not None:
        return "soft-cap and attention sinks are not in SDPA"
    if options.window is not None and q.shape[1] * view.tokens > MAX_MASK_BYTES and options.window < view.tokens:
        return "the mask of a sliding window would be larger than 64 MiB"
    return None


def attend(q: torch.Tensor, view: KVView, options: AttendOptions) -> torch.Tensor:
    """q [H*G, Q, D], the last Q positions of `view.new` -> [H*G, Q, D]. Allocates the mask if one is needed."""
    queries, tokens = q.shape[1], view.tokens
    k, v = view.new[0].unsqueeze(0), view.new[1].unsqueeze(0)
    windowed = options.window is not None and options.window < tokens
    mask = None
    if windowed or (options.causal and queries != tokens and queries > 1):
        distance = torch.arange(tokens - queries, tokens, device=q.device).unsqueeze(1) - torch.arange(
            tokens, device=q.device
        )
        mask = distance >= 0 if options.causal else torch.ones_like(distance, dtype=torch.bool)
        if windowed:
            mask &= distance < options.window  # type: ignore[operator]  # windowed says it is not None
    out = torch.nn.functional.scaled_dot_product_attention(
        q.unsqueeze(0),
        k,
        v,
        attn_mask=mask,
        is_causal=options.causal and mask is None and queries > 1,
        scale=options.scale,
        enable_gqa=q.shape[0] != k.shape[1],
    )
    return out.squeeze(0)
