"""Imports run one way inside qkv, `import qkv` is cheap, and the public names are the ones we mean."""

import __future__

import ast
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A module may import units of a strictly lower rank, and siblings inside its own package. `qkv` is the public face,
# qkv/__init__.py. A unit that is missing here fails the test: give a new module or package its rank.
RANKS = {
    "cli": 90,
    "bench": 80,
    "eval": 80,
    "qa": 80,
    "doctor": 80,
    "qkv": 70,
    "models": 60,
    "documents": 60,
    "packages": 50,
    "backends": 50,
    "stats": 80,
    "store_commands": 85,
    "metrics": 48,
    "account": 45,
    "manager": 40,
    "usage": 38,
    "step": 38,
    "storing": 38,
    "sharing": 37,
    "layers": 36,
    "ledger": 35,
    "budget": 34,
    "pool": 30,
    "sequence": 30,
    "index": 29,
    "eviction": 25,
    "prefix": 15,
    "reports": 12,
    "ops": 30,
    "offload": 30,
    "formats": 20,
    "kernels": 20,
    "spec": 12,
    "shapes": 11,
    "errors": 10,
}
# Units held to less than their rank allows.
ONLY = {
    "models": {"packages", "errors"},
    "documents": {"packages", "errors"},
    "packages": {"errors"},
    "kernels": {"spec", "shapes", "errors"},
}
# Foreign packages a unit must do without.
FOREIGN = {
    "pool": {"torch"},
    "index": {"torch"},
    "eviction": {"torch"},
    "prefix": {"torch"},
    "reports": {"torch"},
    "errors": {"torch"},
    "packages": {"torch"},
}
OPTIONAL = (
    "transformers",
    "numba",
    "triton",
    "cupy",
    "h5py",
    "bitsandbytes",
    "typer",
    "rich",
    "prometheus_client",
    "psutil",
)
MAX_PUBLIC_NAMES = 12


def modules() -> dict[str, Path]:
    """Dotted name of every module in the checkout -> its file; the links are not followed."""
    found = {}
    for top in ("qkv", "kernels", "offload"):
        for folder, _, names in os.walk(ROOT / top):
            for file in (Path(folder, name) for name in names if name.endswith(".py")):
                parts = file.relative_to(ROOT).with_suffix("").parts
                parts = parts if top == "qkv" else ("qkv", *parts)
                found[".".join(parts)] = file
    return found


def imported(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted target) of every import in `module`, at any depth; `from a import b` gives `a.b`.

    `module` ends in `.__init__` for a package's own file, so that relative imports resolve.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            base = [*base, *([node.module] if node.module else [])]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def unit_of(target: str) -> str:
    """The unit a dotted name inside qkv belongs to: qkv.formats.affine -> formats, qkv.KVManager -> qkv."""
    second = target.split(".")[1] if "." in target else "__init__"
    if second in RANKS:
        return second
    is_module = (ROOT / "qkv" / f"{second}.py").exists() or (ROOT / "qkv" / second).is_dir()
    return second if is_module and second != "__init__" else "qkv"


def violations(module: str, source: str) -> list[str]:
    """Every import of `module` that the rule forbids, each as one readable line."""
    unit = unit_of(module)
    if unit not in RANKS:
        return [f"{module} has no rank: add {unit!r} to RANKS in {Path(__file__).name}"]
    found = []
    for line, target in imported(module, ast.parse(source)):
        top = target.split(".")[0]
        where = f"{module}:{line} imports {target}"
        if top in ("kernels", "offload"):
            found.append(f"{where}: write qkv.{top}")
        elif top in FOREIGN.get(unit, ()):
            found.append(f"{where}: {unit} does without {top}")
        if top != "qkv":
            continue
        other = unit_of(target)
        if other == unit:
            continue
        if other not in RANKS:
            found.append(f"{where}, which has no rank")
        elif RANKS[other] >= RANKS[unit]:
            found.append(f"{where}: {other} ({RANKS[other]}) is not below {unit} ({RANKS[unit]})")
        elif unit in ONLY and other not in ONLY[unit]:
            found.append(f"{where}: {unit} may import only {', '.join(sorted(ONLY[unit]))}")
    return found


