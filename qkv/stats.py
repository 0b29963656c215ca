"""What `qkv stats` shows: the counters of a running process, read from its metrics (needs prometheus-client, rich)."""

import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from rich.console import Console
from rich.table import Table

from qkv.account import Line
from qkv.errors import InputError

SECONDS = 10
MOST_BYTES = 16 << 20


def fetch(source: str) -> str:
    """Text behind an http(s) address, in a file, or on stdin (-). Raises InputError."""
    wanted = "wanted an http(s) address such as http://localhost:9400/metrics, a file, or -"
    try:
        if source == "-":
            return sys.stdin.read(MOST_BYTES)
        if source.startswith(("http://", "https://")):
            with urlopen(source, timeout=SECONDS) as answer:
                data: bytes = answer.read(MOST_BYTES)
        else:
            with Path(source).open("rb") as file:
                data = file.read(MOST_BYTES)
        return data.decode()
    except (OSError, URLError, ValueError) as error:
        raise InputError(f"stats: got {source!r}, {wanted}; {error}") from error


def show(console: Console, text: str) -> None:
    """Tables of the qkv samples in Prometheus text, one set a cache. Raises InputError."""
    from qkv.metrics import read

    samples = read(text)
    for cache in dict.fromkeys(sample.cache for sample in samples):
        own = [sample for sample in samples if sample.cache == cache]
        table = Table(f"cache {cache}", "")
        for sample in own:
            if sample.name != "qkv_memory_bytes":
                name = " ".join([sample.name.removeprefix("qkv_").removesuffix("_total"), *sample.labels.values()])
                share = sample.name in ("qkv_hit_rate", "qkv_fragmentation")
                table.add_row(name.replace("_", " "), f"{sample.value:.1%}" if share else f"{sample.value:,.0f}")
        console.print(table)
        memory = [sample for sample in own if sample.name == "qkv_memory_bytes"]
        lines = [Line(s.labels["kind"], int(s.value), s.labels["how"], s.labels["place"]) for s in memory]
        show_account(console, lines)


def show_account(console: Console, lines: Iterable[Line]) -> None:
    """The memory account as a table, with its sum by place."""
    table, sums = Table("memory", "bytes", "on", "how", "note"), dict[str, int]()
    for line in lines:
        table.add_row(line.what, "-" if line.bytes is None else f"{line.bytes:,}", line.place, line.how, line.note)
        sums[line.place] = sums.get(line.place, 0) + (line.bytes or 0)
    for place, total in sums.items():
        table.add_row("sum", f"{total:,}", place, "", "", style="bold")
    console.print(table)
