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

    def copy_row(self, source: int, target: int, capacity: int) -> None:
        """Copy one row to another in every layer that has rows, grown to `capacity` first where needed."""
        for layer, rows in enumerate(self._layers):
            if rows is not None:
                grown = self.reserve(layer, capacity, rows.shape[1], rows.device)
                grown[target] = grown[source]

    @property
    def nbytes(self) -> int:
        return sum(records.nbytes for records in self._layers if records is not None)
