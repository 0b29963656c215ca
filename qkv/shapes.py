"""The axis letters of every docstring and error, and one check that speaks in them.

    B   batch rows                     H   KV heads            G   query heads per KV head
    Q   query tokens of one call       T   tokens              D   channels of one head (head_dim)
    N   blocks                         S   values summed by a dot product (see formats/tiles.py)
    L   lanes of a tile                R   bytes of one record
A number in a shape is that number; `*` is any size.
"""

import torch

from qkv.errors import ShapeError


def check(shape: str, sizes: dict[str, int] | None = None, **tensors: torch.Tensor) -> dict[str, int]:
    """Hold tensors to a shape written in axis letters, e.g. `check("H T D", {"D": 64}, k=k, v=v)`.

    Returns the size of every letter seen, those given in `sizes` included. Allocates nothing.
    Raises ShapeError naming the tensor, the wanted shape and the shape it got.
    """
    letters = shape.split()
    known = dict(sizes or {})
    for name, tensor in tensors.items():
        got = tuple(tensor.shape)
        fits = len(got) == len(letters)
        for letter, size in zip(letters, got, strict=False):
            if letter == "*" or not fits:
                continue
            fits = size == (int(letter) if letter.isdigit() else known.setdefault(letter, size))
        if not fits:
            bound = ", ".join(f"{letter}={known[letter]}" for letter in letters if letter in known)
            raise ShapeError(f"{name}: got shape {list(got)}, wanted [{shape}]" + (f" with {bound}" if bound else ""))
    return known


def check_like(name: str, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ShapeError unless `tensor` has this dtype and device."""
    if tensor.dtype != dtype:
        raise ShapeError(f"{name}: got dtype {tensor.dtype}, wanted {dtype}; cast it, or open a cache for that dtype")
    if tensor.device != device:
        raise ShapeError(f"{name}: got device {tensor.device}, wanted {device}; move it there")
