"""What `qkv doctor` reports: this installation, what a model's KV cache costs, how hard its keys are to quantise."""

import importlib.metadata
import platform
from dataclasses import dataclass
from typing import Any

import torch

from qkv import ops
from qkv.backends.transformers import QKVCache, cache_argument, enable
from qkv.formats import list_formats
from qkv.spec import BLOCK_TOKENS, RecordLayout

PROBE_TEXT = (
    "The survey of the northern harbour was finished in 1874. It lists 212 ships, 48 warehouses and one lighthouse, "
    "built of grey stone in 1809 by Elias Thorne for 5,200 crowns. "
)
PROBE_TOKENS = 256


@dataclass(frozen=True)
class FormatCost:
    """What one format costs for one model."""

    format: str
    bytes_per_token: float
    exact_window_bytes: int
    longest_context: int


@dataclass(frozen=True)
class ModelReport:
    """layers, KV heads and head_dim; key biases and outliers; costs by format.

    key_bias_norm     largest and median L2 norm of the k_proj biases over layers; None: no k_proj bias
    key_outlier       largest over layers of (largest channel magnitude / median channel magnitude) of real keys after
                      RoPE, and its layer: what per-token quantisation of K suffers from
    """

    layers: int
    quantised_layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    context: int | None
    key_bias_norm: tuple[float, float] | None
    key_outlier: tuple[float, int]
    costs: list[FormatCost]


def environment() -> dict[str, str]:
    """Versions and devices, name to value."""
    rows = {"python": platform.python_version(), "machine": platform.machine(), "threads": str(torch.get_num_threads())}
    for package in ("qkv", "torch", "transformers"):
        try:
            rows[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            rows[package] = "not installed"
    rows["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none that torch can use"
    rows["cpu vectors"] = torch.backends.cpu.get_cpu_capability()
    return rows


def kernels() -> list[ops.Choice]:
    """Which implementation serves each op here, and why."""
    return ops.explain()


def examine(model: Any, tokenizer: Any, budget: int) -> ModelReport:
    """Run a short text through the model and report. `budget`: bytes for K and V. Raises UnsupportedModel."""
    enable(model)
    cache = QKVCache(model.config, "exact")
    ids = tokenizer(PROBE_TEXT * 12, add_special_tokens=False, return_tensors="pt").input_ids[:, :PROBE_TOKENS]
    with torch.inference_mode():
        model(input_ids=ids.to(model.device), use_cache=True, logits_to_keep=1, **{cache_argument(model): cache})
    manager = cache.manager
    layout = manager.layout(0)
    assert layout is not None
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return ModelReport(
        layers=len(cache.layers),
        quantised_layers=manager.num_layers,
        kv_heads=layout.layer.kv_heads,
        head_dim=layout.layer.head_dim,
        dtype=str(layout.layer.dtype).removeprefix("torch."),
        context=context,
        key_bias_norm=_bias_norm(model),
        key_outlier=_outlier(cache),
        costs=[_cost(format_, layout, manager.num_layers, budget, context) for format_ in list_formats()],
    )


def _cost(format_: Any, like: RecordLayout, layers: int, budget: int, context: int | None) -> FormatCost:
    layout = RecordLayout(format_, like.layer)
    a_token = layout.record_bytes * layers / BLOCK_TOKENS
    window = (format_.sink_tokens + format_.tail_tokens + BLOCK_TOKENS - 1) * like.layer.token_bytes * layers
    # the window's tokens are not in records; the rest of the budget is whole blocks, less what a pool that grows
    # token by token holds ahead (qkv/pool.py: a 32nd, at least 2)
    blocks = max(0, budget - window) // (layout.record_bytes * layers)
    blocks = max(0, min(blocks * 32 // 33, blocks - 1))
    fits = blocks * BLOCK_TOKENS + format_.sink_tokens + format_.tail_tokens
    longest = fits if budget >= window else 0
    return FormatCost(format_.id, a_token, window, longest if context is None else min(longest, context))


def _bias_norm(model: Any) -> tuple[float, float] | None:
    norms = [
        float(module.bias.detach().float().norm())
        for name, module in model.named_modules()
        if name.endswith("k_proj") and getattr(module, "bias", None) is not None
    ]
    return (max(norms), float(torch.tensor(norms).median())) if norms else None


def _outlier(cache: QKVCache) -> tuple[float, int]:
    worst, at = 0.0, 0
    for layer in range(cache.manager.num_layers):
        k, _ = cache.manager.gather(cache.rows.sequences[0], layer)
        largest = k.float().abs().amax(dim=1)  # [H, D]
        ratio = float((largest.amax(-1) / largest.median(-1).values.clamp_min(1e-12)).max())
        if ratio > worst:
            worst, at = ratio, layer
    return worst, at
