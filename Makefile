# `make test` and `make demo` do all set-up on a fresh machine. `.ci/run` is the one definition of green.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := test
# Waiting OpenMP threads sleep instead of spinning: a test run leaves the machine usable, and shared runners stay fast.
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 0

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.qkv-stamp
PINNED_TORCH := torch==2.13.0
PYTEST := $(BIN)/python -m pytest
TESTED_TRANSFORMERS := 4.57.6 5.19.0

.PHONY: setup test test-4576 test-matrix test-heavy test-crash demo bench lint types wheel clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q '$(PINNED_TORCH)'
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

test: setup
	$(PYTEST) -q tests
	$(MAKE) --no-print-directory test-4576

# ---- other releases of transformers, each beside the venv in .matrix/, found first through PYTHONPATH ----

.matrix/%/.qkv-stamp:
	rm -rf .matrix/$*
	$(BIN)/python -m pip install -q --target .matrix/$* 'transformers==$*'
	touch $@

# $(call with-transformers,VERSION,PYTEST ARGUMENTS): proves which release is in use, then runs the backends' tests on it
define with-transformers
export PYTHONPATH='$(CURDIR)/.matrix/$(1)'; \
$(BIN)/python -c 'import transformers as t; assert t.__version__ == "$(1)", t; print("transformers", t.__version__)'; \
$(PYTEST) -q tests/backends $(2)
endef

test-4576: setup .matrix/4.57.6/.qkv-stamp
	$(call with-transformers,4.57.6,-m 'not heavy')

test-matrix: setup $(TESTED_TRANSFORMERS:%=.matrix/%/.qkv-stamp)
	$(BIN)/python -c 'import transformers as t; print("transformers", t.__version__, "(pinned)")'
	$(PYTEST) -q tests/backends -m ''
	$(call with-transformers,4.57.6,-m '')
	$(call with-transformers,5.19.0,-m '')

$(TESTED_TRANSFORMERS:%=.matrix/%/.qkv-stamp): | setup

test-heavy: setup
	$(PYTEST) -q tests -m heavy

# the store: 400 kills, 120 puts with the power failing after each operation, 3,000 damaged files, ten minutes of
# one writer, its evictor and four readers; about 15 minutes
test-crash: setup
	$(PYTEST) -q -rP tests/offload/test_torture.py -m heavy

demo: setup
	$(BIN)/qkv demo

# ---- benchmarks; the peers stay beside the venv, because transformers imports hqq, which warns, wherever it is found ----

BENCH_PEERS := optimum-quanto hqq einops ninja termcolor

.bench/.qkv-stamp: constraints.txt | setup
	rm -rf .bench
	$(BIN)/python -m pip install -q --no-deps -c constraints.txt --target .bench $(BENCH_PEERS)
	touch $@

bench: setup .bench/.qkv-stamp
	PYTHONPATH='$(CURDIR)/.bench' $(BIN)/python benchmarks/suite.py
	$(BIN)/python benchmarks/tables.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# ---- the wheel, installed where the checkout cannot help it ----

define CHECK_WHEEL
import importlib, importlib.metadata, os, pathlib, sys
root, here = pathlib.Path(sys.argv[1]), pathlib.Path(sys.prefix).resolve()
shipped = sorted(str(f) for f in importlib.metadata.files("qkv") if str(f).startswith("qkv/") and f.suffix == ".py")
wanted = sorted(
    (os.path.relpath(f, root) if top == "qkv" else "qkv/" + os.path.relpath(f, root))
    for top in ("qkv", "kernels", "offload")
    for folder, _, names in os.walk(root / top)
    for f in (os.path.join(folder, n) for n in names if n.endswith(".py"))
)
assert shipped == wanted, f"wheel and checkout differ in {sorted(set(shipped) ^ set(wanted))}"
for file in shipped:
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if name.endswith("__main__"):
        continue
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as e:
        assert e.name and e.name.split(".")[0] in {"triton", "numba", "cupy", "h5py", "xxhash", "bitsandbytes"}, (name, e)
        print(f"skipped {name}: needs {e.name}")
        continue
    where = pathlib.Path(module.__file__).resolve()
    assert here in where.parents, f"{name} came from {where}, not from the wheel in {here}"
import qkv
print(f"wheel ok: {len(shipped)} files, qkv from {qkv.__file__}")
endef
export CHECK_WHEEL

# The fresh venv borrows torch and the extras from .venv through a path line. A path line adds the folder after the
# venv's own and does not read the .pth files inside it, so .venv's editable qkv stays out of sight; CHECK_WHEEL proves it.
wheel: setup
	rm -rf build dist
	$(BIN)/python -m build -q --wheel
	tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	$(BIN)/python -m venv "$$tmp/venv"; \
	site=$$("$$tmp/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	borrowed=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	"$$tmp/venv/bin/python" -m pip install -q --no-deps --no-index dist/*.whl; \
	echo "$$borrowed" > "$$site/zz_borrowed.pth"; \
	mkdir "$$tmp/cwd"; root='$(CURDIR)'; cd "$$tmp/cwd"; \
	"$$tmp/venv/bin/python" -I -c "$$CHECK_WHEEL" "$$root"; \
	"$$tmp/venv/bin/qkv" --help > /dev/null; \
	"$$tmp/venv/bin/qkv" formats > /dev/null; \
	rm -rf "$$root/build"

clean:
	rm -rf build dist *.egg-info .matrix .bench .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
