"""The documents name things that exist, and the README's numbers are those of the tracked results."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STEPS = re.findall(r"`((?:qkv|kernels|offload)/[\w/]+\.py)` `(\w+)`", (ROOT / "docs/life-of-a-block.md").read_text())


def test_life_of_a_block_has_a_place_for_every_step() -> None:
    assert len(STEPS) >= 8


@pytest.mark.parametrize(("file", "function"), STEPS)
def test_life_of_a_block_names_real_functions(file: str, function: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_readme_tables_come_from_the_results() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/tables.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
