"""The attention function and the mask function that transformers calls under the name "qkv".

Handles go to the manager, row by row, without padding. Plain tensors (sliding layers, other caches, encoders) go the
same way with nothing stored. A 4-D mask (images, packed sequences, a user's own) is applied to dense tensors.
"""

from typing import Any

import torch
from transformers.masking_utils import sdpa_mask

from qkv import ops
from qkv.backends.handle import KVHandle
from qkv.backends.layer import QKVLayer
from qkv.errors import ShapeError, UnsupportedModel
from qkv.formats import get_format
from qkv.spec import AttendOptions, KVView, LayerSpec, RecordLayout

QUERY_TILE = 512


def mask_for_qkv(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """What `attention_mask` is in `qkv_attention`, told from the mask that transformers would build.

    Plain causal: the user's 2-D padding mask, None where nothing is padded. A sliding window: a 2-D mask with the
    window as its attribute. Anything else (chunks, packed sequences, images, a static cache's unused places): the
    4-D mask.
    """
    window = _plain_window(kwargs)
    if window is None:
        kwargs["allow_is_causal_skip"] = False
        mask: torch.Tensor = sdpa_mask(*args, attention_mask=attention_mask, **kwargs)
        return mask
    if window:
        keys = kwargs.get("kv_offset", 0) + kwargs["kv_length"]
        none = torch.ones(kwargs["batch_size"], keys, dtype=torch.bool)
        windowed: torch.Tensor = none if attention_mask is None else attention_mask.bool().clone()
        windowed.window = window  # type: ignore[attr-defined]  # read in qkv_attention
        return windowed
    return None if attention_mask is None or bool(attention_mask.all()) else attention_mask


def _plain_window(kwargs: dict[str, Any]) -> int | None:
    """0: plain causal; n: causal in a window of n; None: something else. Asks the mask function about eight queries."""
    if kwargs.get("use_vmap") or not kwargs.get("allow_is_causal_skip", True) or "mask_function" not in kwargs:
        return None
    if "cache_position" in kwargs:
        first, count = int(kwargs["cache_position"][0]), len(kwargs["cache_position"])
    else:
        first, count = int(kwargs.get("q_offset", 0)), kwargs["q_length"]
    offset, keys = kwargs.get("kv_offset", 0), kwargs["kv_length"]
    if first + count != offset + keys:
        return None
    queries = torch.linspace(first, first + count - 1, min(count, 8)).long().unsqueeze(1)
    distance = queries - torch.arange(offset, offset + keys)
    zero = torch.zeros((), dtype=torch.long)
    try:
        said = torch.as_tensor(kwargs["mask_function"](zero, zero, queries, torch.arange(offset, offset + keys)))
    except (RuntimeError, IndexError, TypeError):  # made for one index at a time, or for another device
        return None
    causal = distance >= 0
    if torch.equal(said.expand_as(causal), causal):
        return 0
    window = kwargs.get("local_size")
    return window if window and torch.equal(said.expand_as(causal), causal & (distance < window)) else None


def qkv_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, H*G, Q, D]; key, value [B, H, T, D] or handles -> ([B, Q, H*G, D], None).

    Obeys `sliding_window`, `softcap`, `s_aux` and `is_causal`. Commits a handle's step to its cache.
    Raises UnsupportedModel for training and for output_attentions, which records cannot give.
    """
    if kwargs.get("output_attentions"):
        raise UnsupportedModel(
            "output_attentions=True: attention over records never has the weights; use attn_implementation='eager'"
        )
    if module.training and torch.is_grad_enabled():
        raise UnsupportedModel("training: qkv's attention records no gradient; call model.eval(), or use sdpa")
    causal = kwargs.get("is_causal")
    options = AttendOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
        window=getattr(attention_mask, "window", None) or kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    layer = key.owner if isinstance(key, KVHandle) and isinstance(value, KVHandle) else None
    if attention_mask is not None and attention_mask.dim() == 4:
        out = _masked(query, key, value, attention_mask, options)
        if layer is not None:
            layer.commit(None)
    elif layer is not None:
        out = _over_records(layer, query, attention_mask, options)
    else:
        out = _over_plain(query, key, value, attention_mask, options)
    out = out.transpose(1, 2).contiguous()
    if torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value)):
        out = _NoGradient.apply(out, query)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out, None


class _NoGradient(torch.autograd.Function):
    """The identity, in whose backward pass an error says what is missing: a zero gradient would be a silent one."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise UnsupportedModel("backward: qkv's attention records no gradient; use attn_implementation='sdpa' for it")


