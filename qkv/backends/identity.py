"""Who a transformers model is, as far as its K and V go: the namespace under which they are kept and found again.

    namespace = namespace_of(model, QKVCache(model.config, "kivi4").manager, tokenizer)

Weights are read, not trusted by name: a merged adapter, a new checkpoint or another RoPE setting is another model.
"""

import hashlib
import json
from typing import Any

import torch
import transformers

from qkv.errors import BackendUnavailable, UnsupportedModel
from qkv.manager import KVManager
from qkv.prefix import Namespace
from qkv.spec import BLOCK_TOKENS, LAYOUT_VERSION

# of a configuration, what does not change K and V
VOLATILE = {"_name_or_path", "transformers_version", "_attn_implementation_internal", "use_cache", "architectures"}
ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "max_position_embeddings")


def namespace_of(
    model: Any, manager: KVManager, tokenizer: Any = None, *, salt: str = "", adapter: str = ""
) -> Namespace:
    """Reads every weight once (about a second for 10 GB): keep the result, and make it again if the weights change.

    adapter: a name for changes that the weights do not show. salt: a tenant's secret. Changes nothing.
    Raises UnsupportedModel (not every layer is in `manager`), BackendUnavailable (no xxhash).
    """
    text = model.config.get_text_config(decoder=True)
    if text.num_hidden_layers != manager.num_layers:
        raise UnsupportedModel(
            f"{text.model_type} has {text.num_hidden_layers} layers, of which qkv holds {manager.num_layers}: what the "
            "others hold cannot be stored"
        )
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    config = {name: value for name, value in model.config.to_dict().items() if name not in VOLATILE}
    return Namespace(
        weights=_digest(weights_of(model), _json(config)),
        geometry=((heads, dim, str(model.dtype).removeprefix("torch.")),) * manager.num_layers,
        format=manager.format.id,
        layout_version=LAYOUT_VERSION,
        block_tokens=BLOCK_TOKENS,
        sink_tokens=manager.sink_tokens,
        rope=_digest(_json({name: getattr(text, name, None) for name in ROPE})),
        adapter=_json([adapter, _adapters(model)]) if adapter or _adapters(model) else "",
        numerics=f"transformers {'.'.join(transformers.__version__.split('.')[:2])}",
        tokenizer="" if tokenizer is None else tokenizer_digest(tokenizer),
        salt=salt,
    )


def weights_of(model: Any) -> str:
    """A fingerprint of all parameters and buffers, by name, dtype, shape and bytes; against accidents, not forgers."""
    try:
        import xxhash
    except ImportError as error:
        raise BackendUnavailable("store", f"xxhash cannot be imported ({error}); pip install 'qkv[store]'") from None
    whole = hashlib.sha256()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy()
        whole.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode() + xxhash.xxh3_128_digest(flat))
    return whole.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """Of its vocabulary, its rules where it shows them, and its chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else _json(sorted(tokenizer.get_vocab().items()))
    return _digest(rules, str(getattr(tokenizer, "chat_template", "")))


def _adapters(model: Any) -> list[Any]:
    """Which adapters are on, and how strongly: PEFT's layers say so, without a weight changing."""
    told = []
    for name, module in model.named_modules():
        if hasattr(module, "active_adapters") and hasattr(module, "scaling"):
            off = bool(getattr(module, "disable_adapters", False)), bool(getattr(module, "merged", False))
            told.append([name, list(module.active_adapters), dict(module.scaling), *off])
    return told


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
