"""Compiled code on disk is used again, and never after a source that it contains has changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="numba is not installed")
ROOT = Path(__file__).parents[2]

# how often the kernel's loop was compiled and how often it was found on disk, and what it gives
CODE = """
import torch
from qkv import AttendOptions, KVManager
from qkv.kernels import calls_numba
torch.manual_seed(0)
manager = KVManager(1, "kivi4")
sequence = manager.open()
manager.append(sequence, 0, *torch.randn(2, 1, 400, 16))
out, _ = manager.attend(sequence, 0, torch.ones(1, 1, 16), AttendOptions(0.25))
stats = calls_numba.merge.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()), float(out.sum()))
"""


def test_a_changed_source_is_compiled_again(tmp_path: Any) -> None:
    """The change is in a file that the compiled function only calls: numba by itself would not notice."""
    for top in ("qkv", "kernels", "offload"):
        shutil.copytree(ROOT / top, tmp_path / top, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))

    def run() -> list[float]:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, "-c", CODE]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        return [float(word) for word in done.stdout.split()]

    first, again = run(), run()
    assert first[:2] == [0, 1]
    assert again[:2] == [1, 0]
    source = tmp_path / "kernels/softmax_llvm.py"
    text = source.read_text()
    assert text.count("b.fmul(b.load(sixteen(b, row, i), align=4), wide)") == 1  # scale_row
    source.write_text(text.replace("b.load(sixteen(b, row, i), align=4), wide)", "wide, wide)"))
    changed = run()
    assert changed[:2] == [0, 1]
    assert changed[2] != first[2]
