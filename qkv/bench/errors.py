"""How far qkv's attention is from float64 attention over the same dequantised values.

In float32, so that rounding the output to the model's dtype hides nothing; time rows have the error in their own dtype.
"""

import torch

from qkv.bench import checks
from qkv.bench.baselines import Problem
from qkv.bench.contest import Stored
from qkv.bench.data import Captured, Geometry, keys_values, queries
from qkv.bench.rows import Row, Shape
from qkv.bench.timing import Stats

TOKENS = 4096
Errors = tuple[float, float]  # of the default path, of the precise one


def of(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, format: str) -> Errors:
    """Relative L2 for q [H*G, Q, D], the last Q positions of k, v [H, T, D]."""
    problem = Problem(q.float(), k.float(), v.float(), k.shape[2] ** -0.5)
    stored = Stored(problem, format)
    return stored.error(problem), stored.error(problem, precise=True)


def random(suite: str, case: str, geometry: Geometry, formats: tuple[str, ...], context: int, q_len: int) -> list[Row]:
    """Over made-up K and V of at most TOKENS tokens."""
    tokens = min(TOKENS, context)
    k, v = keys_values(geometry, tokens)
    q = queries(geometry, k, q_len)
    shape = Shape(1, geometry.kv_heads, geometry.group, geometry.head_dim, tokens, q_len)
    return [row for name in formats for row in _rows(suite, case, name, shape, [of(k, v, q, name)])]


def captured(suite: str, case: str, layers: list[Captured], formats: tuple[str, ...], q_len: int = 1) -> list[Row]:
    """Of the last q_len queries of a real text, in every layer; the value is the worst layer's."""
    rows = []
    for name in checks.formats(formats):
        found = [of(layer.k, layer.v, layer.q[:, -q_len:], name) for layer in layers]
        heads, tokens, dim = layers[0].k.shape
        shape = Shape(1, heads, layers[0].q.shape[0] // heads, dim, tokens, q_len)
        rows += _rows(suite, f"captured {case}", name, shape, found)
    return rows


def _rows(suite: str, case: str, format: str, shape: Shape, found: list[Errors]) -> list[Row]:
    rows, note = [], "float32" if len(found) == 1 else f"float32; the worst of {len(found)} layers"
    for index, impl in enumerate(("qkv", "qkv precise")):
        values = [pair[index] for pair in found]
        stats = Stats.of(values)
        rows.append(
            Row(
                suite, case, format, impl, "error", max(values), "relative L2", shape, stats.p20, stats.p80, stats.n,
                "float64", error=max(values), note=note,
            )
        )  # fmt: skip
    return rows
