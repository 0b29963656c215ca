"""What rounding queries and weights to integers adds to a format's own loss, in a real model.

KL(exact || format) over text that follows a stored context, read a few tokens at a time (so that the decode kernel
serves), with the kernel's default arithmetic and with `precise`. The K and V are the same: those of one exact pass.
In float32: two bf16 runs of one model differ by a KL of about 0.001 in the order of their sums alone.
"""

from functools import partial
from typing import Any
from unittest import mock

import torch

from qkv.bench import checks
from qkv.bench.data import attention, geometry_of, text_ids
from qkv.bench.rows import Row, Shape
from qkv.errors import InputError
from qkv.spec import AttendOptions

SUITE = "decode"
SCORED, AT_ONCE = 64, 8


def run(model: Any, tokenizer: Any, name: str, tokens: int, formats: tuple[str, ...]) -> list[Row]:
    """Rows `kl` (nats, default and precise) and `kl_added`: KL(precise || default) as a share of KL(exact || precise).

    Raises InputError, FormatError, UnsupportedModel.
    """
    from qkv.backends import attention as backend
    from qkv.backends.transformers import NAME, QKVCache, cache_argument

    formats = checks.formats(formats)
    checks.at_least("tokens", tokens, 1)
    if model.dtype != torch.float32:
        raise InputError(f"model: got dtype {model.dtype}, wanted float32; bf16's own noise is larger than this effect")
    ids, argument = text_ids(tokenizer, tokens + SCORED), cache_argument(model)

    def scored(cache: Any) -> torch.Tensor:
        """Log-probabilities float64 [SCORED, vocabulary] behind the context that `cache` holds; it stays as it is."""
        twin, made = cache.fork(), []
        for piece in ids[:, tokens:].split(AT_ONCE, 1):  # type: ignore[no-untyped-call]  # torch's is untyped
            made.append(model(input_ids=piece, **{argument: twin}).logits[0])
        twin.reset()
        return torch.cat(made).double().log_softmax(-1)

    rows = []
    with attention(model, NAME), torch.inference_mode():
        exact = QKVCache(model.config, "exact")
        model(input_ids=ids[:, :tokens], logits_to_keep=1, **{argument: exact})
        reference = scored(exact)
        for format in formats:
            cache = _refilled(exact, QKVCache(model.config, format))
            default = scored(cache)
            # no user needs a precise cache, so the backend has no such option
            with mock.patch.object(backend, "AttendOptions", partial(AttendOptions, precise=True)):
                precise = scored(cache)
            rows += _rows(name, _shape(model, tokens), format, reference, default, precise)
    return rows


def _refilled(exact: Any, cache: Any) -> Any:
    """`cache`, with the K and V that `exact` holds."""
    for layer in cache.layers:
        k, v = exact.manager.gather(exact.rows.sequences[0], layer.index)
        layer.update(k.unsqueeze(0), v.unsqueeze(0))
        layer.commit(None)
    return cache


def _shape(model: Any, tokens: int) -> Shape:
    g = geometry_of(model)
    return Shape(1, g.kv_heads, g.group, g.head_dim, tokens, AT_ONCE)


def _kl(p: torch.Tensor, q: torch.Tensor) -> float:
    """Mean KL(p || q) in nats of log-probabilities [N, V]."""
    return float((p.exp() * (p - q)).sum(-1).mean())


def _rows(
    name: str, shape: Shape, format: str, reference: torch.Tensor, default: torch.Tensor, precise: torch.Tensor
) -> list[Row]:
    own, case = _kl(reference, precise), f"continuation {name}"
    values = [
        ("qkv", "kl", _kl(reference, default), "nats", "exact"),
        ("qkv precise", "kl", own, "nats", "exact"),
        ("qkv", "kl_added", _kl(precise, default) / own, "share", "qkv precise"),
    ]
    return [
        Row(SUITE, case, format, impl, metric, value, unit, shape, n=SCORED, baseline=baseline)
        for impl, metric, value, unit, baseline in values
    ]
