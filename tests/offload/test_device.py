"""The device tier: rows survive growth, and its bytes are those of the tensors it holds."""

import torch

from qkv.offload.device import DeviceTier

CPU = torch.device("cpu")


def test_growing_keeps_rows_and_counts_bytes() -> None:
    tier = DeviceTier(3)
    assert tier.records(1) is None
    assert tier.nbytes == 0
    first = tier.reserve(1, 2, 64, CPU)
    first[:] = torch.randint(0, 256, (2, 64), dtype=torch.uint8)
    kept = first.clone()
    assert tier.reserve(1, 2, 64, CPU) is first
    grown = tier.reserve(1, 5, 64, CPU)
    assert torch.equal(grown[:2], kept)
    assert (grown[2:] == 0).all()
    tier.reserve(2, 7, 128, CPU)
    assert tier.records(0) is None
    assert tier.nbytes == 5 * 64 + 7 * 128


def test_records_made_in_inference_mode_can_be_written_outside() -> None:
    tier = DeviceTier(1)
    with torch.inference_mode():
        records = tier.reserve(0, 1, 64, CPU)
    records[0] = 7
    assert (tier.records(0) == 7).all()  # type: ignore[operator]  # reserved above
