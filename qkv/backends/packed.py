"""A transformers model run on a packed batch: decode steps and chunks of prompts of many sequences in one forward pass.

    model = PackedModel(model, manager)
    with manager.plan(sequences, tokens) as step:
        logits = model.forward(step, ids, positions)     # ids and positions of all new tokens, in a row

What continuous batching needs: no padding, no batch axis, every sequence at its own length.
"""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from qkv.errors import ShapeError, UnsupportedModel
from qkv.manager import KVManager
from qkv.spec import AttendOptions
from qkv.step import Step

NAME = "qkv_packed"


class PackedModel:
    """A decoder-only model whose attention layers all keep K and V in `manager`. Switches the model's attention.

    Raises UnsupportedModel for layers that are not plain attention, or see a window.
    """

    def __init__(self, model: Any, manager: KVManager) -> None:
        text = model.config.get_text_config(decoder=True)
        kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise UnsupportedModel(f"{text.model_type} has {', '.join(sorted(kinds))} layers; use QKVCache for it")
        if text.num_hidden_layers != manager.num_layers:
            raise ShapeError(f"manager: got {manager.num_layers} layers, wanted the model's {text.num_hidden_layers}")
        self.model, self.manager = model, manager
        model.set_attn_implementation(NAME)

    @torch.inference_mode()
    def forward(self, step: Step, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [number of sequences, vocabulary] behind each sequence's last new token.

        ids, positions  int64 [sum of step.tokens], sequence after sequence. Stores their K and V; the step is over.
        """
        total = sum(step.tokens)
        if ids.shape != (total,) or positions.shape != (total,):
            raise ShapeError(f"ids: got {list(ids.shape)} and positions {list(positions.shape)}, wanted [{total}] each")
        last = torch.tensor(step.tokens).cumsum(0) - 1
        out = self.model(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=last.to(ids.device),
            step=step,
        )
        logits: torch.Tensor = out.logits[0]
        return logits


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H*G, T, D], key and value [1, H, T, D] of all new tokens -> [1, T, H*G, D]."""
    step: Step = kwargs["step"]
    options = AttendOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return step.attend(module.layer_idx, q, k, v, options).unsqueeze(0).contiguous(), None  # type: ignore[arg-type]  # transformers numbers its attention modules


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Every sequence sees its own tokens only; no mask over the packed row says that."""


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _no_mask)
