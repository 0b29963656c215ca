"""Records that may not all lie on the device: DeviceTier's rows, some layers of them streamed from host or disk.

What is sealed is written through before the layer is left, so a slab can be given away at any time, and a row is the
same bytes wherever it lies. Layers move when the pool grows beyond what the device holds: mostly down.
"""

import os
import weakref
from collections.abc import Callable
from functools import partial

import torch

from qkv.errors import InputError, OutOfBlocks
from qkv.offload.backing import Backing, FileRows, HostRows
from qkv.offload.device import DeviceTier, zeros
from qkv.offload.io import FileIO
from qkv.offload.ring import Ring, Slab
from qkv.offload.tier import places


class TieredRecords(DeviceTier):
    """row_bytes: of each layer. limits: bytes on the device, in host memory, on the disk; folder: where the last are.

    A tensor from `records` or `reserve` counts until another layer's is asked for. For one thread.
    Raises InputError (the folder).
    """

    def __init__(
        self,
        row_bytes: list[int],
        limits: tuple[int, int, int],
        folder: str = ".",
        *,
        io: FileIO | None = None,
        seconds: float = 60.0,
    ) -> None:
        super().__init__(len(row_bytes))
        if limits[2] and not os.access(folder, os.W_OK | os.X_OK):
            raise InputError(f"disk tier {folder}: it is no folder that can be written to; give another one")
        self._row_bytes, self._limits, self._folder, self._io = row_bytes, limits, folder, io or FileIO()
        self._seconds, self._rows = seconds, 0  # rows of every layer
        self._device = torch.device("cpu")
        self._backings: dict[int, Backing] = {}
        self._ring: Ring | None = None
        self._slabs: list[Slab] = []
        self._stop: Callable[[], object] = lambda: None  # the ring; called once, it lets go of it
        self.most_slabs = 3  # one: nothing is read ahead

    def records(self, layer: int) -> torch.Tensor | None:
        """The layer's rows, or None before its first. Raises LayerLost."""
        if layer not in self._backings:
            return super().records(layer)
        assert self._ring is not None
        size = self._row_bytes[layer]
        return self._ring.take(layer).rows[: self._rows * size].view(self._rows, size)

    def reserve(self, layer: int, capacity: int, row_bytes: int, device: torch.device) -> torch.Tensor:
        """As DeviceTier.reserve. Raises OutOfBlocks (the tiers' limits), OSError, LayerLost."""
        if capacity > self._rows:
            self._device = device
            self._move(capacity)
        if layer not in self._backings:
            return super().reserve(layer, capacity, row_bytes, device)
        rows = self.records(layer)
        assert rows is not None
        return rows

    def wrote(self, layer: int, rows: list[int]) -> None:
        """These rows of the layer that was asked for last are written. Raises OSError: they are not kept."""
        backing = self._backings.get(layer)
        if backing is not None and rows:
            assert self._ring is not None
            slab = self._ring.take(layer)
            groups = backing.groups_of(rows)
            for group in groups:
                slab.fetch(group * backing.group, (group + 1) * backing.group)
            backing.store(slab.data[: self._rows * backing.row_bytes], groups)

    def resident(self, layer: int) -> bool:
        return layer not in self._backings

    @property
    def nbytes(self) -> int:
        """On the device, slabs included."""
        return super().nbytes + sum(slab.rows.nbytes for slab in self._slabs)

    @property
    def elsewhere(self) -> dict[str, int]:
        """Bytes in host memory (a GPU's landing buffers included) and on the disk."""
        held = {"host": 0, "disk": 0}
        for backing in self._backings.values():
            held["host" if isinstance(backing, HostRows) else "disk"] += backing.nbytes
        held["host"] += sum(slab.host.nbytes for slab in self._slabs if slab.rows is not slab.host)
        return held

    @property
    def streamed(self) -> list[int]:
        """Layers whose rows come to the device for each step."""
        return sorted(self._backings)

    def traffic(self) -> dict[str, float]:
        """Bytes read and written since a layer was moved down, seconds of reading and of waiting for it; files that are
        read through the page cache, because their file system allows nothing else."""
        backings, ring = self._backings.values(), self._ring
        return {
            "read": sum(backing.bytes_read for backing in backings),
            "written": sum(backing.bytes_written for backing in backings),
            "buffered_files": sum(isinstance(each, FileRows) and each.direct is None for each in backings),
            "load_seconds": ring.loads if ring else 0.0,
            "stall_seconds": ring.stalls if ring else 0.0,
        }

    def drop_cached(self) -> None:
        """Have the kernel forget the files' pages, so that the next reads are the disk's. For measurements."""
        for backing in self._backings.values():
            if isinstance(backing, FileRows):
                backing.drop_cached()

    def _move(self, capacity: int) -> None:
        """Room for `capacity` rows: every layer to where it then belongs. Raises as `reserve`; nothing has moved."""
        sizes = [capacity * size for size in self._row_bytes]
        found = places(sizes, *self._limits)
        if found is None:
            raise OutOfBlocks(capacity, self._rows, 0, what="rows in the tiers")
        layers, slabs = found
        backings, resident = dict(self._backings), list(self._layers)
        for layer, place in enumerate(layers):
            held = backings.get(layer)
            if place == _place(held):
                continue
            if place == "device":
                resident[layer] = self._raised(layer, capacity, backings.pop(layer))
            else:
                backings[layer], resident[layer] = self._moved(layer, place, held), None
        if self._ring is not None:
            self._stop()
            self._ring, self._slabs = None, []
        self._rows = capacity
        self._backings, self._layers = backings, resident  # new ones: another thread may be counting the old
        if self._backings:
            self._open_ring(min(slabs, len(self._backings), self.most_slabs))

    def _raised(self, layer: int, capacity: int, held: Backing) -> torch.Tensor:
        """A streamed layer's rows, on the device."""
        size = self._row_bytes[layer]
        whole = Slab(self._rows * size, torch.device("cpu"))
        held.load(whole.data, self._seconds)
        with torch.inference_mode(False):
            rows = zeros(capacity, size, self._device)
            rows[: self._rows] = whole.rows[: self._rows * size].view(self._rows, size)
        return rows

    def _moved(self, layer: int, place: str, held: Backing | None) -> Backing:
        """The layer's rows, from the device or another backing, in one of their own."""
        size = self._row_bytes[layer]
        made = HostRows(size) if place == "host" else FileRows(size, self._folder, self._io)
        rows = super().records(layer)
        if held is not None:
            whole = Slab(self._rows * size, torch.device("cpu")).data
            held.load(whole, self._seconds)
            made.store(whole[: self._rows * size], sorted(held.written))
        elif rows is not None:
            still = rows.to("cpu", copy=True)  # a reader may be landing in `rows` at this moment
            made.store(still.view(-1).numpy().data, made.groups_of(range(rows.shape[0])))
        return made

    def _open_ring(self, slabs: int) -> None:
        size = self._rows * max(self._row_bytes)
        self._slabs = [Slab(size, self._device) for _ in range(slabs)]
        read = partial(_read, dict(self._backings), self._seconds)
        self._ring = Ring(read, sorted(self._backings), self._slabs, self._seconds)
        self._stop = weakref.finalize(self, self._ring.stop)


def _place(backing: Backing | None) -> str:
    """As `places` calls it."""
    if backing is None:
        return "device"
    return "host" if isinstance(backing, HostRows) else "disk"


def _read(backings: dict[int, Backing], seconds: float, layer: int, slab: memoryview) -> None:
    backings[layer].load(slab, seconds)
