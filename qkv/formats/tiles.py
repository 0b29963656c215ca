"""The order of codes in a record: tiles of 16 lanes x 4 adjacent bytes (docs/record.md has the picture).

A dot product multiplies u8 codes by s8 weights and sums four neighbours into a 32-bit lane (VNNI vpdpbusd, Arm sdot,
the B operand of an int8 tensor-core mma). So a lane is what the result has one of, and four adjacent bytes are what is
summed over: lanes are tokens for K (a score per token), channels for V (an output per channel).

A p-bit plane puts 8/p codes in a byte. Slot k of byte j of lane l holds summed index 4k + j, so `(tile >> p*k) & mask`
is, for every k, a ready operand with four consecutive summed indices in each lane:

    byte j=0                      j=1   j=2   j=3
    bits  0..p-1  index 0         1     2     3      <- one dot instruction
    bits  p..2p-1 index 4         5     6     7      <- the next
"""

import torch

from qkv.spec import TILE_LANES


def pack_plane(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 [..., L, S] below 2**bits -> tiles uint8 [..., L/16, ceil(S*bits/32), 64]. Allocates.

    The last tile is filled with zeros where S is not a multiple of 32/bits.
    """
    per_tile = 32 // bits
    summed = codes.shape[-1]
    codes = torch.nn.functional.pad(codes, (0, -summed % per_tile))
    *lead, lanes, padded = codes.shape
    split = codes.reshape(*lead, lanes // TILE_LANES, TILE_LANES, padded // per_tile, 8 // bits, 4)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device).view(-1, 1)
    # slots never overlap, so a sum is an or; int32 because uint8 sums are promoted to int64
    packed = torch.bitwise_left_shift(split, shifts).sum(dim=-2, dtype=torch.int32).to(torch.uint8)
    return packed.transpose(-3, -2).flatten(-2)


def unpack_plane(tiles: torch.Tensor, bits: int, summed: int) -> torch.Tensor:
    """Inverse of `pack_plane`: tiles uint8 [..., L/16, C, 64] -> codes uint8 [..., L, summed]. Allocates."""
    *lead, lane_groups, columns, _ = tiles.shape
    split = tiles.reshape(*lead, lane_groups, columns, TILE_LANES, 4)
    # one shift a slot: torch vectorises a shift by a number, not one by a broadcast tensor
    codes = torch.stack([(split >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], dim=-2)
    codes = codes.transpose(-4, -3).reshape(*lead, lane_groups * TILE_LANES, columns * (32 // bits))
    return codes[..., :summed]


def pack(codes: torch.Tensor, planes: tuple[int, ...]) -> list[torch.Tensor]:
    """Split codes uint8 [..., L, S] into planes, low bits first, and tile each."""
    tiles, shift = [], 0
    for bits in planes:
        tiles.append(pack_plane((codes >> shift) & ((1 << bits) - 1), bits))
        shift += bits
    return tiles


def unpack(tiles: list[torch.Tensor], planes: tuple[int, ...], summed: int) -> torch.Tensor:
    """Inverse of `pack`: uint8 [..., L, summed]."""
    codes, shift = torch.zeros((), dtype=torch.uint8, device=tiles[0].device), 0
    for plane, bits in zip(tiles, planes, strict=True):
        codes = codes | (unpack_plane(plane, bits, summed) << shift)
        shift += bits
    return codes
