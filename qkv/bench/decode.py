"""`qkv bench decode`: one attention call of one layer over a stored context, for a token or a few.

A sample is one pass over several layers that lie apart in memory, as a decode step makes it, divided by their number;
before each pass the last-level cache is filled with other bytes. Every contestant runs once a round, in random order.
"""

from collections.abc import Callable
from dataclasses import dataclass

from qkv.bench import baselines, checks, errors
from qkv.bench.baselines import Problem
from qkv.bench.contest import Stored, dense, dense_bytes, exact_result, qkv, reading, time_rows
from qkv.bench.data import Geometry, keys_values, queries
from qkv.bench.reading import Reader
from qkv.bench.rows import Row, Shape
from qkv.bench.timing import Line, Stats, break_even, fit_line, interleave

SUITE = "decode"
FEWEST_LAYERS, MOST_LAYERS = 4, 16
LAYERS_BYTES = 1 << 25  # of the smallest contestant's K and V, at least, in a pass
MEMORY = 3 << 30
Say = Callable[[str], None]


@dataclass(frozen=True)
class DecodeOptions:
    """What to measure.

    contexts  tokens stored, the last q_len of which are the queries' own
    layers    distinct layers in a pass; None: 4 to 16, by size, in `memory` bytes
    evict     bytes read before each pass, untimed; None: the last-level cache, at most 512 MiB
    seconds   a context starts no new round after that long, once three are kept
    case      what rows call the data
    """

    geometry: Geometry
    contexts: tuple[int, ...] = (2048, 8192, 32768)
    formats: tuple[str, ...] = ("kivi2", "kivi4", "int8")
    q_len: int = 1
    threads: int | None = None
    rounds: int = 12
    layers: int | None = None
    evict: int | None = None
    memory: int = MEMORY
    seconds: float = float("inf")
    case: str = "random"

    def check(self) -> None:
        """Raises InputError, FormatError."""
        checks.geometry(self.geometry, self.formats)
        checks.at_least("q_len", self.q_len, 1)
        checks.each_at_least("context", self.contexts, self.q_len)
        checks.at_least("rounds", self.rounds, 1)
        checks.thread_count(self.threads)
        checks.at_least("layers", 1 if self.layers is None else self.layers, 1)
        checks.at_least("evict", self.evict or 0, 0)

    def shape(self, context: int) -> Shape:
        g = self.geometry
        return Shape(1, g.kv_heads, g.group, g.head_dim, context, self.q_len)


def run(options: DecodeOptions, say: Say = lambda text: None) -> list[Row]:
    """All rows: times by context, lines over contexts, errors, workspace. Raises InputError, FormatError."""
    options.check()
    with checks.threads(options.threads):
        reader = Reader()
        say(f"reading: {reader.bytes_per_second / 1e9:.1f} GB/s, {reader.name}")
        rows: list[Row] = []
        for context in options.contexts:
            say(f"context {context:,}")
            rows += _cell(options, context, reader)
        rows += _lines(options, rows)
        say("errors")
        longest = max(options.contexts)
        return rows + errors.random(SUITE, options.case, options.geometry, options.formats, longest, options.q_len)


def _cell(options: DecodeOptions, context: int, reader: Reader) -> list[Row]:
    """Rows of one context."""
    geometry = options.geometry
    k, v = keys_values(geometry, context)
    problem = Problem(queries(geometry, k, options.q_len), k, v, geometry.head_dim**-0.5)
    evict = reader.evictor(options.evict)
    wanted = exact_result(problem, k, v)
    ways = baselines.fastest(problem, wanted, evict)
    sizes = {name: Stored(problem, name).nbytes for name in options.formats} | {"exact": k.nbytes + v.nbytes}
    layers = _layers(options, [*sizes.values(), *(dense_bytes(problem, *way) for way in ways)])
    contestants = [dense(problem, way, layers, wanted) for way in ways]
    contestants += [qkv(problem, name, layers) for name in options.formats]
    contestants += [reading(name, nbytes, layers, reader) for name, nbytes in sizes.items()]
    calls = {c.name: c.run for c in contestants}
    times = interleave(calls, options.rounds, before=evict, seconds=options.seconds)
    stats = {name: Stats.of(taken).scaled(1 / layers) for name, taken in times.items()}  # seconds a layer
    return time_rows(SUITE, options.case, options.shape(context), contestants, stats, reader)


def _layers(options: DecodeOptions, sizes: list[int]) -> int:
    """How many layers a pass has, so that it is not over in a moment, and all contestants' fit in `memory`."""
    if options.layers is not None:
        return options.layers
    wanted = min(MOST_LAYERS, max(FEWEST_LAYERS, -(-LAYERS_BYTES // min(sizes))))
    return max(1, min(wanted, options.memory // (2 * sum(sizes))))


def _lines(options: DecodeOptions, rows: list[Row]) -> list[Row]:
    """Slope, intercept, fit residual and break-even of each format's time over the contexts; exact is torch's best."""
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.metric == "time" and row.impl != "read":
            of = points.setdefault(row.format, {})
            of[row.shape.context] = min(row.value, of.get(row.shape.context, float("inf")))
    lines = {name: line for name, of in points.items() if (line := fit_line(of.items())) is not None}
    if "exact" not in lines:
        return []
    longest, heads = max(options.contexts), options.geometry.kv_heads
    made = []
    for name, line in lines.items():
        values = [
            ("slope", line.slope * 1e3 / heads, "ns/token"),
            ("intercept", line.intercept, "us"),
            ("fit_residual", line.residual, "share"),
        ]
        impl = "sdpa best" if name == "exact" else "qkv"
        for metric, value, unit in values:
            ratio = lines["exact"].slope / line.slope if metric == "slope" and line.slope > 0 else None
            made.append(
                Row(
                    SUITE, options.case, name, impl, metric, value, unit, options.shape(longest),
                    n=len(points[name]), baseline="sdpa best", ratio=ratio, note="per KV head" if ratio else "",
                )
            )  # fmt: skip
        if name != "exact":
            made.append(_break_even_row(options, name, line, lines["exact"]))
    return made


def _break_even_row(options: DecodeOptions, format: str, line: Line, exact: Line) -> Row:
    at = break_even(line, exact)
    note = "never, going by the two lines" if at == float("inf") else ""
    shape = options.shape(max(options.contexts))
    return Row(
        SUITE, options.case, format, "qkv", "break_even", at, "tokens", shape, n=len(options.contexts),
        baseline="sdpa best", note=note,
    )  # fmt: skip
