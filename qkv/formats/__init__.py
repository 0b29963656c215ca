"""The formats by name. A K side and a V side are chosen apart: "kivi4/kivi2" is 4-bit K with 2-bit V."""

from qkv.errors import FormatError
from qkv.spec import Format, SideSpec

_KIVI = "KIVI, arXiv 2402.02750, Algorithm 1"
_PER_TOKEN = "dynamic scale per token and head, as vLLM *_per_token_head"


def _sides() -> dict[str, SideSpec]:
    sides = [SideSpec("exact", "raw", (), 0, "the model's own values")]
    for bits, planes in ((2, (2,)), (3, (2, 1)), (4, (4,))):
        source = _KIVI if bits != 3 else f"{_KIVI} (3 bits: ours)"
        sides.append(SideSpec(f"kivi{bits}", "affine", planes, 32, source))
        sides += [SideSpec(f"kivi{bits}_g{group}", "affine", planes, group, source) for group in (64, 128)]
    sides += [SideSpec(name, "scaled", (8,), 0, _PER_TOKEN) for name in ("int8", "fp8_e4m3", "fp8_e5m2")]
    return {side.id: side for side in sides}


SIDES = _sides()


def _exact_tokens(side: SideSpec) -> tuple[int, int]:
    """Default (sink, tail) tokens. Measured: benchmarks/LOG.md, "exact window"."""
    if side.scheme == "raw":
        return 0, 0
    return (64, 64) if side.scheme == "affine" else (0, 64)


def get_format(name: str | Format) -> Format:
    """The format `name`, or `K/V` for two sides. Raises FormatError naming those that exist."""
    if isinstance(name, Format):
        return name
    k_name, slash, v_name = str(name).partition("/")
    v_name = v_name if slash else k_name
    for side in (k_name, v_name):
        if side not in SIDES:
            raise FormatError(f"format: got {name!r}, wanted one of {', '.join(SIDES)}, or K/V such as kivi4/kivi2")
    k, v = SIDES[k_name], SIDES[v_name]
    sink, tail = (max(pair) for pair in zip(_exact_tokens(k), _exact_tokens(v), strict=True))
    return Format(k.id if k == v else f"{k.id}/{v.id}", k, v, sink, tail)


def list_formats() -> list[Format]:
    """Every format with the same side for K and V."""
    return [get_format(name) for name in SIDES]
