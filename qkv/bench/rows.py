"""The row of every measured number (docs/design.md section 10), and where it was measured."""

import json
import math
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import torch

UNITS = (
    "us",
    "ms",
    "s",
    "ns/token",
    "GB/s",
    "tokens/s",
    "tokens",
    "share",
    "relative L2",
    "nats",
    "bytes",
    "x",
    "none",
)


@dataclass(frozen=True)
class Shape:
    """What was computed: `context` tokens are stored, `q_len` queries attend to them (and to themselves)."""

    batch: int
    kv_heads: int
    group: int
    head_dim: int
    context: int
    q_len: int


@dataclass(frozen=True)
class Row:
    """One measured thing.

    value, p20, p80  median and quantiles of n samples, in `unit`; NaN: could not be measured, `note` says why
    ratio            how many times better than `baseline`; > 1 is better, whatever the unit
    bytes            bytes of K and V that one call has to read or write
    peak_fraction    bytes / time, as a share of the read bandwidth measured on the same threads
    error            relative L2 against float64 attention over the same (dequantised) values
    """

    suite: str
    case: str
    format: str
    impl: str
    metric: str
    value: float
    unit: str
    shape: Shape
    p20: float | None = None
    p80: float | None = None
    n: int = 1
    baseline: str | None = None
    ratio: float | None = None
    bytes: int | None = None
    peak_fraction: float | None = None
    error: float | None = None
    threads: int = field(default_factory=torch.get_num_threads)
    note: str = ""

    def __post_init__(self) -> None:
        assert self.unit in UNITS, self.unit
        assert self.note or math.isfinite(self.value), (self.case, self.impl, self.metric)

    def as_json(self) -> dict[str, Any]:
        """The row as plain values: numbers to six digits, what is not finite as null."""
        plain = {name: _plain(value) for name, value in asdict(self).items()}
        threads = plain.pop("threads")
        return {**plain, "machine": {**machine(), "threads": threads}, **revision()}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def write(rows: Iterable[Row], target: TextIO) -> None:
    """JSON lines."""
    for row in rows:
        target.write(json.dumps(row.as_json(), allow_nan=False) + "\n")
    target.flush()


@cache
def machine() -> dict[str, Any]:
    """cpu, gpu (None: none that torch can use), torch, numba (None: not installed). No host name, no path."""
    try:
        numba: str | None = metadata.version("numba")
    except metadata.PackageNotFoundError:
        numba = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": _cpu(), "gpu": gpu, "torch": torch.__version__, "numba": numba}


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@cache
def revision() -> dict[str, Any]:
    """commit and dirty of the checkout that holds this file; None outside of one. Results written do not count."""
    here = Path(__file__).resolve()

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", here.parent, *words], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # an installed qkv may lie inside somebody else's repository
    if git("ls-files", "--error-unmatch", str(here.parents[1] / "__init__.py")) is None:
        return {"commit": None, "dirty": None}
    status = git("status", "--porcelain", "--", ":/", ":(exclude,top)benchmarks/results")
    return {"commit": git("rev-parse", "--short", "HEAD"), "dirty": bool(status)}
