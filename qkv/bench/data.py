"""K and V to measure with: made up with the structure of real ones, or captured from a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from qkv.errors import InputError, UnsupportedModel

OUTLIER_SHARE = 0.04  # of K's channels
CAPTURE = "qkv-bench-capture"


@dataclass(frozen=True)
class Geometry:
    """Of one attention layer: KV heads, query heads a KV head, channels, the model's dtype."""

    kv_heads: int
    group: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Captured:
    """One layer's K, V [H, T, D] after RoPE and its queries [H*G, T, D], of a real text."""

    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor


def keys_values(geometry: Geometry, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """k, v [H, T, D]. K's channels have offsets twice their spread, one in 25 is eight times as wide; V has neither."""
    generator = torch.Generator().manual_seed(seed)
    shape = (geometry.kv_heads, tokens, geometry.head_dim)
    k, v = torch.randn(2, *shape, generator=generator)
    channel = (geometry.kv_heads, 1, geometry.head_dim)
    wide = torch.rand(channel, generator=generator) < OUTLIER_SHARE
    spread = torch.exp(0.5 * torch.randn(channel, generator=generator)) * torch.where(wide, 8.0, 1.0)
    k = (k + 2 * torch.randn(channel, generator=generator)) * spread
    return k.to(geometry.dtype), v.to(geometry.dtype)


def queries(geometry: Geometry, k: torch.Tensor, length: int, seed: int = 1) -> torch.Tensor:
    """q [H*G, Q, D], of a size that makes scores of K [H, T, D], times D**-0.5, spread by about 2 over the tokens."""
    generator = torch.Generator().manual_seed(seed)
    heads, group = geometry.kv_heads, geometry.group
    q = torch.randn(heads, group * length, geometry.head_dim, generator=generator)
    centred = k.float() - k.float().mean(1, keepdim=True)
    scores = torch.matmul(q, centred.mT) * geometry.head_dim**-0.5
    q *= 2 / scores.std(-1, correction=0, keepdim=True).clamp_min(1e-6)
    return q.view(heads * group, length, geometry.head_dim).to(geometry.dtype)


def geometry_of(model: Any) -> Geometry:
    """Of a loaded transformers model's attention layers. Raises UnsupportedModel."""
    text = model.config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    if not isinstance(kv_heads, int) or heads % kv_heads:
        raise UnsupportedModel(f"{text.model_type}: layers differ in their KV heads; give the shape by flags")
    return Geometry(kv_heads, heads // kv_heads, head_dim, model.dtype)


def text_ids(tokenizer: Any, tokens: int) -> torch.Tensor:
    """int64 [1, tokens] of almanac prose, repeated if it is too short. Raises InputError if there is none."""
    from qkv import documents

    ids: torch.Tensor = tokenizer(
        documents.almanac_prose(), add_special_tokens=False, return_tensors="pt", verbose=False
    ).input_ids
    if not ids.numel():
        raise InputError("tokenizer: got no token for the almanac, wanted some; use another model")
    return ids.repeat(1, -(-tokens // ids.shape[1]))[:, :tokens]


def capture(model: Any, ids: torch.Tensor) -> list[Captured]:
    """K, V and q of every layer whose attention one forward pass of ids [1, T] calls. Leaves the model as it was."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found: list[Captured] = []

    def watch(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        found.append(Captured(k[0].clone(), v[0].clone(), q[0].clone()))
        return sdpa_attention_forward(module, q, k, v, mask, **options)

    AttentionInterface.register(CAPTURE, watch)
    with attention(model, CAPTURE), torch.inference_mode():
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    return found


@contextmanager
def attention(model: Any, name: str) -> Iterator[None]:
    """The model with that attention, and afterwards with its own again."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
