"""All ways to compute a baseline give the same numbers, and the measured errors are those of float64."""

import pytest
import torch

from qkv import KVManager
from qkv.bench import baselines, oracle
from qkv.bench.baselines import Problem
from qkv.bench.data import Geometry, keys_values, queries

# relative L2 of a result rounded to the dtype, with room for rounded softmax weights; matmul also rounds its scores
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 5e-3}


def problem(group: int, length: int, dtype: torch.dtype, tokens: int = 150) -> Problem:
    geometry = Geometry(2, group, 32, dtype)
    k, v = keys_values(geometry, tokens)
    return Problem(queries(geometry, k, length), k, v, 32**-0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "length"), [(1, 1), (3, 1), (3, 5), (1, 40), (3, 40)])
def test_all_layouts_agree_with_float64(group: int, length: int, dtype: torch.dtype) -> None:
    p = problem(group, length, dtype)
    wanted = oracle.attend(p.q, p.k, p.v, p.scale)
    tried = baselines.candidates(p)
    assert {way for way, _ in tried} == {dtype, torch.float32}
    for way, layout in tried:
        got = baselines.prepare(p, way, layout)()
        assert got.shape == p.q.shape
        assert got.dtype == way
        bound = 0.05 if layout == "matmul" and way != torch.float32 else BOUNDS[way]
        assert oracle.relative_l2(got, wanted) < bound, (way, layout)


def test_the_oracle_is_attention() -> None:
    p = problem(2, 3, torch.float32)
    mask = torch.ones(3, 150, dtype=torch.bool).tril(147)
    k, v = (x.double().repeat_interleave(2, dim=0) for x in (p.k, p.v))
    wanted = torch.nn.functional.scaled_dot_product_attention(p.q.double(), k, v, attn_mask=mask, scale=p.scale)
    assert oracle.relative_l2(oracle.attend(p.q, p.k, p.v, p.scale), wanted) < 1e-12


def test_an_inexact_way_is_no_baseline() -> None:
    p = problem(3, 1, torch.bfloat16)
    wanted = oracle.attend(p.q, p.k, p.v, p.scale)
    kept = baselines.fastest(p, wanted, None, rounds=3, keep=99)
    assert ("matmul" in {layout for way, layout in kept if way == torch.bfloat16}) == (
        oracle.relative_l2(baselines.prepare(p, torch.bfloat16, "matmul")(), wanted) <= baselines.MOST_ERROR
    )
    assert len(baselines.fastest(p, wanted, None, rounds=3)) == 2
    assert baselines.fastest(p, wanted + 1, None, rounds=3) == []


@pytest.mark.parametrize("format", ["exact", "kivi2", "int8"])
@pytest.mark.parametrize("crop", [0, 100])
def test_dense_values_of_a_view_are_what_it_holds(format: str, crop: int) -> None:
    k, v = keys_values(Geometry(2, 1, 32, torch.float32), 700)
    manager = KVManager(1, format)
    sequence = manager.open()
    manager.append(sequence, 0, k, v)
    manager.crop(sequence, 700 - 300 * (crop > 0) - crop)  # ends inside a block
    wanted = manager.gather(sequence, 0)
    for got, held in zip(oracle.dense(manager.view(sequence, 0)), wanted, strict=True):
        assert got.dtype == torch.float64
        assert torch.equal(got.float(), held)


def test_made_up_keys_have_outliers_and_offsets() -> None:
    k, v = keys_values(Geometry(4, 2, 128, torch.float32), 512)
    spread, offset = k.std(1), k.mean(1).abs()
    assert float(spread.max() / spread.median()) > 6
    assert float((offset / spread).median()) > 1
    assert float(v.std(1).max() / v.std(1).median()) < 1.5
    again, _ = keys_values(Geometry(4, 2, 128, torch.float32), 512)
    assert torch.equal(k, again)
    q = queries(Geometry(4, 2, 128, torch.float32), k, 3)
    scores = torch.matmul(q.view(4, 6, 128), (k - k.mean(1, keepdim=True)).mT) * 128**-0.5
    assert torch.allclose(scores.std(-1, correction=0), torch.tensor(2.0))