def test_imports_run_one_way():
    found = [v for name, file in sorted(modules().items()) for v in violations(name, file.read_text())]
    assert found == [], "\n".join(found)


def test_all_modules_are_seen():
    assert {"qkv.__init__", "qkv.errors"} <= set(modules())
    assert not any(name.startswith("qkv.qkv") for name in modules())


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("qkv.spec", "from qkv.formats import affine"),
        ("qkv.spec", "def f():\n    import qkv.formats.affine"),
        ("qkv.spec", "from .formats.base import Format"),
        ("qkv.pool", "from qkv import ops"),
        ("qkv.pool", "import torch"),
        ("qkv.manager", "from qkv import KVManager"),
        ("qkv.manager", "import qkv"),
        ("qkv.formats.affine", "from ..kernels import attend_torch"),
        ("qkv.formats.__init__", "from ..pool import BlockPool"),
        ("qkv.kernels.attend_torch", "from qkv.formats import affine"),
        ("qkv.offload.device", "from qkv.ops import attend"),
        ("qkv.models", "from qkv import spec"),
        ("qkv.backends.transformers", "from qkv.cli import main"),
        ("qkv.ops", "import importlib\nimportlib.import_module('qkv.manager')"),
        ("qkv.ops", "from kernels.attend_torch import attend"),
        ("qkv.new_module", "import os"),
    ],
)
def test_the_rule_can_fail(module, source, monkeypatch):
    if module == "qkv.new_module":
        monkeypatch.setattr(Path, "exists", lambda self: self.name == "new_module.py")
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("qkv.spec", "from qkv.shapes import check\nfrom qkv import errors"),
        ("qkv.formats.__init__", "from .affine import Affine\nfrom . import base\nfrom ..spec import BlockSpec"),
        ("qkv.formats.affine", "from . import base\nfrom ..errors import FormatError\nimport torch"),
        ("qkv.kernels.attend_sdpa", "from qkv.kernels import attend_torch\nfrom qkv.spec import RecordLayout"),
        ("qkv.__init__", "from qkv.manager import KVManager as KVManager\nfrom .errors import QkvError as QkvError"),
        ("qkv.cli", "from qkv import KVManager, __version__, qa\nimport typer"),
    ],
)
def test_the_rule_allows_what_it_should(module, source):
    assert violations(module, source) == []


def unwanted_after(statement: str, *extra_path: Path) -> list[str]:
    """What `statement` loads or starts in a fresh interpreter that it should not; torch's own loads are not counted."""
    script = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        f"{statement}\n"
        f"print([n for n in {OPTIONAL!r} if n in set(sys.modules) - before])\n"
        "print(['CUDA'] if torch.cuda.is_initialized() else [])\n"
    )
    path = [str(p) for p in (*extra_path, ROOT)] + [p for p in [os.environ.get("PYTHONPATH")] if p]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [name for line in done.stdout.splitlines()[-2:] for name in ast.literal_eval(line)]


def test_import_loads_no_optional_package_and_starts_no_cuda():
    assert unwanted_after("import qkv") == []


@pytest.mark.parametrize("name", ["h5py", "typer"])
def test_the_import_budget_can_fail(name, tmp_path):
    (tmp_path / f"{name}.py").write_text("")
    assert unwanted_after(f"import {name}", tmp_path) == [name]


def test_the_cuda_check_can_fail():
    assert unwanted_after("torch.cuda.is_initialized = lambda: True") == ["CUDA"]


def test_public_names_are_exactly_the_visible_ones():
    import qkv

    visible = {
        name
        for name, value in vars(qkv).items()
        if not name.startswith("_") and not inspect.ismodule(value) and not isinstance(value, __future__._Feature)
    }
    lazy = {name for name in qkv.__all__ if name not in vars(qkv) and hasattr(qkv, name)}
    public = [name for name in qkv.__all__ if not name.startswith("_")]
    assert sorted(public) == sorted(visible | lazy)
    assert len(qkv.__all__) == len(set(qkv.__all__))
    assert len(public) <= MAX_PUBLIC_NAMES


def test_public_names_say_where_they_live():
    import qkv

    homes = {name: getattr(getattr(qkv, name), "__module__", "qkv") for name in qkv.__all__}
    assert {name: home for name, home in homes.items() if home.split(".")[0] != "qkv"} == {}
