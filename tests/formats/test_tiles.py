"""The order of codes: any shape comes back, and every code is where the page says."""

import pytest
import torch

from qkv.formats import tiles


@pytest.mark.parametrize("planes", [(1,), (2,), (4,), (8,), (2, 1)])
@pytest.mark.parametrize(("lanes", "summed"), [(16, 1), (16, 16), (64, 80), (128, 33), (128, 128), (80, 128)])
def test_round_trip(planes: tuple[int, ...], lanes: int, summed: int) -> None:
    codes = torch.randint(0, 1 << sum(planes), (3, 2, lanes, summed), dtype=torch.uint8)
    assert torch.equal(tiles.unpack(tiles.pack(codes, planes), planes, summed), codes)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_every_code_is_where_the_page_says(bits: int) -> None:
    per_tile = 32 // bits
    lanes, summed = 32, 2 * per_tile
    for lane, index in [(0, 0), (0, 1), (1, 4 % summed), (17, 5 % summed), (31, summed - 1), (16, per_tile)]:
        codes = torch.zeros(lanes, summed, dtype=torch.uint8)
        codes[lane, index] = (1 << bits) - 1
        packed = tiles.pack_plane(codes, bits)
        assert packed.shape == (2, 2, 64)
        within = index % per_tile
        byte = packed[lane // 16, index // per_tile, (lane % 16) * 4 + within % 4]
        assert int(byte) == ((1 << bits) - 1) << (bits * (within // 4))
        assert int((packed != 0).sum()) == 1


def test_a_slot_is_a_dot_product_operand() -> None:
    """(tile >> 2k) & 3 viewed as 4 bytes a lane, times 4 weights, summed: the score of 16 tokens over 4 channels."""
    codes = torch.randint(0, 4, (16, 16), dtype=torch.uint8)
    weights = torch.randint(-127, 128, (16,))
    tile = tiles.pack_plane(codes, 2)[0, 0].view(16, 4)
    scores = sum((((tile >> (2 * k)) & 3).long() * weights[4 * k : 4 * k + 4]).sum(1) for k in range(4))
    assert torch.equal(scores, codes.long() @ weights)
