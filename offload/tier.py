"""Tiers: where records may lie and how much of it, and which layer's go where when they do not all fit on the device.

Layers are moved whole: a streamed layer's rows lie in host memory or in a file, and come to the device for as long as
the layer is computed. So a block keeps its id and its bytes, and a kernel never knows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PAGE = 4096  # bytes: what reads past the page cache begin and end at
SLABS = (3, 2)  # one layer that is computed, two that are read ahead; one where there is no room for more


@dataclass(frozen=True)
class Device:
    """Records that stay where the model computes, slabs for streamed ones included. limit: bytes, or "2GiB"."""

    limit: str | int


@dataclass(frozen=True)
class Host:
    """Records in host memory: on a CPU, the device's memory again. limit: as for Device."""

    limit: str | int


@dataclass(frozen=True)
class Disk:
    """Records in unnamed files in the folder `path`, which go with the process. limit: as for Device."""

    path: str
    limit: str | int


def places(sizes: Sequence[int], device: int, host: int, disk: int) -> tuple[list[str], int] | None:
    """'device', 'host' or 'disk' for each layer of these sizes in bytes, and how many slabs; None: they do not fit.

    As many as fit stay on the device, beside the slabs that the others then need; spread evenly, so that a streamed
    layer can be read while resident ones are computed.
    """
    if sum(sizes) <= device:
        return ["device"] * len(sizes), 0
    slab = slab_bytes(max(sizes))
    slabs = next((count for count in SLABS if count * slab <= device), 0)
    if not slabs:
        return None
    found = ["disk"] * len(sizes)
    every = list(range(len(sizes)))
    resident = _most(every, sizes, device - slabs * slab, len(sizes) - 1)
    streamed = [layer for layer in every if layer not in resident]
    in_host = _most(streamed, sizes, host, len(streamed))
    for layers, place in ((resident, "device"), (in_host, "host")):
        for layer in layers:
            found[layer] = place
    on_disk = sum(size for size, place in zip(sizes, found, strict=True) if place == "disk")
    return (found, slabs) if on_disk <= disk else None


def slab_bytes(size: int) -> int:
    """Room for a layer of so many bytes: whole pages."""
    return -(-size // PAGE) * PAGE


def most_blocks(record_bytes: Sequence[int], device: int, host: int, disk: int) -> int:
    """The most blocks whose records fit the three limits; 0: not one."""
    low, high = 0, (device + host + disk) // max(1, sum(record_bytes)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = places([middle * size for size in record_bytes], device, host, disk) is not None
        low, high = (middle, high) if fits else (low, middle)
    return low


def _most(layers: list[int], sizes: Sequence[int], room: int, most: int) -> set[int]:
    """As many of the layers, at most `most`, as take no more than `room`, evenly spread."""
    for count in range(most, 0, -1):
        chosen = {layers[number * len(layers) // count] for number in range(count)}
        if sum(sizes[layer] for layer in chosen) <= room:
            return chosen
    return set()
