"""A QKVCache's state to a store and back, and to one file and back. One row without padding; every layer in qkv."""

import json
from array import array
from typing import TYPE_CHECKING, Any

import torch

from qkv.backends.identity import namespace_of
from qkv.errors import InputError, LayerLost
from qkv.prefix import Namespace, Prefix
from qkv.sequence import Sequence

if TYPE_CHECKING:
    from qkv.backends.transformers import QKVCache


def restore(cache: "QKVCache", ids: Any, namespace: Namespace, left: int, wait: bool) -> int:
    """See `QKVCache.restore`."""
    manager = cache.manager
    if cache.rows.sequences:
        raise InputError(
            f"restore: this cache holds {cache.rows.length()} tokens already; reset() it, or make a new one"
        )
    sequence = manager.restore(row_of(ids), namespace, left=left)
    if sequence is None:
        return 0
    if wait:
        try:
            sequence.arrive()
        except LayerLost:  # counted by the store: a miss
            manager.close(sequence)
            return 0
    return adopt(cache, sequence)


def adopt(cache: "QKVCache", sequence: Sequence) -> int:
    """The empty cache has the sequence as its only row; returns its tokens."""
    tokens = cache.manager.length(sequence)
    cache.rows.adopt(sequence)
    for layer in cache.own_layers():
        layer.is_initialized = True
    return tokens


def named(cache: "QKVCache", ids: Any, namespace: Namespace) -> Sequence:
    """The cache's one row, with the names of its tokens. Raises InputError if they are not as many as it holds."""
    rows = cache.rows
    if len(rows.sequences) != 1 or (rows.valid is not None and not bool(rows.valid.all())):
        raise InputError(
            f"cache: got {len(rows.sequences)} rows, wanted one without padding; keep others one by one "
            "(fork and batch_select_indices)"
        )
    sequence, tokens = rows.sequences[0], row_of(ids)
    have = cache.manager.length(sequence)
    if len(tokens) < have:
        raise InputError(f"cache: got {len(tokens)} token ids, wanted those of all {have} tokens it holds")
    fresh, known = Prefix(namespace, tokens[:have], tail_tokens=cache.manager.tail_tokens), sequence.prefix
    if known is None or known.namespace != namespace:
        cache.manager.name_tokens(sequence, tokens[:have], namespace)
        return sequence
    shared = min(known.length, have) - namespace.sink_tokens
    if known.start != fresh.start or known.tail(0, max(0, shared)) != fresh.tail(0, max(0, shared)):
        raise InputError("cache: got token ids other than those that this cache was restored with")
    cache.manager.name_tokens(sequence, tokens[known.length : have])
    return sequence


def save(cache: "QKVCache", path: str, ids: Any, namespace: Namespace) -> None:
    """See `QKVCache.save`."""
    from qkv.offload.onefile import OneFile

    cache.check_storable()
    try:
        cache.manager.save(named(cache, ids, namespace), OneFile(path))
    except FileExistsError:
        raise InputError(f"save: {path} exists; give another name, or remove it") from None


def load(kind: type["QKVCache"], path: str, model: Any, tokenizer: Any, salt: str) -> tuple["QKVCache", torch.Tensor]:
    """See `QKVCache.load`."""
    from qkv.offload.onefile import OneFile

    file = OneFile(path)
    try:
        header = file.header()
    except OSError as error:
        raise InputError(f"load: {path}: {error.strerror or error}") from None
    told: dict[str, Any] = json.loads(header.about)
    cache = kind(model.config, told["format"], sink_tokens=told["sink_tokens"])
    namespace = namespace_of(model, cache.manager, tokenizer, adapter="", salt=salt)
    if namespace.root.hex() != header.namespace:
        own = json.loads(namespace.told())
        differs = [name for name in own if own[name] != told.get(name)] or ["salt"]
        raise InputError(
            f"load: {path} was made with another {', '.join(differs)}; what it holds is not for this model"
        )
    cache.attach(file, namespace, model.device)
    ids = torch.frombuffer(bytearray(header.tokens), dtype=torch.int32).to(torch.int64)
    sequence = cache.manager.restore(ids, namespace)
    if sequence is None:
        raise InputError(f"load: {path} is one segment of several; `qkv store export` makes one file of them")
    try:
        sequence.arrive()
    except LayerLost:
        cache.manager.close(sequence)
        raise
    adopt(cache, sequence)
    return cache, ids[None]


def row_of(ids: Any) -> "array[int]":
    """Token ids [T] or [1, T] as one row. Raises InputError."""
    values = torch.as_tensor(ids)
    if values.dim() == 2 and values.shape[0] == 1:
        values = values[0]
    if values.dim() != 1 or values.is_floating_point():
        raise InputError(f"token ids: got {list(values.shape)} of {values.dtype}, wanted whole numbers [T] or [1, T]")
    if values.numel() and int(values.min()) < 0:
        raise InputError(f"token ids: got {int(values.min())}, wanted at least 0")
    return array("I", values.tolist())
