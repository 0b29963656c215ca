"""Fixtures that more than one file of tests uses."""

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, not made yet, in place of the user's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("QKV_MODEL_CACHE", str(folder))
    return folder
