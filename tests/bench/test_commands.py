"""`qkv bench` as a user meets it: tables, JSON lines, one-line errors."""

import json
from pathlib import Path

import pytest

from qkv import cli

DECODE = [
    "--kv-heads",
    "1",
    "--group",
    "2",
    "--head-dim",
    "16",
    "--context",
    "300",
    "--context",
    "500",
    "--layers",
    "1",
]
QUICK = ["--rounds", "3", "--evict", "0", "--threads", "1", "--format", "kivi2"]
SUITES = {
    "decode": [*DECODE, *QUICK],
    "prefill": [*DECODE[:6], "--history", "200", "--chunk", "40", *QUICK],
    "seal": ["--kv-heads", "1", "--head-dim", "16", "--blocks", "1", *QUICK],
}


def bench(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of `qkv bench words`."""
    monkeypatch.setattr("sys.argv", ["qkv", "bench", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


@pytest.mark.parametrize("suite", SUITES)
def test_json_lines_alone_on_stdout(
    suite: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(monkeypatch, suite, *SUITES[suite], "--json", "-") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows
    assert all(row["suite"] == suite and row["machine"]["threads"] == 1 for row in rows)
    assert {"kivi2", "exact"} <= {row["format"] for row in rows}


@pytest.mark.parametrize("suite", SUITES)
def test_a_table_and_a_file(
    suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    monkeypatch.setenv("COLUMNS", "300")
    assert bench(monkeypatch, suite, *SUITES[suite], "--json", str(file)) == 0
    shown = capsys.readouterr()
    assert "kivi2" in shown.out
    assert "threads: 1" in shown.out
    assert all(json.loads(line)["suite"] == suite for line in file.read_text().splitlines())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("decode", "--threads", "0"), "threads: got 0, wanted 1 to 1024"),
        (("decode", "--context", "0"), "context: got 0, wanted at least 1"),
        (("decode", "--format", "kivi9"), "got 'kivi9', wanted one of exact"),
        (("decode", "--head-dim", "40"), "got head_dim 40, wanted a multiple of 16"),
        (("decode", "--dtype", "int3"), "got 'int3', wanted one of bfloat16"),
        (("decode", "--json", "no/such/folder/x"), "wanted a file that can be written"),
        (("decode", "--model", "no/such/model"), "no/such/model"),
        (("prefill", "--chunk", "0"), "chunk: got 0"),
        (("prefill", "--kv-heads", "0"), "kv_heads: got 0"),
        (("seal", "--blocks", "0"), "blocks: got 0"),
        (("seal", "--tokens", "0"), "tokens: got 0"),
        (("model", "--model", "m", "--length", "10"), "length: got 10, wanted at least 35"),
        (("model", "--model", "no/such/model"), "no/such/model"),
    ],
)
def test_bad_input_is_one_line(
    words: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(monkeypatch, *words) == 2
    shown = capsys.readouterr()
    (told,) = [line for line in shown.err.splitlines() if not line.startswith("loading ")]
    assert told.startswith("error: ")
    assert says in told
    assert shown.out == ""
