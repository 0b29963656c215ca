"""int8 and fp8: errors within what the stored scale allows, nothing clipped, nothing lost to a subnormal scale."""

import pytest
import torch

from qkv.formats import scaled

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# largest relative rounding error, and half the smallest subnormal step, of each code
ROUNDING = {"fp8_e4m3": (2**-4, 2**-10), "fp8_e5m2": (2**-3, 2**-17)}


def tokens(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(64, 80) * torch.logspace(-3, 3, 64).unsqueeze(1)
    x[3] *= 0
    x[5, 7] = 9000.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_error_bound(kind: str, dtype: torch.dtype) -> None:
    x = tokens(dtype)
    codes, scale = scaled.encode(x, kind)
    got, step = scaled.decode(codes, scale, kind), scale.float().unsqueeze(-1)
    error = (got - x.float()).abs()
    slack = 4 * torch.finfo(torch.float32).eps * x.float().abs()  # dividing and multiplying in float32
    if kind == "int8":
        assert (error <= step / 2 + slack).all()
    else:
        relative, smallest = ROUNDING[kind]
        assert (error <= torch.maximum(x.float().abs() * relative, step * smallest) + slack).all()
    assert (got[3] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_the_largest_value_never_clips(kind: str, dtype: torch.dtype) -> None:
    largest = torch.randn(4000).abs().to(dtype)
    _, scale = scaled.encode(largest.unsqueeze(-1), kind)
    assert (scale.double() * scaled.LARGEST[kind] >= largest.double()).all()


@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_a_tiny_float16_token_survives(kind: str) -> None:
    x = torch.tensor([[6e-8, -1.2e-7, 0.0, 3e-7]], dtype=torch.float16)
    codes, scale = scaled.encode(x, kind)
    assert scale > 0
    assert (scaled.decode(codes, scale, kind) - x.float()).abs().max() <= 2**-4 * 3e-7
