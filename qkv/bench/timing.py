"""Contestants timed in turn, in one process, so that a slow second of the machine hits all of them alike."""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

Clock = Callable[[], float]


@dataclass(frozen=True)
class Stats:
    """Median, 20th and 80th percentile of n samples."""

    median: float
    p20: float
    p80: float
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Stats":
        """Of at least one sample; percentiles interpolate linearly."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1)
        tenths = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(statistics.median(samples), tenths[1], tenths[7], len(samples))

    def scaled(self, factor: float) -> "Stats":
        """In another unit; a negative power of time is not a factor, see `rate`."""
        return Stats(self.median * factor, self.p20 * factor, self.p80 * factor, self.n)

    def rate(self, amount: float) -> "Stats":
        """`amount` a second, of times in seconds; the quantiles change places."""
        return Stats(amount / self.median, amount / self.p80, amount / self.p20, self.n)


def interleave(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 2,
    before: Callable[[str], object] | None = None,
    seconds: float = float("inf"),
    clock: Clock = time.perf_counter,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Seconds of every call, by contestant: each runs once a round, in random order; `warmup` rounds are dropped.

    `before(name)` runs ahead of every call and is not timed. After `seconds` no new round starts, once three are kept.
    """
    order, shuffler = list(contestants), random.Random(seed)
    samples: dict[str, list[float]] = {name: [] for name in order}
    began = clock()
    for index in range(warmup + rounds):
        if index >= warmup + 3 and clock() - began > seconds:
            break
        shuffler.shuffle(order)
        for name in order:
            if before is not None:
                before(name)
            start = clock()
            contestants[name]()
            took = clock() - start
            if index >= warmup:
                samples[name].append(took)
    return samples


@dataclass(frozen=True)
class Line:
    """y = intercept + slope x; `residual`: root mean square of the relative deviations from it."""

    slope: float
    intercept: float
    residual: float


def fit_line(points: Iterable[tuple[float, float]]) -> Line | None:
    """The line with the least squared relative deviations; None for fewer than two different x."""
    pairs = list(points)
    if len({x for x, _ in pairs}) < 2:
        return None
    weights = [1 / (y * y) for _, y in pairs]
    total = sum(weights)
    x_mean = sum(w * x for w, (x, _) in zip(weights, pairs, strict=True)) / total
    y_mean = sum(w * y for w, (_, y) in zip(weights, pairs, strict=True)) / total
    spread = sum(w * (x - x_mean) ** 2 for w, (x, _) in zip(weights, pairs, strict=True))
    slope = sum(w * (x - x_mean) * (y - y_mean) for w, (x, y) in zip(weights, pairs, strict=True)) / spread
    intercept = y_mean - slope * x_mean
    squares = [((intercept + slope * x) / y - 1) ** 2 for x, y in pairs]
    return Line(slope, intercept, (sum(squares) / len(squares)) ** 0.5)


def break_even(line: Line, exact: Line) -> float:
    """The x from which `line` lies below `exact`: 0 if it always does, infinite if it never will."""
    if line.slope >= exact.slope:
        return 0.0 if line.intercept <= exact.intercept and line.slope <= exact.slope else float("inf")
    return max(0.0, (line.intercept - exact.intercept) / (exact.slope - line.slope))
