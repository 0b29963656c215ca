"""Blocks to records and back, in plain torch: the truth every seal, unseal and attend kernel is compared with.

Both sides are handled as [.., rows, n] with groups along the last axis: K transposed to [D, T] (a group runs over
tokens of one channel), V as it is [T, D] (a group runs over channels of one token).
"""

import torch

from qkv.errors import FormatError, ShapeError
from qkv.formats import affine, scaled, tiles
from qkv.shapes import check, check_like
from qkv.spec import BLOCK_TOKENS, RecordLayout, SideSpec

# a group from -this to this still has a range that float32 can hold; bfloat16 would round 1.7e38 up to 2**127
LARGEST_VALUE = 1.69e38
BLOCK_AXES = ("block", "head", "token", "channel")


def seal(k: torch.Tensor, v: torch.Tensor, layout: RecordLayout) -> torch.Tensor:
    """Encode N full blocks: k, v [N, H, 128, D] in the model dtype -> records uint8 [N, R]. Allocates, mutates nothing.

    Raises ShapeError, or FormatError with the position of an inf or NaN.
    """
    blocks = check_blocks(k, v, layout)
    for name, tensor in (("k", k), ("v", v)):
        check_finite(name, tensor, BLOCK_AXES)
    # zeros, not empty: alignment gaps are part of the bytes that a checksum will cover
    records = torch.zeros(blocks, layout.record_bytes, dtype=torch.uint8, device=k.device)
    if blocks:
        _encode_side("k", layout.format.k, k, layout, records)
        _encode_side("v", layout.format.v, v, layout, records)
    return records


def check_blocks(k: torch.Tensor, v: torch.Tensor, layout: RecordLayout) -> int:
    """N, if k, v are [N, H, 128, D] in the model dtype on one device. Raises ShapeError."""
    sizes = {"H": layout.layer.kv_heads, "D": layout.layer.head_dim}
    blocks = check(f"N H {BLOCK_TOKENS} D", sizes, k=k, v=v)["N"]
    for name, tensor in (("k", k), ("v", v)):
        check_like(name, tensor, layout.layer.dtype, k.device)
    return blocks


def unseal(records: torch.Tensor, layout: RecordLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode records uint8 [N, R] -> k, v float32 [N, H, 128, D]. Allocates. Raises ShapeError."""
    check_records(records, layout)
    return _decode_side("k", layout.format.k, layout, records), _decode_side("v", layout.format.v, layout, records)


def check_records(records: torch.Tensor, layout: RecordLayout) -> None:
    """Raises ShapeError unless `records` is uint8 [N, R] of this layout."""
    check(f"N {layout.record_bytes}", records=records)
    if records.dtype != torch.uint8:
        raise ShapeError(f"records: got dtype {records.dtype}, wanted torch.uint8")


def check_finite(name: str, tensor: torch.Tensor, axes: tuple[str, ...]) -> None:
    """Raises FormatError with the position of the first NaN, inf, or value whose range could overflow float32."""
    limit = min(torch.finfo(tensor.dtype).max, LARGEST_VALUE)
    fits = tensor.abs() <= limit  # false for NaN
    if bool(fits.all()):
        return
    at = (~fits).nonzero()[0].tolist()
    where = ", ".join(f"{axis} {index}" for axis, index in zip(axes, at, strict=True))
    value = float(tensor[tuple(at)])
    raise FormatError(f"{name}: got {value} at {where}, wanted at most {limit:.4g}; find where the model produces it")


def _encode_side(prefix: str, side: SideSpec, x: torch.Tensor, layout: RecordLayout, records: torch.Tensor) -> None:
    def write(name: str, values: torch.Tensor) -> None:
        layout.field(records, f"{prefix}_{name}").copy_(values)

    if side.scheme == "raw":
        write("codes", x)
        return
    if side.scheme == "affine":
        codes, scale, low = affine.encode(x.mT if prefix == "k" else x, side.bits, side.group)
        codes = codes.mT  # K: [T, D], lanes are tokens. V: [D, T], lanes are channels.
        write("scale", scale.mT)
        write("zero", low.mT)
    else:
        codes, scale = scaled.encode(x, side.id)
        codes = codes if prefix == "k" else codes.mT
        write("scale", scale)
    for i, plane in enumerate(tiles.pack(codes, side.planes)):
        write(f"codes_{i}", plane)


def _decode_side(prefix: str, side: SideSpec, layout: RecordLayout, records: torch.Tensor) -> torch.Tensor:
    def read(name: str) -> torch.Tensor:
        return layout.field(records, f"{prefix}_{name}")

    if side.scheme == "raw":
        return read("codes").to(torch.float32, copy=True)  # never a view of the records
    summed = layout.layer.head_dim if prefix == "k" else BLOCK_TOKENS
    codes = tiles.unpack([read(f"codes_{i}") for i in range(len(side.planes))], side.planes, summed)
    if side.scheme == "scaled":
        return scaled.decode(codes if prefix == "k" else codes.mT, read("scale"), side.id)
    values = affine.decode(codes.mT, read("scale").mT, read("zero").mT, side.group)
    return values.mT if prefix == "k" else values
