"""flips.py FOLDER CASES: one bit of a segment is flipped, or its end cut off; then a manager asks for it. Prints JSON.

Each time: the damage shows before a byte is used, the file is put aside and counted, what is computed instead is what
was stored, and it can be stored again.
"""

import json
import random
import sys
from pathlib import Path

import torch

from qkv import KVManager
from qkv.errors import LayerLost
from qkv.offload.disk import DiskStore
from qkv.prefix import Namespace
from qkv.sequence import Sequence

LAYERS, LENGTH = 2, 64 + 128 + 70
SPACE = Namespace("w", ((1, 16, "float32"),) * LAYERS, "kivi2", 1, 128, 64)
TOKENS = random.Random(0).choices(range(50_000), k=LENGTH)
STATES = torch.randn(LAYERS, 2, 1, LENGTH, 16, generator=torch.Generator().manual_seed(0))


def bits(manager: KVManager, sequence: Sequence) -> list[bytes]:
    views = [manager.view(sequence, layer) for layer in range(LAYERS)]
    parts = [part for view in views for part in (view.sink, view.records[view.block_ids], view.tail)]
    return [part.contiguous().numpy().tobytes() for part in parts]


def read(store: DiskStore) -> tuple[bool, list[bytes], KVManager, Sequence]:
    """Whether the store had it; what a sequence holds in the end, stored or computed."""
    manager = KVManager(LAYERS, "kivi2")
    manager.attach(store)
    sequence = manager.open([*TOKENS, 1], SPACE)
    hit = manager.length(sequence) > 0
    if hit:
        try:
            return True, bits(manager, sequence), manager, sequence
        except LayerLost:
            manager.close(sequence)
            sequence = manager.open([*TOKENS, 1], SPACE)
    assert manager.length(sequence) == 0
    for layer in range(LAYERS):
        manager.append(sequence, layer, *STATES[layer])
    return False, bits(manager, sequence), manager, sequence


def main(folder: Path, cases: int) -> dict[str, int]:
    rng, total = (
        random.Random(cases),
        {"flips": 0, "cuts": 0, "in zeros": 0, "undetected": 0, "uncounted": 0, "not aside": 0, "wrong": 0},
    )
    with DiskStore(folder / "store", floor=0) as store:
        _, wanted, manager, sequence = read(store)
        manager.save(sequence)
        for case in range(cases):
            (file,) = (folder / "store" / "ns").rglob("*.h5")
            whole = file.read_bytes()
            boundaries = [0, 1, 8, 63, 64, 65, 4095, 4096, 4097, len(whole) - 4096, len(whole) - 1, len(whole) + 1]
            damaged = bytearray(whole)
            if case < len(boundaries) or rng.random() < 0.25:
                size = boundaries[case] if case < len(boundaries) else rng.randrange(len(whole))
                damaged = damaged[:size] + bytes(max(0, size - len(whole)))
                total["cuts"] += 1
            else:
                damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
                total["flips"] += 1
            file.write_bytes(damaged)
            seen = store.counts["corrupt"] + store.counts["foreign"]
            hit, got, manager, sequence = read(store)
            total["wrong"] += got != wanted
            if hit:
                file.write_bytes(whole)
                total["in zeros"] += 1
                total["undetected"] += _read_part_changed(whole, damaged, file)
            else:
                total["uncounted"] += store.counts["corrupt"] + store.counts["foreign"] != seen + 1
                total["not aside"] += file.exists() and damaged[:8] == whole[:8]  # else it may be somebody else's
                file.unlink(missing_ok=True)
                manager.save(sequence)
    return total


def _read_part_changed(whole: bytes, damaged: bytearray, file: Path) -> bool:
    """Whether what `read` uses of the file differs. Not the zeros that fill an extent up: only `verify` does."""
    from qkv.offload.segment import Segment

    with Segment.open(str(file)) as segment:
        start, extent = segment.head.data_offset, segment.header.extent
        used = [sum(segment.header.parts(layer)) for layer in range(LAYERS)]
    if damaged[:start] != whole[:start] or len(damaged) != len(whole):
        return True
    layers = [slice(start + layer * extent, start + layer * extent + size) for layer, size in enumerate(used)]
    return any(damaged[layer] != whole[layer] for layer in layers)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
