"""Sizes: bits per value, bytes per token, and views that are not copies."""

import pytest
import torch

from qkv.errors import FormatError, ShapeError
from qkv.formats import get_format, list_formats
from qkv.spec import BLOCK_TOKENS, KVView, LayerSpec, RecordLayout


def layout(name: str, dim: int, dtype: torch.dtype = torch.float16, heads: int = 2) -> RecordLayout:
    return RecordLayout(get_format(name), LayerSpec(heads, dim, dtype))


@pytest.mark.parametrize(
    ("name", "dim", "bits"),
    [
        ("exact", 64, 16.0),
        ("exact", 128, 16.0),
        ("kivi2", 64, 3.0),
        ("kivi2", 128, 3.0),
        ("kivi3", 64, 4.0),
        ("kivi4", 64, 5.0),
        ("kivi4", 128, 5.0),
        ("kivi2_g64", 64, 2.5),
        ("kivi2_g128", 128, 2.25),
        ("kivi4_g128", 128, 4.25),
        ("kivi4/kivi2", 64, 4.0),
        ("exact/kivi2", 128, 9.5),
        ("int8", 64, 8.25),
        ("int8", 128, 8.125),
        ("fp8_e4m3", 64, 8.25),
        ("fp8_e5m2", 128, 8.125),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bits_per_value(name: str, dim: int, bits: float, dtype: torch.dtype) -> None:
    assert layout(name, dim, dtype).bits_per_value == bits
    assert layout(name, dim, dtype, heads=1).bits_per_value == bits


def test_float32_metadata_costs_twice() -> None:
    assert layout("kivi2", 64, torch.float32).bits_per_value == 2 + 2 * 32 / 32
    assert layout("exact", 64, torch.float32).bits_per_value == 32


@pytest.mark.parametrize("name", [f.id for f in list_formats()])
def test_record_bytes_are_whole_lines_of_every_head(name: str) -> None:
    for dim in (64, 80, 96, 128, 256):
        one, five = layout(name, dim, heads=1), layout(name, dim, heads=5)
        assert five.record_bytes == 5 * one.record_bytes == 5 * five.head_bytes
        assert five.head_bytes % 64 == 0


def test_token_bytes() -> None:
    assert LayerSpec(8, 128, torch.bfloat16).token_bytes == 2 * 8 * 128 * 2
    assert LayerSpec(2, 64, torch.float32).token_bytes == 2 * 2 * 64 * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ShapeError, match=f"got {dtype}, wanted one of torch.float16"):
        LayerSpec(2, 64, dtype)


@pytest.mark.parametrize("name", ["kivi2", "kivi4/exact", "exact/int8", "fp8_e5m2"])
def test_head_dim_72_is_refused_with_a_way_out(name: str) -> None:
    with pytest.raises(FormatError, match="got head_dim 72, wanted a multiple of 16; use format exact"):
        layout(name, 72)
    assert layout("exact", 72).bits_per_value == 16


@pytest.mark.parametrize("version", [0, 2])
def test_records_of_another_layout_are_refused(version: int) -> None:
    with pytest.raises(FormatError, match=f"record layout version: got {version}, wanted 1; seal"):
        RecordLayout(get_format("kivi2"), LayerSpec(2, 64, torch.float16), version)


def test_a_field_is_a_view() -> None:
    spec = layout("kivi2", 64)
    records = torch.zeros(3, spec.record_bytes, dtype=torch.uint8)
    scale = spec.field(records, "k_scale")
    assert scale.shape == (3, 2, 4, 64)
    scale[2, 1, 3, 63] = 1.0
    place = spec.fields["k_scale"]
    at = spec.head_bytes + place.offset + 2 * (4 * 64 - 1)
    assert records[2, at : at + 2].tolist() == [0x00, 0x3C]  # little-endian float16 one
    assert int((records != 0).sum()) == 1


def test_a_view_counts_its_tokens() -> None:
    spec = layout("exact", 16)
    exact = torch.zeros(2, 2, 10, 16, dtype=torch.float16)
    records = torch.zeros(4, spec.record_bytes, dtype=torch.uint8)
    blocks = torch.tensor([2, 0]), torch.tensor([128, 5])
    view = KVView.of(spec, records, blocks, (exact[:, :, :3], exact[:, :, :7]), exact[:, :, :2])
    assert view.stored_tokens == 3 + 133 + 7
    assert view.tokens == view.stored_tokens + 2
    assert KVView.exact(spec, exact).stored_tokens == 0
    assert KVView.exact(spec, exact).tokens == 10


def test_the_formats_by_name() -> None:
    names = [f.id for f in list_formats()]
    assert len(set(names)) == len(names)
    assert {"exact", "kivi2", "kivi3", "kivi4", "kivi2_g128", "int8", "fp8_e4m3", "fp8_e5m2"} <= set(names)
    for name in names:
        assert get_format(name).id == name
        assert get_format(get_format(name)) is not None
    assert get_format("kivi4/kivi4") == get_format("kivi4")
    mixed = get_format("exact/kivi2")
    assert (mixed.k.id, mixed.v.id) == ("exact", "kivi2")
    assert (mixed.sink_tokens, mixed.tail_tokens) == (64, 64)


@pytest.mark.parametrize("name", ["", "kivi5", "kivi4/", "kivi4/nope", "/kivi4", "kivi4/kivi2/int8", "KIVI4"])
def test_unknown_formats_are_refused_by_name(name: str) -> None:
    with pytest.raises(FormatError, match="wanted one of exact, kivi2"):
        get_format(name)


def test_a_block_is_128_tokens() -> None:
    assert BLOCK_TOKENS == 128
