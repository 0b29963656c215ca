"""The command line as a user meets it: a real process, real exit codes, one-line errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from qkv import cli

COMMAND = [sys.executable, "-c", "from qkv.cli import main; main()"]


def qkv(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False, timeout=240)


def one_line_error(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert done.stdout == ""
    return lines[0]


def test_formats_lists_every_format_with_its_bits() -> None:
    rows = [json.loads(line) for line in qkv("formats", "--json").stdout.splitlines()]
    bits = {row["id"]: row["bits"] for row in rows}
    assert bits["kivi2"] == 3.0
    assert bits["kivi4"] == 5.0
    assert bits["kivi2_g128"] == 2.25
    assert bits["exact"] == 16.0
    assert all({"id", "bits", "k", "v", "group", "source"} <= row.keys() for row in rows)


def test_formats_table_and_models_ls_print() -> None:
    assert "kivi3_g64" in qkv("formats").stdout
    assert "smollm2-135m" in qkv("models", "ls").stdout


def test_doctor_names_a_kernel_for_every_op() -> None:
    done = qkv("doctor")
    assert done.returncode == 0
    assert all(op in done.stdout for op in ("seal", "unseal", "attend"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--format", "kivi5"), "kivi4"),
        (("--k-format", "nf9"), "kivi4"),
        (("--v-format", "nf9"), "got 'nf9'"),
        (("--model", "no/such/model"), "no/such/model"),
        (("--model", "[/b]"), "[/b]"),
        (("--model", ""), "give a folder"),
    ],
)
def test_bad_options_are_one_line(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    document = tmp_path / "a.txt"
    document.write_text("The harbour has 212 ships.")
    assert says in one_line_error(qkv("qa", str(document), "How many ships?", *words))


def test_bad_documents_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "binary.txt").write_bytes(b"\0\1\2" * 100)
    for name in ("empty.txt", "binary.txt", "absent.txt"):
        assert name in one_line_error(qkv("qa", str(tmp_path / name), "What?"))
    (tmp_path / "a.txt").write_text("text")
    assert "question" in one_line_error(qkv("qa", str(tmp_path / "a.txt"), " "))


@pytest.mark.parametrize("budget", ["0GiB", "-1GiB", "lots", "3XB", "", "nan", "inf", "infGiB", "1e400"])
def test_bad_budget_is_one_line(budget: str) -> None:
    assert "budget" in one_line_error(qkv("doctor", "--budget", budget))


def test_text_of_users_and_models_is_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "question": "What is [/b]?", "answer": "[yyyy]", "answer_exact": "[red]", "kl": 0.1, "ttft_s": 1.0,
        "decode_tokens_per_s": 1.0, "format": "kivi4", "prompt_tokens": 9, "kv_bytes": 1, "kv_bytes_exact": 2,
        "bits_per_value": 8.0,
    }  # fmt: skip
    cli._print_answers([row])
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("[/b]", "[yyyy]", "[red]"))
