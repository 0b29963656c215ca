"""Shape checks name the tensor, what it got and what was wanted."""

import pytest
import torch

from qkv.errors import ShapeError
from qkv.shapes import check, check_like


def test_letters_bind_across_tensors() -> None:
    assert check("H T D", k=torch.zeros(2, 5, 8), v=torch.zeros(2, 5, 8)) == {"H": 2, "T": 5, "D": 8}
    assert check("* 3 D", {"D": 8}, q=torch.zeros(7, 3, 8)) == {"D": 8}


@pytest.mark.parametrize("shape", [(2, 5, 8), (3, 6, 8), (3, 5), (3, 5, 8, 1), ()])
def test_a_misfit_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"v: got shape .* wanted \[H T D\]"):
        check("H T D", k=torch.zeros(3, 5, 8), v=torch.zeros(shape))


def test_dtype_and_device() -> None:
    with pytest.raises(ShapeError, match="float64"):
        check_like("k", torch.zeros(1, dtype=torch.float64), torch.float32, torch.device("cpu"))
    with pytest.raises(ShapeError, match="meta"):
        check_like("k", torch.zeros(1, device="meta"), torch.float32, torch.device("cpu"))
