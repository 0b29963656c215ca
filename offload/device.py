"""The device tier: the records of every layer, one row a block. Knows bytes, never attention."""

import torch


class DeviceTier:
    """`uint8 [capacity, R]` a layer, allocated when a layer seals its first block, grown when the pool grows."""

    def __init__(self, num_layers: int) -> None:
        self._layers: list[torch.Tensor | None] = [None] * num_layers

    def records(self, layer: int) -> torch.Tensor | None:
        """The layer's records, or None before its first block."""
        return self._layers[layer]

    def reserve(self, layer: int, capacity: int, record_bytes: int, device: torch.device) -> torch.Tensor:
        """The layer's records with at least `capacity` rows; copies the old rows if it has to grow."""
        held = self._layers[layer]
        if held is not None and held.shape[0] >= capacity:
            return held
        with torch.inference_mode(False):  # else nothing could write to it outside inference_mode
            # zeros: a row never written is defined bytes, not whatever the allocator left
            grown = torch.zeros(capacity, record_bytes, dtype=torch.uint8, device=device)
        if held is not None:
            grown[: held.shape[0]] = held
        self._layers[layer] = grown
        return grown

    @property
    def nbytes(self) -> int:
        return sum(records.nbytes for records in self._layers if records is not None)
