"""Names of blocks: what decides whether a stored block may serve another sequence.

    Namespace -> root -> sink link (start) -> block 0 -> block 1 -> ...
                         key = SHA-256(parent key + content), content = token ids and extra keys

A key says everything before it, so equal keys mean an equal prefix, sink included: records are made by a run that saw
exactly that sink. Keys never involve Python's hash(): they are the same in every process. Imports no torch.
"""

import json
import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from hashlib import sha256
from typing import Any

from qkv.errors import InputError

TOKEN_BYTES = 4  # a token id is a little-endian uint32
# vLLM's v1/core/kv_cache_utils.py, DEFAULT_NONE_HASH_SEED: what the chain starts from unless PYTHONHASHSEED is set.
VLLM_SEED = "vllm-none-hash"


@dataclass(frozen=True)
class Namespace:
    """Everything but the tokens that decides a record's bytes. One wrong field and nothing is shared.

    weights    fingerprint of the weights and of the configuration that belongs to them
    geometry   (KV heads, head_dim, dtype) of each layer held here
    format     id of the format; layout_version: that of its records
    rope       rotary settings that differ from the weights' own; adapter: LoRA and the like, a fingerprint
    shard      the part of the model held here; numerics: what else changes K and V (a prompt's chunks, a kernel)
    tokenizer  a fingerprint: other words for the same ids are other prompts
    salt       a tenant's secret: two salts never share. Not printed.
    Raises InputError.
    """

    weights: str
    geometry: tuple[tuple[int, int, str], ...]
    format: str
    layout_version: int
    block_tokens: int
    sink_tokens: int
    rope: str = ""
    adapter: str = ""
    shard: str = ""
    numerics: str = ""
    tokenizer: str = ""
    salt: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for name in ("layout_version", "block_tokens", "sink_tokens"):
            _whole(name, getattr(self, name), 0 if name == "sink_tokens" else 1)
        for name in ("weights", "format", "rope", "adapter", "shard", "numerics", "tokenizer", "salt"):
            if not isinstance(getattr(self, name), str):
                raise InputError(f"namespace {name}: got {type(getattr(self, name)).__name__}, wanted a str")
        for name in ("weights", "format"):
            if not getattr(self, name):
                raise InputError(f"namespace {name}: got nothing, wanted what tells two models or formats apart")
        if not isinstance(self.geometry, tuple) or not self.geometry:
            raise InputError(f"namespace geometry: got {self.geometry!r}, wanted a tuple with one entry a layer")
        for layer in self.geometry:
            if not isinstance(layer, tuple) or len(layer) != 3 or not isinstance(layer[2], str) or not layer[2]:
                raise InputError(f"namespace geometry: got {layer!r}, wanted (KV heads, head_dim, dtype)")
            _whole("KV heads", layer[0], 1)
            _whole("head_dim", layer[1], 1)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Namespace":
        """From parsed JSON or TOML. Raises InputError for a field that is unknown, missing or of the wrong kind."""
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise InputError(f"namespace: unknown {', '.join(unknown)}; known are {', '.join(known)}")
        if missing := [name for name in known[:6] if name not in values]:
            raise InputError(f"namespace: {', '.join(missing)} missing; give every field that has no default")
        geometry = values["geometry"]
        if isinstance(geometry, list | tuple):
            geometry = tuple(tuple(layer) if isinstance(layer, list) else layer for layer in geometry)
        return cls(**{**values, "geometry": geometry})

    def told(self) -> str:
        """JSON of every field but the salt: to show, and to say in what two namespaces differ."""
        return json.dumps({f.name: getattr(self, f.name) for f in fields(self) if f.name != "salt"}, sort_keys=True)

    @cached_property
    def root(self) -> bytes:
        """SHA-256 over all fields by name: the parent of every sequence's first link."""
        return sha256(b"qkv namespace 1" + cbor(tuple((f.name, getattr(self, f.name)) for f in fields(self)))).digest()


