"""What a block costs in a large pool. The full size is heavy; the measure itself is tried small."""

import pytest

from qkv.bench.pool import STEPS, PoolOptions, run
from qkv.errors import InputError


def test_the_measure_works() -> None:
    rows = {row.metric: row for row in run(PoolOptions(64, prompt=8, rounds=3))}
    assert rows.keys() == {*STEPS, "total", "sha256", "match"}
    assert rows["total"].value == pytest.approx(sum(rows[step].value for step in STEPS))
    assert rows["total"].ratio == pytest.approx(rows["sha256"].value / rows["total"].value)
    for bad in (PoolOptions(8, prompt=9), PoolOptions(8, prompt=0), PoolOptions(8, prompt=8, rounds=1)):
        with pytest.raises(InputError):
            run(bad)


@pytest.mark.heavy
def test_a_million_blocks() -> None:
    rows = {row.metric: row.value for row in run(PoolOptions(1_000_000))}
    print(rows)
    assert rows["total"] < 10
    assert rows["match"] < 5
