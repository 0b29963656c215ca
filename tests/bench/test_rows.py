"""The row's schema, as docs/design.md section 10 lists it."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qkv.bench import rows
from qkv.bench.rows import Row, Shape

ROOT = Path(__file__).resolve().parents[2]
SHAPE = Shape(1, 2, 4, 128, 2048, 1)


def test_a_row_has_the_fields_of_the_schema() -> None:
    section = (ROOT / "docs/design.md").read_text().partition("## 10.")[2].partition("\n`qkv qa")[0]
    named = set(re.findall(r"`(\w+)`", section.partition("A bench row:")[2]))
    row = Row("decode", "random", "kivi2", "qkv", "time", 12.5, "us", SHAPE).as_json()
    assert named == set(row)
    assert set(row["shape"]) == {"batch", "kv_heads", "group", "head_dim", "context", "q_len"}
    assert set(row["machine"]) == {"cpu", "threads", "gpu", "torch", "numba"}


def test_rows_are_json_lines_of_plain_numbers() -> None:
    target = io.StringIO()
    row = Row("model", "m", "quanto4", "QuantizedCache", "decode", float("nan"), "tokens/s", SHAPE, note="not there")
    rows.write([row, row], target)
    read = [json.loads(line) for line in target.getvalue().splitlines()]
    assert len(read) == 2
    assert read[0]["value"] is None
    assert read[0]["note"] == "not there"
    assert read[0]["machine"]["threads"] >= 1


def test_a_number_that_is_none_needs_a_reason() -> None:
    with pytest.raises(AssertionError):
        Row("model", "m", "f", "i", "decode", float("nan"), "tokens/s", SHAPE)
    with pytest.raises(AssertionError):
        Row("model", "m", "f", "i", "decode", 1.0, "furlongs", SHAPE)


def test_the_machine_is_named_without_host_or_path() -> None:
    import platform

    told = json.dumps(Row("s", "c", "f", "i", "m", 1.0, "us", SHAPE).as_json())
    assert platform.node() not in told.split('"')
    assert str(ROOT) not in told


def test_measuring_needs_no_printing_package() -> None:
    names = [
        "baselines",
        "checks",
        "contest",
        "data",
        "decode",
        "errors",
        "model",
        "prefill",
        "reading",
        "rows",
        "seal",
    ]
    script = "import sys\nsys.modules['typer'] = sys.modules['rich'] = None\n" + "\n".join(
        f"import qkv.bench.{name}" for name in [*names, "timing", "workspace", "oracle"]
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
