"""Tiny random models of every family that CI runs, in float32."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 64},
    # a cap this low changes the scores of random weights too
    "gemma2": {"sliding_window": 64, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.05},
    "gemma3_text": {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "phi3": {},
    "smollm3": {},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_scaling": None,
    },
}


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """tiny(family, implementation="eager", **overrides) -> model, the same weights each time."""

    def make(family: str, implementation: str = "eager", **overrides: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old model code's own deprecations
            config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES.get(family, {}), **overrides})
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
        if hasattr(model.config, "bos_token_id"):
            model.generation_config.pad_token_id = 0
        return model

    return make


@pytest.fixture(scope="session")
def call() -> Callable[..., Any]:
    """call(model, ids, cache, mask=None, **more) -> output of one forward, under whichever name the cache goes by."""

    def forward(model: Any, ids: torch.Tensor, cache: Any, mask: torch.Tensor | None = None, **more: Any) -> Any:
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        with torch.no_grad():
            return model(ids, attention_mask=mask, use_cache=True, **{name: cache}, **more)

    return forward


@pytest.fixture(scope="session")
def generate() -> Callable[..., Any]:
    """generate(model, ids, cache, mask=None, **more) -> greedy tokens [B, T] unless told otherwise."""

    def run(model: Any, ids: torch.Tensor, cache: Any, mask: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        mask = torch.ones_like(ids) if mask is None else mask
        options = {"max_new_tokens": 20, "do_sample": False, **more}
        tokens: torch.Tensor = model.generate(ids, attention_mask=mask, **{name: cache}, **options)
        return tokens

    return run
