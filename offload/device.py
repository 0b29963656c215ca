"""The device tier: rows of bytes of every layer, one row a block or an exact piece. Knows bytes, never attention."""

import torch


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
            # zeros: a row never written is defined bytes, not whatever the allocator left
            grown = torch.zeros(capacity, row_bytes, dtype=torch.uint8, device=device)
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

    @property
    def elsewhere(self) -> dict[str, int]:
        """Bytes that are not on the device, by tier."""
        return {}

    @property
    def nbytes(self) -> int:
        return sum(records.nbytes for records in self._layers if records is not None)
