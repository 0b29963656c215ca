"""The tree is what pyproject.toml, the two links and the house rules say it is."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
CODE = ("qkv", "kernels", "offload")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def python_files(*tops: str) -> list[Path]:
    """Every .py file under these folders of the checkout, links not followed."""
    return sorted(
        Path(folder, name)
        for top in tops
        for folder, _, names in os.walk(ROOT / top)
        for name in names
        if name.endswith(".py")
    )


def project_files() -> list[Path]:
    """What git tracks or would track; where there is no git, the folders that hold sources."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        folders = (*CODE, "tests", "docs", "benchmarks", ".ci")
        listed = [str(p.relative_to(ROOT)) for top in folders for p in (ROOT / top).rglob("*")]
        listed += [p.name for p in ROOT.iterdir()]
    return [ROOT / name for name in listed if name and (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


def long_functions(source: str, limit: int = MAX_FUNCTION_LINES) -> list[str]:
    """`name (lines)` of every function of more than `limit` lines after its `def` line."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = [(f.name, (f.end_lineno or f.lineno) - f.lineno) for f in functions]
    return [f"{name} ({lines} lines)" for name, lines in sizes if lines > limit]


def test_setuptools_lists_every_folder_with_python_files():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {file.parent.relative_to(ROOT).as_posix() for file in python_files(*CODE)}
    wanted = {f if f.split("/")[0] == "qkv" else f"qkv/{f}" for f in folders} | {"qkv/kernels", "qkv/offload"}
    listed = setuptools["packages"]
    assert len(listed) == len(set(listed)), f"named twice in tool.setuptools.packages: {listed}"
    assert {name.replace(".", "/") for name in listed} == wanted
    assert setuptools["package-dir"] == {"qkv": "qkv", "qkv.kernels": "kernels", "qkv.offload": "offload"}


@pytest.mark.parametrize("name", ["kernels", "offload"])
def test_link_leads_to_the_root_folder(name):
    link = ROOT / "qkv" / name
    assert link.is_symlink(), f"{link} must be a link to ../{name}"
    assert os.readlink(link) == f"../{name}"
    assert (ROOT / name).is_dir()
    assert not (ROOT / name).is_symlink()


@pytest.mark.parametrize("name", CODE)
def test_types_are_shipped(name):
    assert (ROOT / name / "py.typed").read_bytes() == b""


def test_no_init_where_it_would_claim_a_foreign_name():
    """A bare importable `kernels` hides Hugging Face's package of that name, and then no model loads."""
    suspects = [ROOT / "kernels" / "__init__.py", ROOT / "offload" / "__init__.py"]
    suspects += [file for file in python_files("tests") if file.name == "__init__.py"]
    assert [str(p.relative_to(ROOT)) for p in suspects if p.exists()] == []


def test_files_are_short():
    sizes = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in python_files(*CODE)}
    too_long = {name: lines for name, lines in sizes.items() if lines > MAX_FILE_LINES}
    assert too_long == {}, f"over {MAX_FILE_LINES} lines"


def test_functions_are_short():
    too_long = {str(p.relative_to(ROOT)): long_functions(p.read_text()) for p in python_files(*CODE)}
    assert {name: found for name, found in too_long.items() if found} == {}, f"over {MAX_FUNCTION_LINES} lines"


def test_the_function_counter_counts():
    source = "class A:\n    def f(self):\n" + "        x = 1\n" * 3
    assert long_functions(source, limit=2) == ["f (3 lines)"]
    assert long_functions(source, limit=3) == []


MACHINE_PATH = re.compile(rb"(?<![\w.\-])/(?:work|root)/")


def test_no_tracked_file_names_a_machine_path():
    files = project_files()
    assert ROOT / "pyproject.toml" in files, "the listing of the project's files is broken"
    named = [str(p.relative_to(ROOT)) for p in files if MACHINE_PATH.search(p.read_bytes())]
    assert named == []


def test_the_machine_path_pattern_can_match():
    slash = b"/"
    assert MACHINE_PATH.search(b"cd " + slash + b"work/main")
    assert MACHINE_PATH.search(b'"' + slash + b'root/.cache"')
    assert not MACHINE_PATH.search(b"https://example.org" + slash + b"work/main")