def _over_records(
    layer: QKVLayer, query: torch.Tensor, mask: torch.Tensor | None, options: AttendOptions
) -> torch.Tensor:
    assert layer.pending is not None
    k, v = layer.pending
    if k.shape[2] != query.shape[2]:
        raise ShapeError(f"attention: got {query.shape[2]} queries for {k.shape[2]} new keys; wanted the same count")
    new = layer.rows.step_mask(layer.index, mask, k.shape[2])
    if new is None and k.shape[2] == 1:
        step = layer.rows.planned(None, k, v)
        try:
            out = step.attend(layer.index, query.squeeze(2), k.squeeze(2), v.squeeze(2), options)
        except BaseException:
            layer.drop()
            raise
        layer.committed(None)
        return out.unsqueeze(2)
    keep = [slice(None)] * len(k) if new is None else [tokens.to(k.device) for tokens in new]
    steps = [(k[row][:, kept], v[row][:, kept]) for row, kept in enumerate(keep)]
    queries = [query[row][:, kept] for row, kept in enumerate(keep)]
    rows = [layer.rows.source(row) for row in range(len(k))]
    made = layer.rows.manager.attend_many(rows, layer.index, queries, options, new=steps, need_lse=False)
    out = torch.zeros_like(query)
    for row, kept in enumerate(keep):
        out[row][:, kept] = made[row][0]
    layer.commit(new)
    return out


def _over_plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: AttendOptions
) -> torch.Tensor:
    """K and V at hand, nothing stored. A mask covers the newest keys: sliding layers have dropped older ones."""
    queries, tokens = query.shape[2], key.shape[2]
    if mask is not None and bool(mask.all()):
        mask = None
    if key.shape[-1] != value.shape[-1]:  # latent attention has wider keys; pad as transformers' flash path does
        wide = torch.nn.functional.pad(value, (0, key.shape[-1] - value.shape[-1]))
        return _over_plain(query, key, wide, mask, options)[..., : value.shape[-1]]
    out = torch.zeros_like(query)
    layout = RecordLayout(get_format("exact"), LayerSpec(key.shape[1], key.shape[3], key.dtype, key.device))
    for row in range(query.shape[0]):
        seen = slice(None) if mask is None else mask[row, -tokens:].bool()
        asked = slice(None) if mask is None or not options.causal else mask[row, -queries:].bool()
        view = KVView.exact(layout, torch.stack([key[row][:, seen], value[row][:, seen]]))
        out[row][:, asked] = ops.attend(query[row][:, asked], view, options, need_lse=False)[0]
    return out


def _masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, options: AttendOptions
) -> torch.Tensor:
    """Dense float32 attention under a 4-D mask, bool or additive, which has causality and windows in it."""
    k, v = (side.owner.dense(i) if isinstance(side, KVHandle) else side for i, side in enumerate((key, value)))
    group = query.shape[1] // k.shape[1]
    if query.shape[2] > QUERY_TILE:  # bounds the float32 scores
        every = mask.expand(-1, -1, query.shape[2], -1)
        tiles = [slice(first, first + QUERY_TILE) for first in range(0, query.shape[2], QUERY_TILE)]
        return torch.cat([_masked(query[:, :, tile], k, v, every[:, :, tile], options) for tile in tiles], dim=2)
    scores = query.float() @ k.repeat_interleave(group, 1).float().mT * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    mask = mask[..., : k.shape[2]]
    scores = (
        scores.masked_fill(~mask, torch.finfo(torch.float32).min) if mask.dtype == torch.bool else scores + mask.float()
    )
    if options.sinks is not None:
        column = options.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v.repeat_interleave(group, 1).float()).to(query.dtype)
