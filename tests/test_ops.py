"""The door to kernels: what `explain()` says is what happens, with numba and without."""

import os
import subprocess
import sys

import pytest
import torch

from qkv import ops
from qkv.errors import FormatError, ShapeError
from qkv.formats import get_format, record
from qkv.spec import LayerSpec, RecordLayout

WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
import torch
from qkv import KVManager, ops
from qkv.spec import AttendOptions
rows = {choice.op: choice for choice in ops.explain()}
for op in ("seal", "unseal", "attend, over records", "attend, over records, long prompts"):
    assert rows[op].implementation == "torch", rows[op]
    assert "numba cannot be imported" in rows[op].reason, rows[op]
manager = KVManager(1, "kivi2")
sequence = manager.open()
k, v = torch.randn(2, 2, 700, 64)
manager.append(sequence, 0, k, v)
assert manager.gather(sequence, 0)[0].shape == k.shape
for queries in (1, 100):
    out, _ = manager.attend(sequence, 0, torch.randn(4, queries, 64), AttendOptions(0.125))
    assert out.isfinite().all()
print("without ok")
"""


def test_without_numba_everything_works_and_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMBA], capture_output=True, text=True, env=os.environ, check=False, timeout=120
    )
    assert done.stdout.strip() == "without ok", done.stderr


def test_with_numba_every_op_is_compiled() -> None:
    pytest.importorskip("numba", reason="numba is not installed")
    assert [choice.op for choice in ops.explain() if choice.implementation == "torch"] == []


@pytest.mark.parametrize("dim", [64, 72])
@pytest.mark.parametrize("axes", [("head", "token", "channel"), ("block", "head", "token", "channel")])
def test_check_finite_says_where(dim: int, axes: tuple[str, ...]) -> None:
    x = torch.randn(*(3, 2, 5)[: len(axes) - 1], dim).half()
    ops.check_finite("k", x, axes)
    ops.check_finite("k", x[..., :0, :], axes)
    x[(1,) * (len(axes) - 1)][7] = float("inf")
    place = ", ".join(f"{axis} 1" for axis in axes[:-1])
    with pytest.raises(FormatError, match=f"^k: got inf at {place}, channel 7, wanted at most 6.55e"):
        ops.check_finite("k", x, axes)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_records_of_another_dtype_are_refused(dtype: torch.dtype) -> None:
    layout = RecordLayout(get_format("kivi2"), LayerSpec(1, 64, torch.float32))
    records = torch.zeros(2, layout.record_bytes).to(dtype)
    for unseal in (record.unseal, ops.unseal):
        with pytest.raises(ShapeError, match=r"^records: got dtype"):
            unseal(records, layout)
