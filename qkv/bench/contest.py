"""Who takes part in a measurement: qkv through its manager, torch's attention, plain reads; and the rows they make."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from qkv import ops
from qkv.bench import baselines, oracle, workspace
from qkv.bench.baselines import Problem
from qkv.bench.reading import Reader, buffer
from qkv.bench.rows import Row, Shape
from qkv.bench.timing import Stats
from qkv.manager import KVManager
from qkv.spec import AttendOptions, KVView

OVER_RECORDS, LONG_OVER_RECORDS = "attend, over records", "attend, over records, long prompts"
ERROR_HEADS = 2  # float64 takes long


@dataclass(frozen=True)
class Contestant:
    """A pass over all layers, and the bytes of K and V that one layer's call reads."""

    format: str
    impl: str
    nbytes: int
    run: Callable[[], object]
    error: float | None = None
    workspace: int | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """As `baseline` in rows: the impl; of what is run once a format, the impl and the format."""
        return self.impl if self.impl.startswith("sdpa") else f"{self.impl} {self.format}"


def served_by(op: str) -> str:
    """The implementation that `qkv.ops` says it uses for such calls, such as `numba`."""
    return ", ".join(choice.implementation for choice in ops.explain() if choice.op == op)


def exact_result(problem: Problem, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """float64 attention of the problem's queries over k, v, in ERROR_HEADS KV heads at most: [heads * G, Q, D]."""
    group, heads = problem.q.shape[0] // k.shape[0], min(ERROR_HEADS, k.shape[0])
    return oracle.attend(problem.q[: heads * group], k[:heads], v[:heads], problem.scale)


class Stored:
    """The problem's K and V in every layer of a manager, the last `new` tokens of them outside, as a chunk has them."""

    def __init__(self, problem: Problem, format: str, layers: int = 1, new: int = 0) -> None:
        self.manager = KVManager(layers, format)
        self.sequence = self.manager.open()
        stored = problem.k.shape[1] - new
        self.new = (problem.k[:, stored:].clone(), problem.v[:, stored:].clone()) if new else None
        for layer in range(layers):
            self.manager.append(self.sequence, layer, problem.k[:, :stored], problem.v[:, :stored])

    def view(self) -> KVView:
        """Of layer 0."""
        return self.manager.view(self.sequence, 0, self.new)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V that an attention call reads."""
        view = self.view()
        exact = view.tokens - int(view.block_lengths.sum())
        return len(view.block_ids) * view.layout.record_bytes + exact * view.layout.layer.token_bytes

    def attend(self, problem: Problem, layer: int = 0, precise: bool = False) -> torch.Tensor:
        """One call through the manager."""
        options = AttendOptions(problem.scale, precise=precise)
        out, _ = self.manager.attend(self.sequence, layer, problem.q, options, new=self.new, need_lse=False)
        return out

    def error(self, problem: Problem, precise: bool = False) -> float:
        """Relative L2 of layer 0's first heads against float64 over the dequantised values."""
        wanted = exact_result(problem, *oracle.dense(self.view()))
        return oracle.relative_l2(self.attend(problem, precise=precise), wanted)


def qkv(problem: Problem, format: str, layers: int = 1, new: int = 0) -> Contestant:
    """qkv in that format."""
    stored = Stored(problem, format, layers, new)

    def step() -> None:
        for layer in range(layers):
            stored.attend(problem, layer)

    note = served_by(LONG_OVER_RECORDS if new else OVER_RECORDS)
    space = workspace.peak(lambda: stored.attend(problem))
    return Contestant(format, "qkv", stored.nbytes, step, stored.error(problem), space, note)


def dense_bytes(problem: Problem, dtype: torch.dtype, layout: str) -> int:
    """Bytes of K and V that torch's attention reads in this layout."""
    group = problem.q.shape[0] // problem.k.shape[0]
    return 2 * problem.k.numel() * dtype.itemsize * (group if layout == "expanded" else 1)


def dense(problem: Problem, way: tuple[torch.dtype, str], layers: int, wanted: torch.Tensor) -> Contestant:
    """torch's attention in one dtype and layout; `wanted` is the exact result."""
    calls = [baselines.prepare(problem, *way) for _ in range(layers)]
    error = oracle.relative_l2(calls[0](), wanted)
    return Contestant(
        "exact", baselines.label(*way), dense_bytes(problem, *way), lambda: [call() for call in calls], error
    )


def reading(format: str, nbytes: int, layers: int, reader: Reader) -> Contestant:
    """A plain read of as many bytes."""
    held = [buffer(nbytes) for _ in range(layers)]
    return Contestant(format, "read", nbytes, partial(_read_all, reader, held))


def _read_all(reader: Reader, held: list[torch.Tensor]) -> None:
    for values in held:
        reader(values)


def time_rows(
    suite: str, case: str, shape: Shape, contestants: list[Contestant], stats: dict[str, Stats], reader: Reader
) -> list[Row]:
    """Times: each contestant's against torch's best, qkv's also against the reads that took part; then workspaces."""
    best = min((c.name for c in contestants if c.impl.startswith("sdpa")), key=lambda name: stats[name].median)
    rows = []
    for c in contestants:
        own = stats[c.name]
        reads = [name for name in ("read exact", f"read {c.format}") if name in stats and c.impl == "qkv"]
        for baseline in [best, *reads]:
            rows.append(
                Row(
                    suite, case, c.format, c.impl, "time", own.median * 1e6, "us", shape, own.p20 * 1e6,
                    own.p80 * 1e6, own.n, baseline, stats[baseline].median / own.median, c.nbytes,
                    c.nbytes / own.median / reader.bytes_per_second, c.error, note=c.note,
                )
            )  # fmt: skip
    return rows + [
        Row(suite, case, c.format, c.impl, "workspace", float(c.workspace), "bytes", shape, note=c.note)
        for c in contestants
        if c.workspace is not None
    ]
