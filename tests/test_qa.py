"""Questions over a quantised cache on a real pretrained model (SmolLM2-135M, from its package)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv import KVManager, models
from qkv.budget import parse_bytes
from qkv.doctor import _cost, examine
from qkv.errors import InputError, ModelNotFound
from qkv.formats import get_format
from qkv.qa import DocumentQA, divergence
from qkv.spec import LayerSpec, RecordLayout

FACT = "One of the special magic numbers for harbour is: 7284613."
TRADES = (
    "nets",
    "clocks",
    "boats",
    "barrels",
    "gloves",
    "lamps",
    "saddles",
    "bells",
    "maps",
    "organs",
    "kites",
    "ropes",
)
FILLER = " ".join(
    f"In street {number} of the old town, {trade} were made until {1700 + 13 * number}, when a fire took the workshop."
    for number, trade in enumerate(TRADES, 1)
)
DOCUMENT = f"{FILLER} {FACT} {FILLER}"
QUESTION = "What is the special magic number for harbour mentioned in the document?"


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    try:
        return models.load("smollm2-135m", "float32")
    except ModelNotFound as error:
        pytest.skip(f"SmolLM2 cannot be had here: {error}")


def reader(loaded: tuple[Any, Any], format: str, **options: Any) -> DocumentQA:
    run = DocumentQA(*loaded, "smollm2-135m", get_format(format), **options)
    run.read(DOCUMENT)
    return run


@pytest.mark.parametrize("format", ["exact", "kivi4", "int8"])
def test_the_answer_is_found(smollm2: tuple[Any, Any], format: str) -> None:
    seen: list[tuple[int, int]] = []
    pieces: list[str] = []
    run = DocumentQA(*smollm2, "smollm2-135m", get_format(format), 24)
    run.read(DOCUMENT, lambda done, total: seen.append((done, total)))
    first = run.ask(QUESTION, pieces.append)
    second = run.ask(QUESTION, last=True)
    assert seen == [(layer + 1, 30) for layer in range(30)]
    assert "7284613" in first.answer
    assert "".join(pieces).strip() == first.answer
    assert second.answer == first.answer, "a question must not change what the next one reads"
    assert first.prefix_tokens_reused == 0
    assert second.prefix_tokens_reused == run.prefix_tokens > 500
    assert first.ttft_s > second.ttft_s > 0
    run.cache.manager.check()  # type: ignore[union-attr]


def test_quantised_is_smaller_and_reads_its_records(smollm2: tuple[Any, Any]) -> None:
    exact, four, two = (reader(smollm2, name) for name in ("exact", "kivi4", "kivi2"))
    logs = [run.score(QUESTION, "The magic number is 7284613.") for run in (exact, four, two)]
    assert divergence(logs[0], logs[0]) == 0
    assert 0 < divergence(logs[0], logs[1]) < divergence(logs[0], logs[2])
    answers = [run.ask(QUESTION, last=True) for run in (exact, four, two)]
    assert answers[2].kv_bytes < answers[1].kv_bytes < answers[0].kv_bytes
    manager = two.cache.manager  # type: ignore[union-attr]  # it has been read
    records, layout = manager._layers.records.records(0), manager.layout(0)
    assert records is not None
    assert layout is not None
    layout.field(records, "v_codes_0").random_()  # every record of one layer
    assert not torch.equal(two.score(QUESTION, "The"), logs[2][:1])


def test_reported_bytes_are_the_caches(smollm2: tuple[Any, Any]) -> None:
    run = reader(smollm2, "kivi2", max_new_tokens=4)
    answer = run.ask(QUESTION, last=True)
    assert run.cache is not None
    assert run.cache.memory().total * 0.8 < answer.kv_bytes == run.cache.held().total <= run.cache.memory().total
    tokens = run.cache.get_seq_length()
    assert answer.kv_bytes_exact == tokens * 30 * 2 * 3 * 64 * 4
    assert answer.bits_per_value == pytest.approx(answer.kv_bytes * 8 / (tokens * 30 * 2 * 3 * 64))


def test_bytes_do_not_depend_on_a_questions_place(smollm2: tuple[Any, Any]) -> None:
    run = reader(smollm2, "kivi4", max_new_tokens=4)
    first, second = run.ask(QUESTION), run.ask(QUESTION, last=True)
    assert first.answer == second.answer
    assert (first.kv_bytes, first.bits_per_value) == (second.kv_bytes, second.bits_per_value)


def test_the_longest_context_of_doctor_fits_token_by_token() -> None:
    for name in ("exact", "kivi2", "kivi4", "int8"):
        format = get_format(name)
        layer = LayerSpec(3, 64, torch.float32)
        for budget in (1_500_000, 3_000_000):
            cost = _cost(format, RecordLayout(format, layer), 2, budget, None)
            manager = KVManager(2, format)
            sequence = manager.open()
            for _ in range(cost.longest_context):
                for at in range(2):
                    manager.append(sequence, at, *torch.randn(2, 3, 1, 64))
            assert 0 < manager.memory().total <= budget


def test_a_document_beyond_the_context_is_refused_with_both_numbers(smollm2: tuple[Any, Any]) -> None:
    run = DocumentQA(*smollm2, "smollm2-135m", get_format("kivi4"))
    with pytest.raises(InputError, match=r"got \d+ tokens \(48 of them for the answer\), wanted at most 8192"):
        run.read(FILLER * 30)
    with pytest.raises(InputError, match="no text"):
        run.read(" \n")
    with pytest.raises(InputError, match="max-new-tokens"):
        DocumentQA(*smollm2, "smollm2-135m", get_format("kivi4"), 0)


def test_doctor_examines_the_model(smollm2: tuple[Any, Any]) -> None:
    report = examine(*smollm2, parse_bytes("64MiB"))
    assert (report.layers, report.quantised_layers, report.kv_heads, report.head_dim) == (30, 30, 3, 64)
    assert report.key_bias_norm is None
    assert report.key_outlier[0] > 1
    costs = {cost.format: cost for cost in report.costs}
    assert costs["exact"].bytes_per_token == 30 * 2 * 3 * 64 * 4
    assert costs["exact"].longest_context < costs["kivi4"].longest_context < costs["kivi2"].longest_context
    for cost in report.costs:
        assert (cost.longest_context - 191) * cost.bytes_per_token <= 64 * 2**20


def test_cli_compare_json(smollm2: tuple[Any, Any], tmp_path: Path) -> None:
    document = tmp_path / "town.md"
    document.write_text(DOCUMENT)
    command = [sys.executable, "-c", "from qkv.cli import main; main()", "qa", str(document), QUESTION, QUESTION]
    options = ["--model", "smollm2-135m", "--compare", "--json", "--max-new-tokens", "8", "--format", "kivi4/kivi2"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True, timeout=240)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["question"] for row in rows] == [QUESTION, QUESTION]
    for row in rows:
        assert row["format"] == "kivi4/kivi2"
        assert row["kl"] >= 0
        assert row["kv_bytes"] < row["kv_bytes_exact"]
        assert row["answer_exact"]
