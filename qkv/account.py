"""Where the memory of a run goes, line by line, and how each figure is known.

measured      read from the tensors themselves, or from the operating system
computed      a difference, or sizes multiplied
unobservable  exists, but nothing here can tell how large it is
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from qkv import ops
from qkv.manager import KVManager


@dataclass(frozen=True)
class Line:
    """One kind of memory; `bytes` is None where it is unobservable. place: "cpu" or a device's name."""

    what: str
    bytes: int | None
    how: str
    place: str
    note: str = ""


def account(manager: KVManager, model: Any = None, others: Iterable[torch.Tensor] = ()) -> list[Line]:
    """Every kind of memory of a run that decodes with `manager`.

    model   a torch module whose weights count; others: K and V that something else keeps (transformers' own layers)
    Changes nothing. On the CPU, "the rest of the process" is what the system counts as resident and no line above has.
    """
    used = manager.stats()
    kv = str(next((layout.layer.device for layout in map(manager.layout, range(manager.num_layers)) if layout), "cpu"))
    lines = []
    if model is not None:
        weights = _by_place([*model.parameters(), *model.buffers()])
        lines += [Line("weights and buffers", size, "measured", place) for place, size in weights.items()]
    lines += [
        Line("KV records, in use", used.records, "measured", kv, "sealed blocks, shared ones once"),
        Line("KV records, free", used.records_free, "measured", kv, "allocated for the next block"),
        Line("exact sink", used.sink, "measured", kv),
        Line("exact tail", used.tail, "measured", kv, f"{used.fragmentation:.1%} of all places in use hold no token"),
        Line("exact, free", used.exact_free, "measured", kv),
    ]
    elsewhere = _by_place(others)
    lines += [Line("K and V of other caches", size, "measured", place) for place, size in elsewhere.items()]
    lines.append(Line("kernel work space", ops.workspace(), "measured", "cpu", "kept between calls"))
    return lines + _process(lines) + _devices(lines)


def _by_place(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """Bytes of distinct storages by device."""
    storages = {(str(t.device), t.untyped_storage().data_ptr()): t.untyped_storage().nbytes() for t in tensors}
    found: dict[str, int] = {}
    for (place, _), size in storages.items():
        found[place] = found.get(place, 0) + size
    return found


def _process(lines: list[Line]) -> list[Line]:
    name, note = "the rest of the process", "interpreter, libraries, activations, allocator's slack"
    known = sum(line.bytes or 0 for line in lines if line.place == "cpu")
    try:
        import psutil
    except ImportError:
        return [Line(name, None, "unobservable", "cpu", f"{note}; pip install psutil to have it measured")]
    rest = psutil.Process().memory_info().rss - known
    if rest < 0:
        return [Line(name, None, "unobservable", "cpu", "not all of the above is resident (mapped or untouched pages)")]
    return [Line(name, rest, "computed", "cpu", note)]


def _devices(lines: list[Line]) -> list[Line]:
    """What torch's allocator and the driver take on a GPU; on the CPU there are no graphs."""
    found = []
    for place in sorted({line.place for line in lines if line.place.startswith("cuda")}):
        device = torch.device(place)
        known = sum(line.bytes or 0 for line in lines if line.place == place)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        found += [
            Line("activations and other tensors", max(0, allocated - known), "computed", place),
            Line("allocator's slack", reserved - allocated, "measured", place, "reserved by torch, in no tensor"),
            Line(
                "driver, context, graphs and other processes", max(0, total - free - reserved), "computed", place,
                "in use on the device and not torch's",
            ),
            Line("CUDA graphs alone", None, "unobservable", place, "part of the two lines above"),
        ]  # fmt: skip
    return found
