"""One dynamic scale per token and head: INT8 and the two FP8 types (as vLLM's int8/fp8_per_token_head).

The scale is rounded up in the stored dtype, so the largest value never clips and a subnormal scale is never zero
unless the token is.
INT8 codes are stored as code + 128, so that every code of every format is unsigned (u8 x s8 dots).
FP8 types: OCP 8-bit Floating Point Specification 1.0.
"""

import torch

LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
FP8_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_SAME_WIDTH_INT = {2: torch.int16, 4: torch.int32}


def encode(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., n] -> codes uint8 [..., n], scale [...] in x's dtype. x must be finite. Allocates."""
    largest = x.abs().amax(-1).double()
    scale = (largest / LARGEST[kind]).to(x.dtype)
    too_small = scale.double() * LARGEST[kind] < largest
    # the next float above a finite non-negative one has the next bit pattern
    above = (scale.view(_SAME_WIDTH_INT[x.dtype.itemsize]) + 1).view(x.dtype)
    scale = torch.where(too_small, above, scale)
    steps = torch.where(
        scale.unsqueeze(-1) == 0, torch.zeros((), device=x.device), x.float() / scale.float().unsqueeze(-1)
    )
    steps = steps.clamp(-LARGEST[kind], LARGEST[kind])
    if kind == "int8":
        return (steps.round() + 128).to(torch.uint8), scale
    return steps.to(FP8_DTYPES[kind]).view(torch.uint8), scale


def decode(codes: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    """Inverse of `encode`, float32 [..., n]. Allocates."""
    values = codes.float() - 128 if kind == "int8" else codes.contiguous().view(FP8_DTYPES[kind]).float()
    return values * scale.float().unsqueeze(-1)
