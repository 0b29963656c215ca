"""README tables come from rows as the suites write them, also before there are any."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from qkv.bench.rows import Row, Shape

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/tables.py, looking for results in an empty folder."""
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks/tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def write(folder: Path, name: str, rows: list[Row]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row.as_json()) + "\n" for row in rows))


def test_without_results_there_is_no_table(tables: Any) -> None:
    assert {make() for make in tables.TABLES.values()} == {""}


def test_the_readme_has_a_place_for_every_table(tables: Any) -> None:
    text = (ROOT / "README.md").read_text()
    assert tables.fill(tables.fill(text)) == tables.fill(text)
    with pytest.raises(SystemExit, match="fidelity"):
        tables.fill("nothing")


def test_decode_and_errors(tables: Any, tmp_path: Path) -> None:
    shapes = {context: Shape(1, 2, 4, 128, context, 1) for context in (2048, 32768)}
    time = [
        Row("decode", "random", "kivi2", "qkv", "time", context / 10, "us", shape, baseline=baseline, ratio=ratio)
        for context, shape in shapes.items()
        for baseline, ratio in (("sdpa rows bfloat16", 6.5), ("read exact", 1.3), ("read kivi2", 0.5))
    ]
    never = Row(
        "decode", "random", "kivi2", "qkv", "break_even", float("inf"), "tokens", shapes[2048], baseline="sdpa best",
        note="never",
    )  # fmt: skip
    error = [
        Row("decode", "captured m", "kivi2", impl, "error", value, "relative L2", shapes[2048])
        for impl, value in (("qkv", 2e-4), ("qkv precise", 1e-6))
    ]
    error.append(Row("decode", "continuation m", "kivi2", "qkv", "kl_added", 0.0012, "share", shapes[2048]))
    write(tmp_path, "decode", [*time, never, *error])
    assert "| 2 x 128, group 4 | " in tables.decode()
    assert "| kivi2 | 50.0 | 6.50 | 6.50 | 1.30 | 0.50 | never |" in tables.decode()
    assert "| kivi2 | 2.0e-04 | 1.0e-06 | 1.2e-03 |" in tables.errors()


def test_prefill_and_seal(tables: Any, tmp_path: Path) -> None:
    shape = Shape(1, 2, 4, 128, 8704, 512)
    held = Row("prefill", "random", "kivi2", "qkv", "workspace", 2.0**21, "bytes", shape)
    time = Row("prefill", "random", "kivi2", "qkv", "time", 2500, "us", shape, baseline="sdpa gqa", ratio=0.8)
    write(tmp_path, "prefill", [time, held])
    assert "| kivi2 | 2.5 | 0.80 | sdpa gqa | 2.0 MiB |" in tables.prefill()
    write(
        tmp_path,
        "seal",
        [
            Row("seal", "random", "exact", "copy", "throughput", 5, "GB/s", shape),
            Row("seal", "random", "kivi2", "qkv seal", "throughput", 2.5, "GB/s", shape),
            Row("seal", "random", "kivi2", "qkv unseal", "throughput", 3.5, "GB/s", shape),
            Row("seal", "m", "kivi2", "qkv append", "share_of_prefill", 0.015, "share", shape),
        ],
    )
    assert "| kivi2 | 2.50 | 3.50 | - | 1.5% |" in tables.seal()


def test_model_says_what_did_not_run(tables: Any, tmp_path: Path) -> None:
    rows = [
        Row("model", "m", format, impl, metric, 20, "tokens/s", Shape(1, 3, 3, 64, 1024, 1), baseline=base, ratio=2)
        for impl, format in (("DynamicCache", "exact"), ("QKVCache", "kivi2"))
        for metric in ("prefill", "decode")
        for base in ("DynamicCache", "StaticCache")
    ]
    missing = Row(
        "model", "m", "hqq4", "QuantizedCache", "decode", float("nan"), "tokens/s", Shape(1, 3, 3, 64, 1024, 1),
        note="ImportError: no",
    )  # fmt: skip
    write(tmp_path, "model", [*rows, missing])
    assert "| QKVCache | kivi2 | 20.0 (2.00, 2.00) | 2.00 |" in tables.model()
    assert "| QuantizedCache | hqq4 | not run | - |" in tables.model()
