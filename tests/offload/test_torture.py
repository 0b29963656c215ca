"""The store under torture, each program in a process of its own: short here, long with `make test-crash`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1500)  # the long ones

PROGRAMS = Path(__file__).parent / "torture"


def torture(program: str, *words: object, timeout: float = 1500) -> dict[str, int]:
    command = [sys.executable, str(PROGRAMS / f"{program}.py"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    print(program, done.stdout.strip())
    told: dict[str, int] = json.loads(done.stdout)
    return told


SHORT_AND_LONG = {
    "kills": (60, 400), "power": (20, 120), "flips": (400, 3000), "readers": (8, 600),
}  # fmt: skip


def lengths(program: str) -> list[object]:
    short, long = SHORT_AND_LONG[program]
    return [short, pytest.param(long, marks=pytest.mark.heavy)]


@pytest.mark.parametrize("kills", lengths("kills"))
def test_a_writer_killed_at_any_moment_loses_nothing_and_shows_nothing_broken(tmp_path: Path, kills: int) -> None:
    told = torture("kills", tmp_path, kills)
    assert told["kills"] >= kills * 0.9, "the first writers may die before they have made a store"
    assert told["published"] > 2 * kills
    assert told["unfinished"] > 0, "nobody died while writing"
    for bad in ("lost", "damaged", "wrong", "unindexed", "left_over"):
        assert told[bad] == 0, told


@pytest.mark.parametrize("puts", lengths("power"))
def test_whatever_a_power_failure_leaves_opens_and_what_was_published_is_intact(tmp_path: Path, puts: int) -> None:
    told = torture("power", tmp_path, puts)
    assert told["states"] > 5 * puts
    assert told["promised"] > told["states"]
    assert told["damaged"] == told["lost"] == told["wrong"] == 0, told


@pytest.mark.parametrize("broken", ["files", "folders"])
def test_the_model_of_power_failures_sees_a_missing_fsync(tmp_path: Path, broken: str) -> None:
    try:
        told = torture("power", tmp_path, 6, broken)
    except AssertionError:
        return  # a store that does not even open shows it too
    assert told["damaged"] + told["lost"] > 0


@pytest.mark.parametrize("cases", lengths("flips"))
def test_any_flipped_bit_or_cut_is_a_miss_put_aside_counted_and_computed(tmp_path: Path, cases: int) -> None:
    told = torture("flips", tmp_path, cases)
    assert told["flips"] + told["cuts"] == cases
    assert told["in zeros"] < cases / 20
    for bad in ("undetected", "uncounted", "not aside", "wrong"):
        assert told[bad] == 0, told


@pytest.mark.parametrize("seconds", lengths("readers"))
def test_a_writer_that_evicts_and_four_readers_agree_on_every_byte_under_the_cap(tmp_path: Path, seconds: int) -> None:
    told = torture("readers", tmp_path, seconds)
    assert told["most"] <= told["limit"]
    assert told["samples"] > 20 * seconds
    assert told["hits"] > 20 * seconds
    assert told["evicted"] > 5 * seconds
    assert told["wrong"] == told["damaged"] == told["corrupt"] == 0, told
