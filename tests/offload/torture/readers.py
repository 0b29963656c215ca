"""readers.py FOLDER SECONDS: one process writes and evicts, four read, one looks at the folder's size. Prints JSON."""

import json
import os
import random
import sys
import threading
import time
from pathlib import Path

from documents import Document

from qkv.errors import CorruptSegment
from qkv.offload.disk import DiskStore

LIMIT = 16 << 20
RECORD, DOCUMENTS, READERS = 160_000, 30, 4  # three times what the limit holds


def write(path: Path, end: float) -> dict[str, int]:
    with DiskStore(path, LIMIT, floor=0) as store:

        def evict() -> None:
            rng = random.Random(1)
            while time.monotonic() < end:
                time.sleep(rng.uniform(0.1, 0.4))
                store.shrink(rng.randrange(LIMIT // 2, LIMIT))

        evictor = threading.Thread(target=evict)
        evictor.start()
        rng = random.Random(2)
        while time.monotonic() < end:
            Document(rng.randrange(DOCUMENTS), RECORD).put(store)
        evictor.join()
        return {name: store.counts[name] for name in ("stored", "same", "evicted", "corrupt")}


def read(path: Path, end: float, seed: int) -> dict[str, int]:
    rng, counts = random.Random(seed), {"hits": 0, "misses": 0, "wrong": 0, "damaged": 0}
    while time.monotonic() < end:
        with DiskStore(path, LIMIT, floor=0, readonly=True) as store:
            for _ in range(50):
                document = Document(rng.randrange(DOCUMENTS), RECORD)
                found = store.find(document.prefix())
                if found is None:
                    counts["misses"] += 1
                    continue
                counts["hits"] += 1
                try:
                    counts["wrong"] += not document.holds(found)
                except CorruptSegment:
                    counts["damaged"] += 1
                if time.monotonic() > end:
                    break
            counts["damaged"] += store.counts["corrupt"]
    return counts


def size(path: Path) -> int:
    """As `du` counts: blocks of every file and folder."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in [".", *names]:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def main(folder: Path, seconds: float) -> dict[str, int]:
    path, end = folder / "store", time.monotonic() + seconds
    DiskStore(path, LIMIT, floor=0).close()
    children = []
    for number in range(READERS + 1):
        away, back = os.pipe()
        child = os.fork()
        if not child:
            code = 1
            try:
                told = read(path, end, number) if number else write(path, end)
                os.write(back, json.dumps(told).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(back)
        children.append((child, away))
    most = samples = 0
    while time.monotonic() < end:
        most, samples = max(most, size(path)), samples + 1
        time.sleep(0.01)
    total = {"limit": LIMIT, "most": most, "samples": samples}
    for child, away in children:
        assert os.waitpid(child, 0)[1] == 0, "a process failed"
        for name, count in json.loads(os.read(away, 1 << 16)).items():
            total[name] = total.get(name, 0) + count
    return total


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), float(sys.argv[2]))))
