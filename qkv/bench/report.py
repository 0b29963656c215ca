"""Rows as tables for a person (needs rich)."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from qkv.bench.rows import Row


def show(console: Console, rows: list[Row]) -> None:
    """Print what the rows of one suite say, a table for each kind of measurement."""
    suite = rows[0].suite
    if suite in ("decode", "prefill"):
        _times(console, [row for row in rows if row.metric == "time"], suite)
        _lines(console, rows)
        _errors(console, [row for row in rows if row.metric == "error"])
        _divergence(console, rows)
        _workspace(console, [row for row in rows if row.metric == "workspace"])
    elif suite == "seal":
        _seal(console, rows)
    elif suite == "pool":
        _pool(console, rows)
    elif suite == "offload":
        _offload(console, rows)
    else:
        _model(console, rows)
    console.print(f"threads: {rows[0].threads}; p20 - p80 in brackets; x: times better than the baseline")


def _of(value: float | None, digits: int = 3) -> str:
    """Three significant digits, without exponents where they fit."""
    if value is None or value != value:
        return "-"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.{digits}g}"


def _x(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} x"


def _spread(row: Row) -> str:
    return f"{_of(row.value)} ({_of(row.p20)} - {_of(row.p80)})"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _times(console: Console, rows: list[Row], suite: str) -> None:
    found: dict[tuple[int, str, str], dict[str, Row]] = {}
    for row in rows:
        baseline = "torch" if (row.baseline or "").startswith("sdpa") else str(row.baseline)
        found.setdefault((row.shape.context, row.format, row.impl), {})[baseline] = row
    s = rows[0].shape
    title = f"{suite}: {rows[0].case}, {s.kv_heads} KV heads x {s.head_dim}, group {s.group}, {s.q_len} queries"
    reads = ["against reading 16-bit K, V", "against reading its bytes"] if suite == "decode" else []
    columns = ["tokens", "format", "by", "us a call", "ns a token and KV head", "against torch's best", *reads]
    table = Table(*columns, "of read bandwidth", "error", title=title)
    for (context, format, impl), by in found.items():
        row = by["torch"]
        ratios = [by[name].ratio if name in by else None for name in ("read exact", f"read {format}")]
        per_token = _of(row.value * 1e3 / context / s.kv_heads)
        name = f"{impl}: {row.note}" if row.note else impl
        cells = [f"{context:,}", format, name, _spread(row), per_token, _x(row.ratio)]
        cells += [_x(ratio) for ratio in ratios] if reads else []
        table.add_row(*cells, _share(row.peak_fraction), "-" if row.error is None else f"{row.error:.1e}")
    console.print(table)


def _lines(console: Console, rows: Iterable[Row]) -> None:
    metrics = ("slope", "intercept", "fit_residual", "break_even")
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.metric in metrics:
            found.setdefault(row.format, {})[row.metric] = row
    if not found:
        return
    table = Table(
        "format", "slope, ns a token and KV head", "intercept, us a call", "fit residual", "faster than exact from",
        title="time = intercept + slope x tokens",
    )  # fmt: skip
    for format, by in found.items():
        at = by.get("break_even")
        from_ = "-" if at is None else "never" if at.note else f"{at.value:,.0f} tokens"
        slope, intercept = by["slope"], by["intercept"]
        cells = (f"{_of(slope.value)} ({_x(slope.ratio)})", _of(intercept.value), f"{by['fit_residual'].value:.1%}")
        table.add_row(format, *cells, from_)
    console.print(table)


def _errors(console: Console, rows: list[Row]) -> None:
    if not rows:
        return
    table = Table("K and V", "format", "by", "relative L2 against float64", "over")
    for row in rows:
        table.add_row(row.case, row.format, row.impl, f"{row.value:.1e}", row.note)
    console.print(table)


def _divergence(console: Console, rows: list[Row]) -> None:
    found: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    for row in rows:
        if row.metric in ("kl", "kl_added"):
            found.setdefault((row.case, row.format), {})[row.metric, row.impl] = row.value
    if not found:
        return
    table = Table("text", "format", "KL(exact || format), nats", "precise", "KL(precise || default), share of that")
    for (case, format), by in found.items():
        kl, own = by["kl", "qkv"], by["kl", "qkv precise"]
        table.add_row(case, format, f"{kl:.5f}", f"{own:.5f}", f"{by['kl_added', 'qkv']:.1e}")
    console.print(table)


def _workspace(console: Console, rows: list[Row]) -> None:
    told = {f"{row.format} {row.shape.context:,}": f"{row.value / 1024:,.0f} KiB" for row in rows}
    if told:
        console.print("workspace: " + ", ".join(f"{name} {size}" for name, size in told.items()))


def _seal(console: Console, rows: list[Row]) -> None:
    table = Table("format", "op", "by", "exact bytes, GB/s", "against copying them", title="seal")
    for row in rows:
        if row.metric == "throughput":
            by = row.note if row.impl.startswith("qkv") else "torch"
            table.add_row(row.format, row.impl, by, _spread(row), _x(row.ratio))
    console.print(table)
    for row in rows:
        if row.metric == "prefill":
            console.print(f"{row.case}, {row.shape.context:,} tokens: prefill {row.value:.2f} s with {row.impl}")
        if row.metric == "share_of_prefill":
            console.print(f"  {row.impl} of its K and V as {row.format}: {row.value:.1%} of that")


def _pool(console: Console, rows: list[Row]) -> None:
    table = Table("step", "mean (p20 - p80)", "unit", "note", title=f"pool: {rows[0].case}")
    for row in rows:
        note = f"{_x(row.ratio)} of {row.baseline}" if row.ratio is not None else row.note
        table.add_row(row.metric, _spread(row), f"{row.unit} a block" if row.unit == "us" else row.unit, note)
    console.print(table)


def _offload(console: Console, rows: list[Row]) -> None:
    for case in dict.fromkeys(row.case for row in rows):
        table = Table(
            "tokens", "by", "format", "what", "median (p20 - p80)", "against", "note", title=f"offload: {case}"
        )
        for row in rows:
            if row.case == case:
                value = f"{_spread(row)} {row.unit}"
                against = f"{_x(row.ratio)} {row.baseline}" if row.ratio is not None else ""
                table.add_row(f"{row.shape.context:,}", row.impl, row.format, row.metric, value, against, row.note)
        console.print(table)


def _model(console: Console, rows: list[Row]) -> None:
    found: dict[tuple[int, str, str], dict[tuple[str, str | None], Row]] = {}
    for row in rows:
        found.setdefault((row.shape.context, row.impl, row.format), {})[row.metric, row.baseline] = row
    columns = ("tokens", "cache", "format", "prefill, tokens/s", "decode, tokens/s", "decode against DynamicCache")
    table = Table(*columns, "against StaticCache", "prefill against DynamicCache", "KV bytes", title=rows[0].case)
    notes: dict[str, str] = {}
    for (context, impl, format), by in found.items():
        decode, prefill = by.get(("decode", "DynamicCache")), by.get(("prefill", "DynamicCache"))
        if decode is None or prefill is None:
            notes.setdefault(next(iter(by.values())).note, f"{impl} {format}")
            table.add_row(f"{context:,}", impl, format, "not run", "not run")
            continue
        static = by["decode", "StaticCache"]
        held = "-" if decode.bytes is None else f"{decode.bytes:,}"
        ratios = (_x(decode.ratio), _x(static.ratio), _x(prefill.ratio))
        table.add_row(f"{context:,}", impl, format, _of(prefill.value), _spread(decode), *ratios, held)
    console.print(table)
    for note, name in notes.items():
        console.print(f"not run: {name}: {note}")
