"""Interleaving, statistics and lines, with a clock that the tests move."""

import random

import pytest

from qkv.bench.timing import Line, Stats, break_even, fit_line, interleave


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_every_contestant_runs_once_a_round_and_warm_up_is_dropped() -> None:
    clock, log = Clock(), []

    def spend(name: str, seconds: float) -> None:
        log.append(name)
        clock.now += seconds + (100 if len(log) <= 6 else 0)  # the first two rounds are slow

    calls = {name: (lambda n=name, s=s: spend(n, s)) for name, s in (("a", 1.0), ("b", 2.0), ("c", 4.0))}
    times = interleave(calls, 20, warmup=2, clock=clock)
    rounds = [log[i : i + 3] for i in range(0, len(log), 3)]
    assert len(rounds) == 22
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1, "the order never changes"
    assert times == {"a": [pytest.approx(1.0)] * 20, "b": [pytest.approx(2.0)] * 20, "c": [pytest.approx(4.0)] * 20}


def test_what_runs_before_a_call_is_not_timed() -> None:
    clock, told = Clock(), []

    def before(name: str) -> None:
        told.append(name)
        clock.now += 50

    def call() -> None:
        clock.now += 1

    assert interleave({"a": call}, 2, warmup=1, before=before, clock=clock) == {"a": [1, 1]}
    assert told == ["a"] * 3


def test_the_time_limit_keeps_three_rounds() -> None:
    clock = Clock()

    def call() -> None:
        clock.now += 10

    assert len(interleave({"a": call}, 50, warmup=1, seconds=0, clock=clock)["a"]) == 3
    assert len(interleave({"a": call}, 50, warmup=1, seconds=95, clock=clock)["a"]) == 9


def test_stats_are_median_and_quantiles() -> None:
    samples = [float(i) for i in range(11)]
    random.Random(0).shuffle(samples)
    assert Stats.of(samples) == Stats(5.0, 2.0, 8.0, 11)
    assert Stats.of([3.0]) == Stats(3.0, 3.0, 3.0, 1)
    assert Stats.of([1.0, 2.0]).n == 2
    assert Stats(5.0, 2.0, 8.0, 11).scaled(10) == Stats(50.0, 20.0, 80.0, 11)


def test_a_rate_turns_the_quantiles_round() -> None:
    assert Stats(2.0, 1.0, 4.0, 9).rate(8) == Stats(4.0, 2.0, 8.0, 9)


def test_a_line_is_found() -> None:
    line = fit_line((x, 3 + 0.5 * x) for x in (10, 100, 1000))
    assert line is not None
    assert (line.slope, line.intercept) == (pytest.approx(0.5), pytest.approx(3))
    assert line.residual < 1e-12
    bent = fit_line([(10, 10), (20, 25), (30, 30)])
    assert bent is not None
    assert bent.residual > 0.05
    assert fit_line([(10, 10), (10, 11)]) is None


@pytest.mark.parametrize(
    ("line", "at"),
    [
        (Line(1, 100, 0), 100 / 3),
        (Line(1, 0, 0), 0),  # cheaper everywhere
        (Line(4, 0, 0), 0),
        (Line(4, 1, 0), float("inf")),
        (Line(5, 0, 0), float("inf")),  # cheaper only before the lines cross
    ],
)
def test_break_even_is_where_the_lines_cross(line: Line, at: float) -> None:
    assert break_even(line, Line(4, 0, 0)) == pytest.approx(at)
