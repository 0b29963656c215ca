"""The device tier: rows of bytes of every layer, one row a block or an exact piece. Knows bytes, never attention."""

import numpy as np
import torch

ALIGNMENT = 64  # bytes: a vector load never straddles two cache lines


class DeviceTier:
    """`uint8 [capacity, row_bytes]` a layer, allocated when a layer needs its first row, grown when the pool grows."""

    def __init__(self, num_layers: int) -> None:
        self._layers: list[torch.Tensor | None] = [None] * num_layers

    def records(self, layer: int) -> torch.Tensor | None:
        """The layer's rows, or None before its first."""
        return self._layers[layer]

    def reserve(self, layer: int, capacity: int, row_bytes: int, device: torch.device) -> torch.Tensor:
        """The layer's rows, at least `capacity` of them; copies the old ones if it has to grow."""
        held = self._layers[layer]
        if held is not None and held.shape[0] >= capacity:
            return held
        with torch.inference_mode(False):  # else nothing could write to it outside inference_mode
            grown = zeros(capacity, row_bytes, device)
        if held is not None:
            grown[: held.shape[0]] = held
        self._layers[layer] = grown
        return grown

    def copy_row(self, layer: int, source: int, target: int) -> None:
        """Copy one row of a layer to another; both are there."""
        rows = self._layers[layer]
        assert rows is not None
        rows[target] = rows[source]

    def wrote(self, layer: int, rows: list[int]) -> None:
        """These rows of a layer have been written."""

    def resident(self, layer: int) -> bool:
        """Whether the layer's rows stay on the device, so that a tensor from `reserve` counts until the pool grows."""
        return True

    @property
    def elsewhere(self) -> dict[str, int]:
        """Bytes that are not on the device, by tier."""
        return {}

    @property
    def nbytes(self) -> int:
        return sum(records.nbytes for records in self._layers if records is not None)


def zeros(rows: int, row_bytes: int, device: torch.device, alignment: int = ALIGNMENT) -> torch.Tensor:
    """uint8 [rows, row_bytes] of zeros: a row never written is defined bytes, not whatever the allocator left.

    On a CPU from the system's zero pages, so memory is touched by whoever writes to it first, not twice and not here.
    """
    if device.type != "cpu":
        return torch.zeros(rows, row_bytes, dtype=torch.uint8, device=device)
    room = np.zeros(rows * row_bytes + alignment, np.uint8)
    first = -room.ctypes.data % alignment
    return torch.from_numpy(room[first : first + rows * row_bytes].reshape(rows, row_bytes))
