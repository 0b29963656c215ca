"""A handle used as a tensor is the dequantised tensor, whatever touches it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qkv.backends.handle import KVHandle

USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "matmul": lambda x: x @ x.mT,
    "cat": lambda x: torch.cat([x, x], dim=2),
    "index": lambda x: x[:, 0, 1:3],
    "expand": lambda x: x[:, :, None].expand(2, 3, 4, 5, 8).reshape(2, 12, 5, 8),
    "sdpa": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
    "linear": lambda x: torch.nn.functional.linear(x, torch.eye(8)),
    "einsum": lambda x: torch.einsum("bhtd,bhsd->bhts", x, x),
    "to": lambda x: x.to(torch.float64),
    "clone": torch.clone,
    "number": lambda x: x.sum().item(),
    "as a keyword": lambda x: torch.add(input=torch.ones(2, 3, 5, 8), other=x),
    "in a list": lambda x: torch.stack([x, torch.zeros(2, 3, 5, 8)]),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_every_use_sees_the_dense_tensor(use: Callable[[torch.Tensor], Any]) -> None:
    dense = torch.randn(2, 3, 5, 8)
    got = use(KVHandle(None, (2, 3, 5, 8), dense, lambda: dense))
    want = use(dense)
    assert not isinstance(got, KVHandle)
    assert torch.equal(torch.as_tensor(got), torch.as_tensor(want))


def test_shape_questions_do_not_dequantise() -> None:
    def never() -> torch.Tensor:
        raise AssertionError("dequantised")

    handle = KVHandle(None, (2, 3, 5, 8), torch.empty(0, dtype=torch.float16), never)
    assert (tuple(handle.shape), handle.size(2), handle.dim()) == ((2, 3, 5, 8), 5, 4)
    assert (handle.dtype, handle.device.type, handle.numel()) == (torch.float16, "cpu", 240)
    assert "[2, 3, 5, 8]" in repr(handle)
