"""kills.py FOLDER KILLS: a writer that evicts all the time is killed at random; what is left is looked at each time.

Prints one JSON object. A child of this process writes; what it has been told was stored goes to a file of its own.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from documents import Document

from qkv.errors import StoreFull
from qkv.offload.disk import DiskStore

QUOTA = 1_400_000  # some ten segments: nearly every put evicts
DOCUMENTS = 400


class Writer(DiskStore):
    """Says what goes before it goes."""

    said = -1

    def _evict(self, entry):  # type: ignore[no-untyped-def]
        os.write(self.said, f"gone {entry.name}\n".encode())
        super()._evict(entry)


def write(path: Path, said: Path, seed: int) -> None:
    rng = random.Random(seed)
    Writer.said = os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with Writer(path, quota=QUOTA, floor=0) as store:
        while True:
            number = rng.randrange(DOCUMENTS)
            try:
                name = Document(number).put(store)
            except StoreFull:
                continue
            os.write(Writer.said, f"stored {name} {number}\n".encode())


def look(path: Path, said: Path) -> dict[str, int]:
    """Open what a dead writer left. published and lost, visible and damaged."""
    there: dict[str, int] = {}
    for line in said.read_text().splitlines():
        what, name, *number = line.split()
        if what == "stored":
            there[name] = int(number[0])
        else:
            there.pop(name, None)
    unfinished = len(os.listdir(path / "tmp")) if (path / "tmp").is_dir() else 0
    with DiskStore(path, quota=QUOTA, floor=0) as store:
        left = {entry.name for entry in store.entries()}
        lost = [name for name in there if name not in left]
        whole, bad, unread = store.verify()
        wrong = 0
        for number in list(there.values())[-3:]:
            found = store.find(Document(number).prefix())
            wrong += found is None or not Document(number).holds(found)
        files = {file.stem for file in (path / "ns").rglob("*.h5")} if (path / "ns").is_dir() else set()
        counts = {
            "published": len(there), "lost": len(lost), "visible": whole, "damaged": len(bad) + len(unread),
            "wrong": wrong, "unindexed": len(files ^ left), "unfinished": unfinished,
            "left_over": len(os.listdir(path / "tmp")),
        }  # fmt: skip
    said.write_text("".join(f"stored {name} {number}\n" for name, number in there.items()))
    return counts


def main(folder: Path, kills: int) -> dict[str, int]:
    path, said = folder / "store", folder / "said"
    rng, total = random.Random(kills), dict[str, int]()
    for kill in range(kills):
        child = os.fork()
        if not child:
            try:
                write(path, said, kill)
            finally:
                os._exit(1)
        time.sleep(rng.uniform(0.002, 0.25))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the writer failed before it was killed"
        if said.exists() and (path / "FORMAT").exists():
            for name, count in look(path, said).items():
                total[name] = total.get(name, 0) + count
            total["kills"] = total.get("kills", 0) + 1
    return total


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
