"""`qkv qa --store`: a document that was read once is not read again. Real model, real processes, real damage."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv import models
from qkv.errors import ModelNotFound
from qkv.formats import get_format
from qkv.offload.disk import DiskStore
from qkv.offload.io import FileIO
from qkv.qa import DocumentQA

TOWN = " ".join(
    f"In street {number} of the old town, {trade} were made until {1700 + 13 * number}, when a fire took the workshop."
    for number, trade in enumerate(
        ("nets", "clocks", "boats", "barrels", "gloves", "lamps", "saddles", "bells", "maps"), 1
    )
)
DOCUMENT = f"{TOWN} One of the special magic numbers for harbour is: 7284613. {TOWN}"
QUESTION = "What is the special magic number for harbour mentioned in the document?"
COMMAND = [sys.executable, "-c", "from qkv.cli import main; main()"]


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    try:
        return models.load("smollm2-135m", "float32")
    except ModelNotFound as error:
        pytest.skip(f"SmolLM2 cannot be had here: {error}")


def reader(loaded: tuple[Any, Any], store: DiskStore | None, format: str = "kivi4") -> DocumentQA:
    run = DocumentQA(*loaded, "smollm2-135m", get_format(format), 24, store)
    run.read(DOCUMENT)
    return run


@pytest.mark.parametrize("format", ["kivi2", "exact"])
def test_a_stored_document_answers_bit_for_bit_as_the_one_in_memory(
    smollm2: tuple[Any, Any], tmp_path: Path, format: str
) -> None:
    with DiskStore(tmp_path / "store") as store:
        first = reader(smollm2, store, format)
        second = reader(smollm2, store, format)
        words = "The number is 7284613 and the harbour is old."
        assert torch.equal(second.score(QUESTION, words), first.score(QUESTION, words))
        told = [run.ask(QUESTION) for run in (first, second)]
        assert (told[0].answer, told[0].kv_bytes) == (told[1].answer, told[1].kv_bytes)
        assert told[0].prefix_tokens_reused == 0
        assert told[1].prefix_tokens_reused == second.prefix_tokens
        assert told[1].ttft_s < told[0].ttft_s
        assert store.counts == {"misses": 1, "stored": 1, "hits": 1}
        assert first.notes == second.notes == []
        second.cache.manager.check()  # type: ignore[union-attr]  # it has been read


def test_a_damaged_layer_costs_time_and_is_said(smollm2: tuple[Any, Any], tmp_path: Path) -> None:
    with DiskStore(tmp_path / "store") as store:
        answer = reader(smollm2, store).ask(QUESTION).answer
        (file,) = (tmp_path / "store" / "ns").rglob("*.h5")
        data = bytearray(file.read_bytes())
        data[-100_000] ^= 1  # in one of the last layers: the first ones have been used when it shows
        file.write_bytes(data)
        run = reader(smollm2, store)
        told = run.ask(QUESTION)
        assert told.answer == answer
        assert told.prefix_tokens_reused == 0
        assert len(run.notes) == 1
        assert "read again" in run.notes[0]
        assert (store.counts["corrupt"], store.counts["stored"]) == (1, 2)
        assert reader(smollm2, store).ask(QUESTION, last=True).prefix_tokens_reused == run.prefix_tokens


def test_a_store_that_fails_never_fails_the_answer(smollm2: tuple[Any, Any], tmp_path: Path) -> None:
    class Full(FileIO):
        def fallocate(self, fd: int, size: int) -> None:
            raise OSError(28, "No space left on device")

    with DiskStore(tmp_path / "store", io=Full()) as store:
        run = reader(smollm2, store)
        assert "7284613" in run.ask(QUESTION).answer
        assert "not stored" in run.notes[0]
        assert "No space left" in run.notes[0]
    with DiskStore(tmp_path / "store", readonly=True) as store:
        assert reader(smollm2, store).notes == []


def test_the_second_process_reads_no_document(tmp_path: Path) -> None:
    document = tmp_path / "town.txt"
    document.write_text(DOCUMENT)
    store = tmp_path / "store"
    command = [*COMMAND, "qa", str(document), QUESTION, "--model", "smollm2-135m", "--store", str(store), "--json"]
    rows = []
    for extra in ([], [], ["--format", "kivi2"]):
        done = subprocess.run([*command, *extra], capture_output=True, text=True, check=True, timeout=240)
        assert "warning" not in done.stderr
        rows.append(json.loads(done.stdout))
    assert [row["prefix_tokens_reused"] > 0 for row in rows] == [False, True, False]
    assert rows[1]["answer"] == rows[0]["answer"]
    assert rows[1]["prefix_tokens_reused"] > 500
    assert rows[1]["ttft_s"] < rows[0]["ttft_s"]
    with DiskStore(store):  # somebody else writes
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr
