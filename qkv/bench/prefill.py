"""`qkv bench prefill`: one chunk of a long prompt, over a stored history and itself.

qkv reads the history's records and never holds dense K and V. torch gets dense K and V of history and chunk, already
joined, in the fastest layout. Both are causal within the chunk. Caches are filled with other bytes before each call.
"""

from dataclasses import dataclass

from qkv.bench import baselines, checks
from qkv.bench.baselines import Problem
from qkv.bench.contest import dense, exact_result, qkv, time_rows
from qkv.bench.data import Geometry, keys_values, queries
from qkv.bench.decode import Say
from qkv.bench.reading import Reader
from qkv.bench.rows import Row, Shape
from qkv.bench.timing import Stats, interleave

SUITE = "prefill"


@dataclass(frozen=True)
class PrefillOptions:
    """`chunk` queries, and their own K and V, behind each of the `histories`; the rest as in DecodeOptions."""

    geometry: Geometry
    histories: tuple[int, ...] = (8192,)
    chunk: int = 512
    formats: tuple[str, ...] = ("kivi2", "kivi4", "int8")
    threads: int | None = None
    rounds: int = 5
    evict: int | None = None
    seconds: float = float("inf")
    case: str = "random"

    def check(self) -> None:
        """Raises InputError, FormatError."""
        checks.geometry(self.geometry, self.formats)
        checks.each_at_least("history", self.histories, 1)
        checks.at_least("chunk", self.chunk, 1)
        checks.at_least("rounds", self.rounds, 1)
        checks.thread_count(self.threads)
        checks.at_least("evict", self.evict or 0, 0)


def run(options: PrefillOptions, say: Say = lambda text: None) -> list[Row]:
    """Times and workspace. Raises InputError, FormatError."""
    options.check()
    with checks.threads(options.threads):
        reader = Reader()
        rows: list[Row] = []
        for history in options.histories:
            say(f"{options.chunk:,} queries over {history:,}")
            rows += _cell(options, history, reader)
        return rows


def _cell(options: PrefillOptions, history: int, reader: Reader) -> list[Row]:
    geometry, chunk = options.geometry, options.chunk
    k, v = keys_values(geometry, history + chunk)
    problem = Problem(queries(geometry, k, chunk), k, v, geometry.head_dim**-0.5)
    evict = reader.evictor(options.evict)
    wanted = exact_result(problem, k, v)
    ways = baselines.fastest(problem, wanted, evict, rounds=2)
    contestants = [dense(problem, way, 1, wanted) for way in ways]
    contestants += [qkv(problem, name, 1, chunk) for name in options.formats]
    calls = {c.name: c.run for c in contestants}
    times = interleave(calls, options.rounds, warmup=1, before=evict, seconds=options.seconds)
    stats = {name: Stats.of(taken) for name, taken in times.items()}
    shape = Shape(1, geometry.kv_heads, geometry.group, geometry.head_dim, history + chunk, chunk)
    return time_rows(SUITE, options.case, shape, contestants, stats, reader)
