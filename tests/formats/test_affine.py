"""The affine quantiser against an independent statement of KIVI's, and where KIVI's is undefined."""

import numpy as np
import pytest
import torch

from qkv.formats import affine

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def kivi_numpy(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """KIVI Algorithm 1 on groups [n, G], each operation rounded to x's dtype; numpy rounds halves to even."""
    levels = np.asarray(2**bits - 1, dtype=x.dtype)
    low = x.min(axis=1, keepdims=True)
    scale = (x.max(axis=1, keepdims=True) - low) / levels
    steps = (x - low) / scale
    return np.rint(np.clip(steps, 0, levels)).astype(np.uint8), scale[:, 0], low[:, 0]


def groups(rng: np.random.Generator, count: int, group: int) -> np.ndarray:
    x = rng.standard_normal((count, group)) * np.exp(rng.uniform(-6, 6, (count, 1))) + rng.uniform(
        -300, 300, (count, 1)
    )
    x[::7, 3] *= 40  # one outlier in a group
    x[1::7] = np.round(x[1::7])  # many exact halves after division
    return x


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_bit_exact_with_kivi(bits: int, group: int, dtype: type) -> None:
    x = groups(np.random.default_rng(bits * group), 400, group).astype(dtype)
    x = x[x.max(axis=1) > x.min(axis=1)]  # a constant group is 0/0 in KIVI
    assert len(x) > 300
    wanted = kivi_numpy(x, bits)
    assert (wanted[1] > 0).all()
    got = affine.encode(torch.from_numpy(x), bits, group)
    for ours, theirs in zip(got, wanted, strict=True):
        assert np.array_equal(ours.numpy().reshape(theirs.shape), theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_error_is_within_half_a_stored_step(dtype: torch.dtype, bits: int) -> None:
    x = torch.from_numpy(groups(np.random.default_rng(1), 300, 32)).to(dtype)
    codes, scale, low = affine.encode(x, bits, 32)
    error = (affine.decode(codes, scale, low, 32) - x.float()).abs()
    eps, levels, step = torch.finfo(dtype).eps, (1 << bits) - 1, scale.float()
    # half a step; the scale's own rounding at the last code; x - min and its quotient are each rounded once in the
    # dtype, at most `levels` steps wide; float32 decoding of values as large as |min|
    bound = step * (0.5 + levels * eps * 3) + low.float().abs() * torch.finfo(torch.float32).eps * 2
    assert (error <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, -1.0, 3.140625, 1e-6, 60000.0])
def test_constant_group_is_exact(dtype: torch.dtype, value: float) -> None:
    x = torch.full((3, 64), value).to(dtype)
    codes, scale, low = affine.encode(x, 2, 32)
    assert (scale == 0).all()
    assert (codes == 0).all(), "records must not depend on how a device casts NaN"
    assert torch.equal(affine.decode(codes, scale, low, 32), x.float())


def test_range_beyond_float16_still_decodes() -> None:
    x = torch.linspace(-60000, 60000, 32).half().unsqueeze(0)
    for bits in (2, 3, 4):
        codes, scale, low = affine.encode(x, bits, 32)
        assert torch.isfinite(scale).all()
        error = (affine.decode(codes, scale, low, 32) - x.float()).abs().max()
        levels = (1 << bits) - 1
        assert error <= float(scale) * (0.5 + levels * 2**-11)


@pytest.mark.parametrize(("count", "group"), [(80, 32), (80, 64), (16, 32), (96, 64), (1, 32)])
def test_short_last_group_is_a_group_of_its_own(count: int, group: int) -> None:
    x = torch.randn(5, count)
    codes, scale, low = affine.encode(x, 4, group)
    last = count - count % group if count % group else count - group
    alone = affine.encode(x[:, last:], 4, count - last)
    assert torch.equal(codes[:, last:], alone[0])
    assert torch.equal(scale[:, -1:], alone[1])
    assert torch.equal(low[:, -1:], alone[2])
    assert codes.shape == x.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_zero_minimum_is_plus_zero_however_x_lies(dtype: torch.dtype) -> None:
    """Which of 0 and -0 a reduction returns depends on the memory order."""
    zeros = (torch.randint(0, 2, (2, 64, 64)) * 2.0 - 1).mul(0.0).to(dtype)
    assert zeros.signbit().any()
    for x in (zeros, zeros.mT.contiguous().mT):
        for made in affine.encode(x, 4, 32)[1:]:
            assert not made.any()
            assert not made.signbit().any()
