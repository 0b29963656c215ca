"""Asymmetric min/max groups: KIVI's quantiser (arXiv 2402.02750, Algorithm 1), extended to where it is undefined.

KIVI: scale = (max - min) / (2^b - 1), code = round_half_even(clamp((x - min) / scale, 0, 2^b - 1)), every step in the
tensor's dtype, and the clamp before the rounding. Ours adds three things: a constant group (0/0 there) has scale 0 and
decodes exactly; a range that overflows the dtype (fp16: 60000 - -60000) is computed in float64, its scale still fits;
a last group may be shorter (head_dim 80 with groups of 32).
"""

import torch


def encode(x: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [..., n] -> codes uint8 [..., n], scale and minimum [..., ceil(n/group)] in x's dtype. Allocates.

    Groups are `group` consecutive values of the last axis. x must be finite.
    """
    count, levels = x.shape[-1], (1 << bits) - 1
    # repeating the last value lengthens a short group without changing its minimum or maximum
    pad = -count % group
    padded = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], pad)], dim=-1) if pad else x
    groups = torch.unflatten(padded, -1, (-1, group))
    # + 0: which of 0 and -0 a reduction returns depends on how x lies in memory, and records must not
    low, high = groups.amin(-1, keepdim=True) + 0.0, groups.amax(-1, keepdim=True) + 0.0
    # CUDA divides by a Python number as a product with its reciprocal; records must not depend on the device
    scale = (high - low) / torch.full((), levels, dtype=x.dtype, device=x.device)
    steps = (groups - low) / scale
    wide = torch.isinf(scale)
    if bool(wide.any()):
        exact_scale = (high.double() - low.double()) / levels
        scale = torch.where(wide, exact_scale.to(x.dtype), scale)
        steps = torch.where(wide, (groups.double() - low.double()) / scale.double(), steps)
    steps = torch.where(scale == 0, torch.zeros_like(steps), steps)
    codes = steps.clamp(0, levels).round().to(torch.uint8).flatten(-2)[..., :count]
    return codes, scale.squeeze(-1), low.squeeze(-1)


def decode(codes: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, group: int) -> torch.Tensor:
    """Inverse of `encode`, float32 [..., n]: scale * code + minimum, as KIVI's kernel computes it. Allocates."""
    count = codes.shape[-1]
    padded = torch.nn.functional.pad(codes, (0, -count % group))
    groups = torch.unflatten(padded, -1, (-1, group))
    return (scale.float().unsqueeze(-1) * groups + low.float().unsqueeze(-1)).flatten(-2)[..., :count]
