"""`exact` in qkv's cache and attention against DynamicCache under eager, for every family."""

import itertools
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from qkv.backends.transformers import QKVCache, enable

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "smollm3", "gpt_oss"]
SLIDING = ["mistral", "gemma2", "gemma3_text", "gpt_oss"]
MODES = [(family, "auto") for family in FAMILIES] + [(family, "quantised") for family in SLIDING]


def logits(model: Any, call: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A prompt, a chunk, then single tokens."""
    cuts = [0, 250, 290, *range(291, ids.shape[1] + 1)]
    rows = []
    for start, end in itertools.pairwise(cuts):
        rows.append(call(model, ids[:, start:end], cache, mask[:, :end]).logits[:, -1])
    return torch.stack(rows)


@pytest.mark.parametrize(("family", "sliding"), MODES)
def test_exact_equals_dynamic_cache(family: str, sliding: str, tiny: Any, call: Any, generate: Any) -> None:
    model = tiny(family)
    torch.manual_seed(1)
    ids = torch.randint(3, 256, (2, 300))
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    want = logits(model, call, DynamicCache(config=model.config), ids, mask)
    tokens = generate(model, ids, DynamicCache(config=model.config), mask)
    enable(model)
    cache = QKVCache(model.config, "exact", sliding=sliding)
    assert (logits(model, call, cache, ids, mask) - want).abs().max() <= 1e-4
    cache.manager.check()
    assert torch.equal(generate(model, ids, QKVCache(model.config, "exact", sliding=sliding), mask), tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_report_says_who_holds_each_layer(family: str, tiny: Any) -> None:
    model = tiny(family)
    rows = QKVCache(model.config, "kivi4").report()
    assert [row.layer for row in rows] == [0, 1, 2]
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * 3
    for row, kind in zip(rows, types, strict=True):
        if kind == "full_attention" or family == "mistral":
            assert (row.held_by, row.format) == ("qkv", "kivi4")
        else:
            assert row.held_by.startswith("transformers")
            assert (row.format, row.reason) == ("exact", "sliding window")


def test_quantised_differs_and_is_smaller(tiny: Any, call: Any) -> None:
    """The equality above would also hold for a cache that never quantises."""
    model = tiny("llama")
    enable(model)
    ids = torch.randint(3, 256, (1, 1500))  # long enough for blocks to outweigh the exact window
    out, sizes = {}, {}
    for name in ("exact", "int8", "kivi2"):
        cache = QKVCache(model.config, name)
        call(model, ids[:, :1490], cache)
        out[name] = call(model, ids[:, 1490:], cache).logits
        sizes[name] = cache.memory().total
    assert 0 < (out["int8"] - out["exact"]).abs().max() < (out["kivi2"] - out["exact"]).abs().max()
    assert sizes["kivi2"] < sizes["int8"] < sizes["exact"]