class Prefix:
    """The names of one sequence's blocks. Grows with the sequence; only full blocks have names.

        tokens   0 ... sink_tokens | block 0 | block 1 | ... | rest, not named yet
        name     start             | keys[0] | keys[1] | ...

    `tail_tokens`: how many of the newest tokens the sequence keeps exact. A hit stops before them (`usable`), so that a
    sequence that reuses blocks ends with the same records and the same tail as one that computed everything.
    `extra`: token position -> what stands there besides the token (a picture's hash), taken into that link's content.
    Belongs to one thread. Raises InputError.
    """

    def __init__(
        self,
        namespace: Namespace,
        tokens: Any = (),
        *,
        tail_tokens: int,
        extra: Mapping[int, Any] | None = None,
    ) -> None:
        _whole("tail_tokens", tail_tokens, 0)
        self.namespace = namespace
        self.tail_tokens = tail_tokens
        self.extra = dict(sorted((_whole("position", at, 0), value) for at, value in (extra or {}).items()))
        cbor(tuple(self.extra.values()))  # refused now rather than in the middle of a sequence
        self.start: bytes | None = None if namespace.sink_tokens else namespace.root  # None: the sink is not full yet
        self.sink = b""  # content of the sink's link
        self.keys: list[bytes] = []
        self.contents: list[bytes] = []
        self._rest = b""
        self.extend(tokens)

    @property
    def length(self) -> int:
        """Tokens given so far."""
        sink = 0 if self.start is None else self.namespace.sink_tokens
        return sink + len(self.keys) * self.namespace.block_tokens + len(self._rest) // TOKEN_BYTES

    @property
    def usable(self) -> int:
        """Most blocks a hit may give: none that reaches into the tail, and one token is left to compute."""
        beyond = self.length - self.namespace.sink_tokens - max(1, self.tail_tokens)
        return min(len(self.keys), max(0, beyond // self.namespace.block_tokens))

    def extend(self, tokens: Any) -> None:
        """More tokens at the end; names the blocks they fill. A new block costs one SHA-256, whatever lies before it.

        `tokens`: ints, or anything with `tolist` (a tensor, an array) of one axis.
        Raises InputError for what is not a token id; then nothing has changed.
        """
        data = self._rest + token_bytes(tokens)
        sink, block = self.namespace.sink_tokens, self.namespace.block_tokens
        at, step = 0, block * TOKEN_BYTES
        if self.start is None and len(data) >= sink * TOKEN_BYTES:
            at = sink * TOKEN_BYTES
            self.sink = self._content(data[:at], 0, sink)
            self.start = link(self.namespace.root, self.sink)
        if self.start is not None:
            parent = self.keys[-1] if self.keys else self.start
            while len(data) - at >= step:
                content = data[at : at + step]
                if self.extra:
                    content = self._content(content, sink + len(self.keys) * block, block)
                parent = link(parent, content)
                self.contents.append(content)
                self.keys.append(parent)
                at += step
        self._rest = data[at:]

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens. Raises InputError if there are fewer; then nothing has changed."""
        if not 0 <= length <= self.length:
            raise InputError(f"prefix: got length {length}, wanted 0 to {self.length}, the tokens given")
        sink, block = self.namespace.sink_tokens, self.namespace.block_tokens
        keep = max(0, (length - sink) // block)
        if keep < len(self.keys):
            self._rest = self.contents[keep][: block * TOKEN_BYTES]
            del self.keys[keep:], self.contents[keep:]
        if length < sink and self.start is not None:
            self._rest, self.start, self.sink = self.sink[: sink * TOKEN_BYTES], None, b""
        self._rest = self._rest[: len(self._rest) - (self.length - length) * TOKEN_BYTES]

    def tail(self, blocks: int, tokens: int) -> bytes:
        """What stands behind the first `blocks` blocks, for `tokens` tokens: their ids, and what else stands there."""
        size = self.namespace.block_tokens * TOKEN_BYTES
        ids = b"".join([*(content[:size] for content in self.contents[blocks:]), self._rest])[: tokens * TOKEN_BYTES]
        return self._content(ids, self.namespace.sink_tokens + blocks * self.namespace.block_tokens, tokens)

    def copy(self) -> "Prefix":
        """An independent prefix with the same tokens; shares the names' bytes."""
        twin = Prefix(self.namespace, tail_tokens=self.tail_tokens, extra=self.extra)
        twin.start, twin.sink, twin._rest = self.start, self.sink, self._rest
        twin.keys, twin.contents = list(self.keys), list(self.contents)
        return twin

    def _content(self, data: bytes, first: int, count: int) -> bytes:
        """What a link stands for: a fixed number of token ids, then what stands at them, if anything does."""
        found = tuple((at - first, value) for at, value in self.extra.items() if first <= at < first + count)
        return data + cbor(found) if found else data


def link(parent: bytes, content: bytes) -> bytes:
    """The key of a link. Both parts are of known length (32 bytes; the root fixes the ids), so no two inputs meet."""
    return sha256(parent + content).digest()


def token_bytes(tokens: Any) -> bytes:
    """Token ids as little-endian uint32. Raises InputError for what is not a flat row of ids."""
    packed = _ids(tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def cbor(value: Any) -> bytes:
    """Canonical CBOR (RFC 8949, 4.2.1) of None, bool, int, bytes, str, and tuples or lists of these.

    Every part carries its length, so two different values never have the same bytes. Raises InputError.
    """
    if value is None or isinstance(value, bool):
        return b"\xf6" if value is None else b"\xf5" if value else b"\xf4"
    if isinstance(value, int):
        return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _cbor_head(3, len(text)) + text
    if isinstance(value, tuple | list):
        return _cbor_head(4, len(value)) + b"".join(map(cbor, value))
    raise InputError(f"cannot name a {type(value).__name__}; wanted None, bool, int, bytes, str or a tuple of these")


def vllm_names(
    tokens: Iterable[int],
    block_tokens: int = 16,
    *,
    extra: Mapping[int, tuple[Any, ...]] | None = None,
    seed: str = VLLM_SEED,
) -> list[bytes]:
    """The names that vLLM's `sha256_cbor` gives to the full blocks of `tokens`, to meet its routers and stores.

    A name is SHA-256 over the CBOR of (parent name, token ids, extra keys or None); the first parent is SHA-256 over
    the CBOR of the seed (vLLM: v1/core/kv_cache_utils.py hash_block_tokens, init_none_hash; utils/hashing.py).
    `extra`: block number -> keys, as vLLM builds them (LoRA name, picture, cache_salt in block 0). `seed`: the value of
    PYTHONHASHSEED in that vLLM process, if it is set; releases before the default seed start from random bytes then.
    Raises InputError.
    """
    _whole("block_tokens", block_tokens, 1)
    ids = _ids(tokens)
    names, parent = [], sha256(cbor(seed)).digest()
    for number, first in enumerate(range(0, len(ids) - block_tokens + 1, block_tokens)):
        keys = (extra or {}).get(number)
        parent = sha256(cbor((parent, tuple(ids[first : first + block_tokens]), keys or None))).digest()
        names.append(parent)
    return names


def _ids(tokens: Any) -> "array[int]":
    try:
        return array("I", tokens.tolist() if hasattr(tokens, "tolist") else tokens)
    except (TypeError, OverflowError) as e:
        raise InputError(f"tokens: {e}; wanted one flat row of ids from 0 to 2**32 - 1") from None


def _cbor_head(major: int, value: int) -> bytes:
    """Major type and length, or value, in as few bytes as it takes."""
    if value < 24:
        return bytes((major << 5 | value,))
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 1 << 8 * size:
            return bytes((major << 5 | code,)) + value.to_bytes(size, "big")
    raise InputError(f"cannot name the whole number {value}; wanted at most 64 bits")


def _whole(name: str, value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name}: got {value!r}, wanted a whole number of at least {least}")
    return value
