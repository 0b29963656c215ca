"""Sizes: the only byte arithmetic in the project. docs/record.md has the picture.

Knows numbers, never values: how long a record is, where each field lies, what an attention call reads. Formats fill
the fields, kernels read them, tiers copy whole records.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch

from qkv.errors import FormatError, ShapeError

BLOCK_TOKENS = 128
PIECE_TOKENS = 16  # of an exact piece; a block is whole pieces
LAYOUT_VERSION = 1
FIELD_ALIGN = 64
TILE_LANES = 16  # one 512-bit vector of 32-bit lanes; two of AVX2, four of NEON
TILE_BYTES = 64  # 16 lanes x 4 adjacent bytes: one u8 x s8 dot-product instruction
MODEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class SideSpec:
    """How K, or V, of a block is stored.

    scheme  "raw" (model dtype), "affine" (scale and minimum per group) or "scaled" (one scale per token)
    planes  bits of each plane of codes; 3 bits are a 2-bit and a 1-bit plane, so no code straddles a byte
    group   values that share a scale: along tokens for K, along channels for V; 0 if the scheme has no groups
    """

    id: str
    scheme: str
    planes: tuple[int, ...]
    group: int
    source: str

    @property
    def bits(self) -> int:
        """Bits of one code, metadata not counted; 0 for raw."""
        return sum(self.planes)


@dataclass(frozen=True)
class Format:
    """A K side, a V side and the tokens kept exact by default."""

    id: str
    k: SideSpec
    v: SideSpec
    sink_tokens: int
    tail_tokens: int


@dataclass(frozen=True)
class LayerSpec:
    """Geometry of one layer's K and V: H heads of D channels, in the model's dtype, on one device."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        if self.dtype not in MODEL_DTYPES:
            raise ShapeError(f"dtype: got {self.dtype}, wanted one of {', '.join(map(str, MODEL_DTYPES))}")

    @property
    def token_bytes(self) -> int:
        """Bytes of exact K and V of one token."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Field:
    """One field of a head's part of a record: `offset` is within that part, `shape` is of one head and block."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


