"""Hugging Face transformers (4.57.6, 5.4 ... 5.24): `QKVCache` holds the K and V, `qkv_attention` reads them.

    from qkv.backends.transformers import QKVCache, enable
    enable(model)                                            # attention that reads records
    model.generate(..., past_key_values=QKVCache(model.config, format="kivi4"))

A step of one layer: `update` takes the new K and V and returns handles; attention sees stored records and the exact new
tokens, then commits them. Without `enable`, any attention gets dequantised tensors: right, slow, and said once.
"""

import copy
import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from qkv.account import Line, account
from qkv.backends import attention, persistence
from qkv.backends.identity import namespace_of
from qkv.backends.layer import QKVLayer
from qkv.backends.rows import Rows
from qkv.errors import InputError, ShapeError, UnsupportedModel
from qkv.formats import get_format
from qkv.manager import KVManager, Memory
from qkv.prefix import Namespace
from qkv.spec import Format, LayerSpec, RecordLayout

if TYPE_CHECKING:
    from qkv.offload.disk import DiskStore
    from qkv.offload.onefile import OneFile
    from qkv.offload.tier import Device, Disk, Host

NAME = "qkv"
_V4 = transformers.__version__.startswith("4.")


@dataclass(frozen=True)
class LayerReport:
    """What holds one layer's K and V: a qkv format, or transformers' own class, and why."""

    layer: int
    format: str
    held_by: str
    reason: str


class QKVCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """A cache for `generate()` or `forward()` that keeps full-attention layers in qkv blocks.

    config       the model's config
    format       as for KVManager; `k_format` and `v_format` override one side
    sliding      "exact": sliding-window layers stay with transformers, which drops what the window has passed;
                 "quantised": they go into blocks too, the window applied in attention. If all layers slide, blocks
                 that the window has passed are given back; else they are kept, for the ids are the same in all layers;
                 "auto": "exact" if the model has full-attention layers as well, else "quantised"
    tiers        as for KVManager: [Device("256MiB"), Disk(folder, "50GiB")]. dtype, device: then the model's, which the
                 config may not say (default: the config's dtype, the CPU)
    Padding is not stored, so a sliding window counts tokens; transformers counts padding inside a row too.
    Layers of other kinds (linear attention, MLA) stay with transformers; `report()` says which and why.
    Raises FormatError, ShapeError, UnsupportedModel.
    """

    def __init__(  # noqa: PLR0913  # each is a setting with a default
        self,
        config: Any,
        format: str | Format = "kivi4",
        *,
        k_format: str | None = None,
        v_format: str | None = None,
        sink_tokens: int | None = None,
        tail_tokens: int | None = None,
        sliding: str = "auto",
        tiers: "list[Device | Host | Disk] | None" = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        if sliding not in ("auto", "exact", "quantised"):
            raise ShapeError(f"sliding: got {sliding!r}, wanted 'auto', 'exact' or 'quantised'")
        chosen = get_format(format)
        if k_format or v_format:
            chosen = get_format(f"{k_format or chosen.k.id}/{v_format or chosen.v.id}")
        if not hasattr(config, "get_text_config"):
            raise ShapeError(f"config: got {type(config).__name__}, wanted the model's config; pass model.config")
        layers = DynamicCache(config=config).layers
        served, self._reasons = _served(config, layers, sliding)
        if not served:
            raise UnsupportedModel(
                "no attention layer that qkv serves; " + "; ".join(sorted(set(self._reasons.values())))
            )
        window = _window(layers, served)
        geometry = None if tiers is None else [_geometry(config, dtype, device)] * len(served)
        self.manager = KVManager(
            len(served),
            chosen,
            sink_tokens=sink_tokens,
            tail_tokens=tail_tokens,
            window=window,
            tiers=tiers,
            layers=geometry,
        )
        _hold_to_format(config, chosen)
        self.rows = Rows(self.manager, alone=len(served) == len(layers))
        self._namespace: Namespace | None = None
        for index, layer in enumerate(served):
            layers[layer] = QKVLayer(self.rows, index)
        super().__init__(layers=layers)

    def report(self) -> list[LayerReport]:
        """One row for each layer of the model: who holds its K and V, in which format, and why."""
        return [
            LayerReport(
                index,
                self.manager.format.id,
                "qkv",
                self._reasons.get(index, "full attention"),
            )
            if isinstance(layer, QKVLayer)
            else LayerReport(index, "exact", f"transformers {type(layer).__name__}", self._reasons[index])
            for index, layer in enumerate(self.layers)
        ]

    def memory(self) -> Memory:
        """Bytes of all tensors kept for K and V, forks' and free ones too; transformers' own layers count as exact."""
        self._settle()
        return self._with_others(self.manager.memory())

    def held(self) -> Memory:
        """Bytes of the blocks and pieces that this cache's rows hold, shared ones once; others as in `memory`."""
        self._settle()
        return self._with_others(self.manager.held(self.rows.sequences))

    def account(self, model: Any = None) -> list[Line]:
        """Every kind of memory of this run, and how it is known: see `qkv.account`. `model` counts its weights."""
        self._settle()
        return account(self.manager, model, self._kept_by_others())

    def _with_others(self, held: Memory) -> Memory:
        others = sum(tensor.untyped_storage().nbytes() for tensor in self._kept_by_others())
        return replace(held, exact=held.exact + others)

    def _kept_by_others(self) -> list[torch.Tensor]:
        others = [layer for layer in self.layers if not isinstance(layer, QKVLayer)]
        kept = [getattr(layer, side, None) for layer in others for side in ("keys", "values")]
        return [tensor for tensor in kept if tensor is not None]

    def fork(self) -> "QKVCache":
        """A second cache with the same tokens: shares records, copies the rest. `reset` it to give its blocks back."""
        self._settle()
        twin: QKVCache = QKVCache.__new__(QKVCache)
        twin.manager, twin.rows, twin._reasons = self.manager, self.rows.fork(), self._reasons
        twin._namespace = self._namespace
        layers = [
            layer.fork(twin.rows) if isinstance(layer, QKVLayer) else copy.deepcopy(layer) for layer in self.layers
        ]
        Cache.__init__(twin, layers=layers)
        return twin

    def crop(self, n: int) -> None:
        """Negative: remove -n tokens. Positive: keep n (as before 5.20). 0: as the installed transformers does."""
        self._settle()
        have = min(self.rows.widths)
        if n < -have:
            raise ShapeError(f"crop: got {n}, wanted at least {-have}; the cache holds {have} tokens")
        # first, because a sliding layer that has dropped what it would need refuses; then nothing has changed
        self._others("crop", n if n <= 0 or _V4 else min(0, n - have))
        if n < 0 or (n == 0 and _V4):
            self.rows.crop(have + n if n else 0)
        elif n:
            self.rows.crop(min(n, have))  # a length beyond the cache is a no-op there

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beam search: row i becomes row beam_idx[i]. Records are shared."""
        self._settle()
        self.rows.select(beam_idx)
        self._others("reorder_cache", beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order. Records are shared."""
        self._settle()
        self.rows.select(indices)
        self._others("batch_select_indices", indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times. Records are shared."""
        self._settle()
        self.rows.select(torch.arange(len(self.rows.sequences)).repeat_interleave(repeats))
        self._others("batch_repeat_interleave", repeats)

    def attach(self, store: "DiskStore | OneFile", namespace: Namespace, device: str | torch.device = "cpu") -> None:
        """Let `restore` and `persist` use a store. namespace: from `qkv.backends.identity.namespace_of`.

        device: the model's. Raises UnsupportedModel where transformers holds some layers, or a window drops blocks.
        """
        self.check_storable()
        self.manager.attach(store, device=device)
        self._namespace = namespace

    def restore(self, ids: Any, *, left: int = 1, wait: bool = True) -> int:
        """Fill this empty cache with what the store has of the tokens `ids` [T] or [1, T]; returns how many that is.

        left  newest tokens to leave: `generate(ids)` needs 1 to compute
        wait  return when every layer is there and proven; whatever fails is a miss. False: layers arrive while earlier
              ones are computed, and one that is lost raises LayerLost out of the forward pass; reset() and start again
        Raises InputError (the cache holds tokens; no store).
        """
        return persistence.restore(self, ids, self._identity(), left, wait)

    def persist(self, ids: Any) -> str:
        """Store where this cache stands; ids [T] or [1, T]: its tokens. Returns the segment's name.

        Waits for the disk. Raises InputError (several rows, padding, other ids, under one block), StoreFull, OSError.
        """
        self._settle()
        return self.manager.save(persistence.named(self, ids, self._identity()))

    def save(self, path: str | Path, ids: Any, model: Any, tokenizer: Any = None, *, salt: str = "") -> None:
        """Keep this cache in a new file (HDF5) that `load` reads; ids [T] or [1, T]: its tokens. Waits for the disk.

        Raises InputError (as `persist`; the file exists), UnsupportedModel (as `attach`), OSError.
        """
        self._settle()
        persistence.save(self, str(path), ids, namespace_of(model, self.manager, tokenizer, salt=salt))

    @classmethod
    def load(
        cls, path: str | Path, model: Any, tokenizer: Any = None, *, salt: str = ""
    ) -> tuple["QKVCache", torch.Tensor]:
        """The cache that `save` kept, and its token ids [1, T]. The format is the file's.

        Raises InputError (made with other weights, tokenizer or salt: says which; no such file), CorruptSegment,
        LayerLost, ForeignSegment.
        """
        return persistence.load(cls, str(path), model, tokenizer, salt)

    def _identity(self) -> Namespace:
        if self._namespace is None:
            raise InputError("cache: it has no store; attach one first")
        return self._namespace

    def reset(self) -> None:
        """Forget every row; the cache can be used again."""
        for layer in self.own_layers():
            layer.pending = None
        self.rows.reset()
        self._others("reset")

    def own_layers(self) -> list[QKVLayer]:
        """Those that qkv holds."""
        return [layer for layer in self.layers if isinstance(layer, QKVLayer)]

    def check_storable(self) -> None:
        """Raises UnsupportedModel where a store could not hold all that this cache does."""
        if not self.rows.alone or self.manager.window is not None:
            raise UnsupportedModel("layers that slide, or that transformers holds, cannot be kept in a store")

    def _settle(self) -> None:
        self.rows.recover()
        for layer in self.own_layers():
            layer.settle()

    def _others(self, method: str, *args: Any) -> None:
        for layer in self.layers:
            if not isinstance(layer, QKVLayer):
                getattr(layer, method)(*args)


def _served(config: Any, layers: list[Any], sliding: str) -> tuple[list[int], dict[int, str]]:
    """Which layers qkv takes, and a reason for each that it leaves (or takes on request)."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "num_kv_shared_layers", None):
        raise UnsupportedModel(f"{text.model_type} shares K and V between layers; use transformers' own cache")
    if _V4 and (foreign := _states_of_its_own(text)):
        raise UnsupportedModel(f"{text.model_type} {foreign}; transformers 5 has a cache that qkv can share with it")
    latent = getattr(text, "kv_lora_rank", None) is not None
    if sliding == "auto":
        sliding = "exact" if any(type(layer) is DynamicLayer for layer in layers) else "quantised"
    served, reasons = [], {}
    for index, layer in enumerate(layers):
        if latent:
            reasons[index] = "multi-head latent attention (MLA): keys and values are not separate heads"
        elif type(layer) is DynamicLayer:
            served.append(index)
        elif getattr(layer, "is_sliding", False) and isinstance(layer, DynamicLayer):
            reasons[index] = "sliding window"
            if sliding == "quantised":
                served.append(index)
        else:
            reasons[index] = f"{type(layer).__name__}: not a plain attention layer"
    return served, reasons


def _window(layers: list[Any], served: list[int]) -> int | None:
    """The window that all layers served here slide in; None: some see more."""
    sizes = {layers[index].sliding_window if layers[index].is_sliding else None for index in served}
    return sizes.pop() if len(sizes) == 1 else None


def _geometry(config: Any, dtype: torch.dtype | None, device: str | torch.device) -> LayerSpec:
    """What the config says of every attention layer."""
    text = config.get_text_config(decoder=True)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    chosen = dtype or getattr(text, "dtype", None) or getattr(text, "torch_dtype", None) or torch.float32
    return LayerSpec(heads, head_dim, chosen, torch.device(device))


def _hold_to_format(config: Any, format: Format) -> None:
    """Raises FormatError now, not at the first token, if the config's head_dim does not suit the format."""
    RecordLayout(format, replace(_geometry(config, torch.float16, "cpu"), kv_heads=1))


def _states_of_its_own(text: Any) -> str | None:
    """What a hybrid keeps besides K and V. Before transformers 5 such a model brings its own cache class."""
    known = {"full_attention", "sliding_attention", "chunked_attention"}
    if foreign := sorted(set(getattr(text, "layer_types", None) or ()) - known):
        return f"has {', '.join(foreign)} layers"
    fields = [name for name in text.to_dict() if name.startswith(("mamba_", "ssm_")) or name == "layers_block_type"]
    return f"has state-space layers ({fields[0]})" if fields else None


def enable(model: Any) -> None:
    """Make `model` use qkv's attention; any cache, or none, still works with it. Raises UnsupportedModel."""
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise UnsupportedModel(f"{type(model).__name__} does not take a custom attention function: {error}") from error


def cache_argument(model: Any) -> str:
    """The name under which the model's forward takes a cache: `cache` from transformers 5.24 on."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


AttentionInterface.register(NAME, attention.qkv_attention)
AttentionMaskInterface.register(NAME, attention.mask_for_qkv)
