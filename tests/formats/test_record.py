"""One table that every format passes: a derived bound, a fixed layout, golden bytes, and refusals that say where."""

import hashlib

import pytest
import torch

from qkv.errors import FormatError, ShapeError
from qkv.formats import get_format, list_formats, record
from qkv.spec import BLOCK_TOKENS, MODEL_DTYPES, LayerSpec, RecordLayout, SideSpec

NAMES = [*(f.id for f in list_formats()), "kivi4/kivi2", "exact/kivi2", "int8/kivi4"]
DIMS = (64, 80, 96, 128, 256)
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
TINIEST = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133, torch.float32: 2.0**-149}
FP8 = {"fp8_e4m3": (2.0**-4, 2.0**-9), "fp8_e5m2": (2.0**-3, 2.0**-16)}


def layout(name: str, dim: int, dtype: torch.dtype, heads: int = 2) -> RecordLayout:
    return RecordLayout(get_format(name), LayerSpec(heads, dim, dtype))


def blocks(layer: LayerSpec, count: int = 2) -> torch.Tensor:
    """[N, H, 128, D] with outlier channels, an outlier token, a constant channel and a zero token."""
    values = torch.randn(count, layer.kv_heads, BLOCK_TOKENS, layer.head_dim)
    values[..., 3] = values[..., 3] * 40 + 20
    values[:, :, 17] *= 60
    values[..., 9] = 1.375
    values[:, :, 30] = 0
    return values.to(layer.dtype)