def _aligned(offset: int) -> int:
    return -(-offset // FIELD_ALIGN) * FIELD_ALIGN


@dataclass(frozen=True)
class RecordLayout:
    """Where everything lies in the record of one block in one layer: `uint8 [R]`, head after head.

    A head's part is K codes, K scale, K zero, V codes, V scale, V zero, each field at a multiple of 64 bytes; fields a
    scheme does not have take no room. `zero` holds the group minimum: x ~ scale * code + zero. A second scale per token
    (two-axis formats) will be one more field after `zero`, under a new LAYOUT_VERSION.
    `version` is that of the records at hand: this release reads and writes one.
    Raises FormatError for another one, and if head_dim does not suit the format.
    """

    format: Format
    layer: LayerSpec
    version: int = LAYOUT_VERSION

    def __post_init__(self) -> None:
        if self.version != LAYOUT_VERSION:
            raise FormatError(
                f"record layout version: got {self.version}, wanted {LAYOUT_VERSION}; seal the K and V again with this "
                "release of qkv, or read the records with the one that wrote them"
            )
        coded = [side.id for side in (self.format.k, self.format.v) if side.scheme != "raw"]
        if coded and self.layer.head_dim % TILE_LANES:
            raise FormatError(
                f"format {self.format.id}: got head_dim {self.layer.head_dim}, wanted a multiple of {TILE_LANES}; "
                "use format exact for this model"
            )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # the key of caches that a decode step asks in every layer
        return hash((self.format, self.layer, self.version))

    @cached_property
    def fields(self) -> dict[str, Field]:
        """Fields by name, in storage order: k_codes or k_codes_0, k_codes_1 ..., k_scale, k_zero, then v_*."""
        fields: dict[str, Field] = {}
        offset = 0
        for prefix, side in (("k", self.format.k), ("v", self.format.v)):
            for name, shape, dtype in self._side_fields(prefix, side):
                fields[name] = Field(name, offset, shape, dtype)
                offset = _aligned(offset + fields[name].nbytes)
        return fields

    def _side_fields(self, prefix: str, side: SideSpec) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        tokens, channels, dtype = BLOCK_TOKENS, self.layer.head_dim, self.layer.dtype
        if side.scheme == "raw":
            return [(f"{prefix}_codes", (tokens, channels), dtype)]
        lanes, summed = (tokens, channels) if prefix == "k" else (channels, tokens)
        rows = [
            (f"{prefix}_codes_{i}", (lanes // TILE_LANES, -(-summed * bits // 32), TILE_BYTES), torch.uint8)
            for i, bits in enumerate(side.planes)
        ]
        if side.scheme == "scaled":
            return [*rows, (f"{prefix}_scale", (tokens,), dtype)]
        groups = -(-summed_axis // side.group) if (summed_axis := tokens if prefix == "k" else channels) else 0
        metadata = (groups, channels if prefix == "k" else tokens)
        return [*rows, (f"{prefix}_scale", metadata, dtype), (f"{prefix}_zero", metadata, dtype)]

    @cached_property
    def head_bytes(self) -> int:
        last = list(self.fields.values())[-1]
        return _aligned(last.offset + last.nbytes)

    @property
    def record_bytes(self) -> int:
        return self.head_bytes * self.layer.kv_heads

    @property
    def bits_per_value(self) -> float:
        """Bits of one stored value, scales, zero-points and alignment included, exact tokens not."""
        return self.record_bytes * 8 / (2 * BLOCK_TOKENS * self.layer.kv_heads * self.layer.head_dim)

    def field(self, records: torch.Tensor, name: str) -> torch.Tensor:
        """View (no copy) of one field of `records` uint8 [N, R]: [N, H, *field.shape] in the field's dtype."""
        place = self.fields[name]
        heads = records.view(records.shape[0], self.layer.kv_heads, self.head_bytes)
        part = heads[:, :, place.offset : place.offset + place.nbytes].view(place.dtype)
        return torch.unflatten(part, 2, place.shape)


@dataclass(frozen=True)
class AttendOptions:
    """What attention does to scores: q.k times `scale`, then `softcap * tanh(x / softcap)`, then the masks.

    window  a query sees keys less than `window` positions behind it; None: all
    sinks   [H*G] extra logits in the denominator only (gpt-oss `s_aux`); None: none
    precise  kernels that round queries and softmax weights to integers keep them in float32 instead; slower
    """

    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    precise: bool = False


@dataclass(frozen=True, eq=False)
class Table:
    """Where one sequence's stored tokens lie, the same in every layer. Kernels may know a step by its tables' identity.

    block_ids, block_lengths  int64 [N], a length < 128 after a crop; sealed_tokens: their sum
    sink_ids, tail_ids        int64: pieces of the sink and of the tail, in order; only a last one is part full
    """

    block_ids: torch.Tensor
    block_lengths: torch.Tensor
    sealed_tokens: int
    sink_ids: torch.Tensor
    sink_tokens: int
    tail_ids: torch.Tensor
    tail_tokens: int

    @property
    def stored_tokens(self) -> int:
        return self.sink_tokens + self.sealed_tokens + self.tail_tokens


class KVView:
    """All K and V that one sequence has in one layer, where they lie. Copies nothing.

        position   0 ........ sink | block 0 | block 1 | ... | tail | new
        held as    exact pieces    | records                 | exact pieces | exact, not appended yet

    records   uint8 [num_blocks, R]
    pieces    [num_pieces, 2, H, 16, D] in the model dtype, K then V
    table     which of them are the sequence's
    new       [2, H, T, D], K then V; T may be 0
    """

    __slots__ = ("layout", "new", "pieces", "records", "stored_tokens", "table", "tokens")

    def __init__(
        self, layout: RecordLayout, records: torch.Tensor, pieces: torch.Tensor, table: Table, new: torch.Tensor
    ) -> None:
        self.layout, self.records, self.pieces, self.table, self.new = layout, records, pieces, table, new
        self.stored_tokens = table.stored_tokens
        self.tokens = self.stored_tokens + new.shape[2]

    @property
    def block_ids(self) -> torch.Tensor:
        return self.table.block_ids

    @property
    def block_lengths(self) -> torch.Tensor:
        return self.table.block_lengths

    @property
    def sink(self) -> torch.Tensor:
        """The sink's tokens [2, H, T, D]. Allocates."""
        return self._gather(self.table.sink_ids, self.table.sink_tokens)

    @property
    def tail(self) -> torch.Tensor:
        """The tail's tokens [2, H, T, D]. Allocates."""
        return self._gather(self.table.tail_ids, self.table.tail_tokens)

    def _gather(self, ids: torch.Tensor, tokens: int) -> torch.Tensor:
        return self.pieces[ids].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :tokens]

    @classmethod
    def exact(cls, layout: RecordLayout, new: torch.Tensor) -> "KVView":
        """Nothing stored, all K and V [2, H, T, D] at hand."""
        none = torch.zeros(0, dtype=torch.int64, device=new.device)
        records = torch.zeros(0, layout.record_bytes, dtype=torch.uint8, device=new.device)
        return cls.of(layout, records, (none, none), (new[:, :, :0], new[:, :, :0]), new)

    @classmethod
    def of(
        cls,
        layout: RecordLayout,
        records: torch.Tensor,
        blocks: tuple[torch.Tensor, torch.Tensor],
        exact: tuple[torch.Tensor, torch.Tensor],
        new: torch.Tensor,
    ) -> "KVView":
        """From dense sink and tail [2, H, T, D], which are copied to pieces. blocks: their ids and lengths, int64."""
        counts = [-(-side.shape[2] // PIECE_TOKENS) for side in exact]
        shape = (sum(counts), 2, layout.layer.kv_heads, PIECE_TOKENS, layout.layer.head_dim)
        pieces = torch.zeros(shape, dtype=layout.layer.dtype, device=new.device)
        ids = torch.split(torch.arange(shape[0], device=new.device), counts)
        for side, own in zip(exact, ids, strict=True):
            for piece, some in zip(own.tolist(), torch.split(side, PIECE_TOKENS, 2), strict=False):
                pieces[piece, :, :, : some.shape[2]] = some
        sink, tail = (side.shape[2] for side in exact)
        return cls(layout, records, pieces, Table(*blocks, int(blocks[1].sum()), ids[0], sink, ids[1], tail), new)
