"""`qkv store`: what a user sees and does, on a store with a parent, a child and another namespace."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from typer.testing import CliRunner

from qkv import KVManager
from qkv.errors import InputError
from qkv.offload.disk import DiskStore
from qkv.offload.onefile import OneFile
from qkv.prefix import Namespace
from qkv.store_commands import app

SPACE = Namespace("w", ((2, 16, "float32"),) * 2, "kivi2", 1, 128, 64)
TOKENS = list(range(1000))


def run(*words: Any, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False, env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.output


def kept(store: DiskStore, tokens: list[int], space: Namespace = SPACE) -> str:
    manager = KVManager(2, "kivi2")
    manager.attach(store)
    sequence = manager.open(tokens, space)
    torch.manual_seed(7)
    states = torch.randn(2, 2, 2, len(TOKENS), 16)
    have = manager.length(sequence)
    for layer in range(2):
        manager.append(sequence, layer, *states[layer, :, :, have : len(tokens)])
    return manager.save(sequence)


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, list[str]]:
    """A store with a segment, one that stands on it, and one of another namespace; and their names."""
    with DiskStore(tmp_path / "store") as store:
        names = [kept(store, TOKENS[:600]), kept(store, TOKENS), kept(store, TOKENS[:500], replace(SPACE, salt="b"))]
    return tmp_path / "store", names


def test_ls_and_info_tell_what_is_there(place: tuple[Path, list[str]]) -> None:
    store, names = place
    rows = [json.loads(line) for line in run("ls", store, "--json").splitlines()]
    assert {row["name"] for row in rows} == set(names)
    assert {row["name"]: row["parent"] for row in rows}[names[1]] == names[0]
    assert all(name[:16] in run("ls", store) for name in names)
    whole = json.loads(run("info", store, "--json"))
    assert whole["segments"] == 3
    assert whole["bytes on disk"] >= sum(row["bytes"] for row in rows)
    told = json.loads(run("info", store, names[1][:10], "--json"))
    assert told["name"] == names[1]
    assert told["stands on"] == names[0]
    assert (told["format"], told["checksums"]) == ("kivi2", "xxh3-128")
    assert names[1] in run("info", store, names[1])
    with pytest.raises(InputError, match="0 names begin so"):
        run("info", store, "zz")
    with pytest.raises(InputError, match="3 names begin so"):
        run("rm", store, "")


def test_verify_finds_damage_and_gc_removes_it_with_what_stood_on_it(place: tuple[Path, list[str]]) -> None:
    store, names = place
    assert "3 segments are whole, 0 damaged, 0 not read\n" in run("verify", store)
    (file,) = (store / "ns").rglob(f"{names[0]}.h5")
    data = bytearray(file.read_bytes())
    data[-5000] ^= 1
    file.write_bytes(data)
    shown = run("verify", store, code=1)
    assert names[0] in shown
    assert "2 segments are whole, 1 damaged, 0 not read" in shown
    assert run("gc", store).startswith("2 files removed, ")
    assert [json.loads(line)["name"] for line in run("ls", store, "--json").splitlines()] == [names[2]]
    assert run("gc", store, "--limit", "1KiB").startswith("1 files removed, ")
    assert run("ls", store, "--json") == ""


def test_rm_removes_what_stands_on_it_too(place: tuple[Path, list[str]]) -> None:
    store, names = place
    shown = run("rm", store, names[0][:12], names[1][:12])
    assert shown.count("removed") == 2
    assert [json.loads(line)["name"] for line in run("ls", store, "--json").splitlines()] == [names[2]]


def test_export_makes_one_file_of_a_chain(
    place: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, names = place
    monkeypatch.chdir(tmp_path)
    run("export", store, names[1][:12], "bare.h5")
    assert Path("bare.h5").is_file()
    file = tmp_path / "one.h5"
    run("export", store, names[1][:12], file)
    with h5py.File(file) as opened:
        assert opened["kv"].shape[0] == 2
    managers = [KVManager(2, "kivi2") for _ in range(2)]
    with DiskStore(store, readonly=True) as kept_store:
        managers[0].attach(kept_store)
        managers[1].attach(OneFile(str(file)))
        readers = [manager.restore(TOKENS, SPACE) for manager in managers]
        for layer in range(2):
            views = [m.view(r, layer) for m, r in zip(managers, readers, strict=True) if r is not None]
            assert torch.equal(*(view.records[view.block_ids] for view in views))
            assert torch.equal(*(view.sink for view in views))
            assert torch.equal(*(view.tail for view in views))
    with pytest.raises(InputError, match="exists"):
        run("export", store, names[1][:12], file)
    with pytest.raises(InputError, match="No such file"):
        run("export", store, names[1][:12], tmp_path / "no" / "one.h5")


def test_a_key_and_a_store_that_is_none(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    with DiskStore(tmp_path / "store", key=b"k" * 32) as store:
        name = kept(store, TOKENS[:600])
    told = json.loads(run("info", tmp_path / "store", name, "--key-file", key, "--json"))
    assert told["checksums"] == "keyed BLAKE2b"
    with pytest.raises(InputError, match="cannot be read"):
        run("info", tmp_path / "store", name)
    assert "0 segments are whole, 0 damaged, 1 not read" in run("verify", tmp_path / "store", code=1)
    assert "1 segments are whole" in run("verify", tmp_path / "store", "--key-file", key)
    with pytest.raises(InputError, match="there is none"):
        run("ls", tmp_path / "nothing")
    with pytest.raises(InputError, match="No such file"):
        run("ls", tmp_path / "store", "--key-file", tmp_path / "nokey")