def bound(prefix: str, side: SideSpec, spec: RecordLayout, records: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Largest error of each value [N, H, 128, D], from the stored metadata; test_affine and test_scaled derive it.

    Half a step; for affine also four roundings of at most `top` steps in the model dtype and a scale that may be
    subnormal; for all, multiply and add in float32.
    """
    unit, float_unit = UNIT[spec.layer.dtype], UNIT[torch.float32]
    if side.scheme == "raw":
        return torch.zeros_like(x, dtype=torch.float64)
    scale = spec.field(records, f"{prefix}_scale").double()
    if side.scheme == "scaled":
        half = scale.unsqueeze(-1) / 2
        if side.id in FP8:
            relative, subnormal = FP8[side.id]
            half = torch.maximum(x.double().abs() * relative, scale.unsqueeze(-1) * subnormal / 2)
        return half + 4 * float_unit * x.double().abs()
    top, low = 2**side.bits - 1, spec.field(records, f"{prefix}_zero").double().abs()
    limit = scale * (0.5 + 4.1 * unit * top) + top * TINIEST[spec.layer.dtype] / 2
    limit = limit + 2 * float_unit * (low + scale * (top + 1))
    if prefix == "k":  # [N, H, groups, D]: a group runs over tokens
        return limit.repeat_interleave(side.group, -2)[..., :BLOCK_TOKENS, :]
    return limit.mT.repeat_interleave(side.group, -1)[..., : spec.layer.head_dim]


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str, dim: int, dtype: torch.dtype) -> None:
    spec = layout(name, dim, dtype)
    k, v = blocks(spec.layer), blocks(spec.layer)
    before = k.clone(), v.clone()
    records = record.seal(k, v, spec)
    assert records.shape == (2, spec.record_bytes)
    for prefix, side, x, back in zip(
        "kv", (spec.format.k, spec.format.v), (k, v), record.unseal(records, spec), strict=True
    ):
        assert back.dtype == torch.float32
        off = (back.double() - x.double()).abs()
        limit = bound(prefix, side, spec, records, x)
        assert bool((off <= limit).all()), f"{prefix}: off by {(off - limit).max()} more than allowed"
    assert torch.equal(k, before[0])
    assert torch.equal(v, before[1])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_constant_or_zero_is_exact(name: str) -> None:
    spec = layout(name, 64, torch.float16)
    x = blocks(spec.layer)
    k, v = record.unseal(record.seal(x, x, spec), spec)
    assert bool((v[:, :, 30] == 0).all())
    if spec.format.k.scheme == "scaled":
        assert bool((k[:, :, 30] == 0).all())
    flat = torch.full_like(x, -2.71)
    if "scaled" not in (spec.format.k.scheme, spec.format.v.scheme):
        for back in record.unseal(record.seal(flat, flat, spec), spec):
            assert torch.equal(back, flat.float())


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_fields_are_aligned_in_order_and_fill_the_head(name: str, dim: int, dtype: torch.dtype) -> None:
    spec = layout(name, dim, dtype)
    end = 0
    for field in spec.fields.values():
        assert field.offset % 64 == 0
        assert 0 <= field.offset - end < 64, "a gap is only there to align"
        assert field.nbytes > 0
        end = field.offset + field.nbytes
    assert 0 <= spec.head_bytes - end < 64
    kinds = [name.split("_")[0] + name.split("_")[1] for name in spec.fields]
    order = ["kcodes", "kscale", "kzero", "vcodes", "vscale", "vzero"]
    assert kinds == sorted(kinds, key=order.index)


@pytest.mark.parametrize("name", NAMES)
def test_a_record_depends_on_its_own_block_only(name: str) -> None:
    spec = layout(name, 80, torch.bfloat16, heads=3)
    k, v = blocks(spec.layer, 3), blocks(spec.layer, 3)
    records = record.seal(k, v, spec)
    assert torch.equal(records, record.seal(k, v, spec))
    for i in range(3):
        assert torch.equal(records[i : i + 1], record.seal(k[i : i + 1], v[i : i + 1], spec))
    # a head is a run of bytes of its own, whatever memory it came from
    alone = layout(name, 80, torch.bfloat16, heads=1)
    heads = records.view(3, 3, spec.head_bytes)
    strided = k.transpose(1, 2).contiguous().transpose(1, 2)[:, 1:2], v[:, 1:2]
    assert torch.equal(heads[:, 1], record.seal(*strided, alone))


@pytest.mark.parametrize("name", NAMES)
def test_seal_of_what_was_unsealed_keeps_the_extremes(name: str) -> None:
    """Group minima, the zero of the code, survive any number of round trips."""
    spec = layout(name, 64, torch.float32)
    x = blocks(spec.layer)
    first = record.seal(x, x, spec)
    again = record.seal(*record.unseal(first, spec), spec)
    for field in spec.fields:
        if field.endswith("_zero"):
            assert torch.equal(spec.field(first, field), spec.field(again, field))


@pytest.mark.parametrize("name", NAMES)
def test_no_blocks(name: str) -> None:
    spec = layout(name, 64, torch.float16)
    none = torch.zeros(0, 2, BLOCK_TOKENS, 64, dtype=torch.float16)
    records = record.seal(none, none, spec)
    assert records.shape == (0, spec.record_bytes)
    assert [tuple(x.shape) for x in record.unseal(records, spec)] == [(0, 2, BLOCK_TOKENS, 64)] * 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("bad", "dtype"),
    [
        (float("nan"), torch.float16),
        (float("inf"), torch.float16),
        (-float("inf"), torch.bfloat16),
        (2.0**127, torch.bfloat16),  # its range with -2**127 does not fit float32
        (-2.0e38, torch.float32),
    ],
)
def test_inf_nan_and_huge_are_refused_with_the_place(name: str, bad: float, dtype: torch.dtype) -> None:
    spec = layout(name, 64, dtype)
    for which in "kv":
        pair = {"k": blocks(spec.layer), "v": blocks(spec.layer)}
        pair[which][1, 0, 77, 5] = bad
        pair[which][1, 1, 3, 2] = bad
        with pytest.raises(FormatError, match=rf"^{which}: got .* at block 1, head 0, token 77, channel 5, wanted"):
            record.seal(pair["k"], pair["v"], spec)


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_values_stay_finite(name: str) -> None:
    for dtype, largest in ((torch.float16, 65504.0), (torch.bfloat16, 1.68e38), (torch.float32, 1.69e38)):
        spec = layout(name, 64, dtype)
        x = torch.full((1, 2, BLOCK_TOKENS, 64), largest).to(dtype)
        x *= torch.randint(0, 2, x.shape).to(dtype) * 2 - 1
        assert all(bool(back.isfinite().all()) for back in record.unseal(record.seal(x, x, spec), spec))


@pytest.mark.parametrize("name", NAMES)
def test_wrong_shapes_and_dtypes_are_refused(name: str) -> None:
    spec = layout(name, 64, torch.float16)
    good = blocks(spec.layer)
    for bad in (good[:, :1], good[:, :, :127], good[..., :48], good[0]):
        with pytest.raises(ShapeError, match=r"^k: got shape .*wanted \[N H 128 D\] with"):
            record.seal(bad, good, spec)
    with pytest.raises(ShapeError, match=r"^v: got shape"):
        record.seal(good, good[:1], spec)
    with pytest.raises(ShapeError, match=r"^v: got dtype torch.float32, wanted torch.float16"):
        record.seal(good, good.float(), spec)
    with pytest.raises(ShapeError, match=r"^records: got shape"):
        record.unseal(torch.zeros(1, spec.record_bytes + 64, dtype=torch.uint8), spec)


@pytest.mark.parametrize("name", NAMES)
def test_head_dim_72(name: str) -> None:
    if name == "exact":
        spec = layout(name, 72, torch.bfloat16)
        x = blocks(spec.layer)
        assert torch.equal(record.unseal(record.seal(x, x, spec), spec)[0], x.float())
        return
    with pytest.raises(FormatError, match=r"head_dim 72, wanted a multiple of 16; use format exact"):
        layout(name, 72, torch.bfloat16)


# ---- golden bytes: a change here is a change of LAYOUT_VERSION, never a test to be adjusted ----

GOLDEN_FIELD_BYTES = 12
GOLDEN: dict[str, tuple[str, dict[str, str]]] = {
    "kivi2": (
        "218918ffaca296d0790dce82dfc96d224cc86a23cbdee8eb1f54f55932dda2e9",
        {
            "k_codes_0": "943a944ea54ee553e9933994",
            "k_scale": "3545eb44eb44eb44f044eb44",
            "k_zero": "d0c720c750c780c7c0c7f0c6",
            "v_codes_0": "924e39e539e49792934e4a39",
            "v_scale": "fb44fb44fb44fb44fb44fb44",
            "v_zero": "60c730c7c0c790c760c730c7",
        },
    ),
    "kivi3": (
        "f2a9a733c6de01dbed5affa336bebbd838fe37ba167229de06103a2dabfb2776",
        {
            "k_codes_0": "347479498d9dded2e3276734",
            "k_codes_1": "38e718639c738c31ce39c618",
            "k_scale": "77403740374037403b403740",
            "k_zero": "d0c720c750c780c7c0c7f0c6",
            "v_codes_0": "228877dd228d772236dd8822",
            "v_codes_1": "993366cc66cc999999333366",
            "v_scale": "454045404540454045404540",
            "v_zero": "60c730c7c0c790c760c730c7",
        },
    ),
    "kivi4": (
        "0a6821307c9318b6f161c887c959f361cad5ec496b367e0d81b4e1fcf0c356bc",
        {
            "k_codes_0": "30b841da63eb740d961ea730",
            "k_scale": "2b3cde3bde3bde3be63bde3b",
            "k_zero": "d0c720c750c780c7c0c7f0c6",
            "v_codes_0": "0cd9a67395623f0c2deac895",
            "v_scale": "f73bf73bf73bf73bf73bf73b",
            "v_zero": "60c730c7c0c790c760c730c7",
        },
    ),
    "int8": (
        "8811192272a7783ecd7c0b2e286f419ff1144148df0c1ecc505a3fd90052c48a",
        {
            "k_codes_0": "018d1aa72fbe49d860ef7a04",
            "k_scale": "e02bb02bb02be02be02bb02b",
            "v_codes_0": "ca9969385425f5c6e5b28252",
            "v_scale": "a02bd02be02bc02ba02bd02b",
        },
    ),
    "fp8_e4m3": (
        "9346d2c644db267eebcd4aafbab8d387e4f357f1a89304db309044ed2c51a790",
        {
            "k_codes_0": "fe64fb71f976f47aee7cdbfe",
            "k_scale": "77245c245c24772477245c24",
            "v_codes_0": "786beaf8f2fa7d777b734ef2",
            "v_scale": "53246e247724652453246e24",
        },
    ),
}


def golden_record(name: str) -> tuple[RecordLayout, torch.Tensor]:
    """Multiples of 1/16, exact in every dtype: no rounding of the input, no random generator of some release."""
    spec = layout(name, 64, torch.float16)
    index = torch.arange(2 * BLOCK_TOKENS * 64)
    values = ((index * 7919) % 251 - 125).half().div(16).view(1, 2, BLOCK_TOKENS, 64)
    return spec, record.seal(values, values.flip(2), spec)


@pytest.mark.parametrize("name", ["kivi2", "kivi3", "kivi4", "int8", "fp8_e4m3"])
def test_golden_bytes(name: str) -> None:
    spec, records = golden_record(name)
    raw = bytes(records[0].tolist())
    digest, fields = GOLDEN[name]
    starts = {field.name: raw[field.offset :][:GOLDEN_FIELD_BYTES].hex() for field in spec.fields.values()}
    assert starts == fields
    assert hashlib.sha256(raw).hexdigest() == digest
