"""`qkv bench seal`: encoding blocks into records and back, next to copying the same exact bytes.

A call seals, unseals or copies the same number of blocks. With a model, also what sealing a whole prompt adds to the
model's own prefill of it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from qkv import ops
from qkv.bench import checks
from qkv.bench.contest import served_by
from qkv.bench.data import Geometry, geometry_of, keys_values, text_ids
from qkv.bench.decode import Say
from qkv.bench.reading import Reader
from qkv.bench.rows import Row, Shape
from qkv.bench.timing import Stats, interleave
from qkv.formats import get_format
from qkv.manager import KVManager
from qkv.spec import BLOCK_TOKENS, LayerSpec, RecordLayout

SUITE = "seal"


@dataclass(frozen=True)
class SealOptions:
    """`blocks` blocks of 128 tokens a call; the rest as in DecodeOptions."""

    geometry: Geometry
    blocks: int = 16
    formats: tuple[str, ...] = ("kivi2", "kivi3", "kivi4", "int8", "fp8_e4m3")
    threads: int | None = None
    rounds: int = 12
    evict: int | None = None
    case: str = "random"

    def check(self) -> None:
        """Raises InputError, FormatError."""
        checks.geometry(self.geometry, self.formats)
        checks.at_least("blocks", self.blocks, 1)
        checks.at_least("rounds", self.rounds, 1)
        checks.thread_count(self.threads)
        checks.at_least("evict", self.evict or 0, 0)


def run(options: SealOptions, say: Say = lambda text: None) -> list[Row]:
    """Throughput of seal, unseal and copy, in exact bytes a second. Raises InputError, FormatError."""
    options.check()
    with checks.threads(options.threads):
        g, count = options.geometry, options.blocks
        k, v = keys_values(g, count * BLOCK_TOKENS)
        k, v = (torch.unflatten(x, 1, (count, BLOCK_TOKENS)).transpose(0, 1) for x in (k, v))
        copies = [torch.empty_like(k), torch.empty_like(v)]
        calls: dict[str, Any] = {"copy exact": lambda: [copies[0].copy_(k), copies[1].copy_(v)]}
        sizes = {}
        for name in options.formats:
            layout = RecordLayout(get_format(name), LayerSpec(g.kv_heads, g.head_dim, g.dtype))
            records = torch.zeros(count, layout.record_bytes, dtype=torch.uint8)
            ids = list(range(count))
            ops.seal(k, v, layout, records, ids)
            calls[f"seal {name}"] = lambda a=(layout, records, ids): ops.seal(k, v, *a)
            calls[f"unseal {name}"] = lambda a=(records, layout): ops.unseal(*a)
            sizes[name] = records.nbytes
        say(f"{len(options.formats)} formats, {count} blocks")
        times = interleave(calls, options.rounds, before=Reader().evictor(options.evict))
        return _rows(options, {name: Stats.of(taken) for name, taken in times.items()}, k.nbytes + v.nbytes, sizes)


def _rows(options: SealOptions, stats: dict[str, Stats], exact: int, sizes: dict[str, int]) -> list[Row]:
    g = options.geometry
    shape = Shape(1, g.kv_heads, g.group, g.head_dim, options.blocks * BLOCK_TOKENS, 0)
    copied = stats["copy exact"].median
    rows = []
    for name, own in stats.items():
        op, _, format = name.partition(" ")
        rate = own.rate(exact / 1e9)
        moved = exact + sizes.get(format, exact)  # read and written
        impl, note = (op, "") if op == "copy" else (f"qkv {op}", served_by(op))
        rows.append(
            Row(
                SUITE, options.case, format, impl, "throughput", rate.median, "GB/s", shape, rate.p20, rate.p80, own.n,
                "copy exact", copied / own.median, moved, note=note or "exact bytes a second",
            )
        )  # fmt: skip
    return rows


def model_share(
    model: Any, tokenizer: Any, name: str, tokens: int, formats: tuple[str, ...], rounds: int = 3
) -> list[Row]:
    """Time to append a prompt's K and V to every layer of a manager, as a share of the model's own prefill of it.

    `qkv append` is all that the manager does with them (checks, copies, sealing), `qkv seal` the op alone.
    Raises InputError, FormatError, UnsupportedModel.
    """
    from transformers import DynamicCache

    from qkv.backends.transformers import cache_argument

    g, layers = geometry_of(model), model.config.get_text_config(decoder=True).num_hidden_layers
    checks.geometry(g, formats)
    checks.at_least("tokens", tokens, BLOCK_TOKENS)
    ids, argument = text_ids(tokenizer, tokens), cache_argument(model)
    k, v = keys_values(g, tokens)

    def prefill() -> None:
        with torch.inference_mode():
            model(input_ids=ids, logits_to_keep=1, **{argument: DynamicCache(config=model.config)})

    def append(format: str) -> None:
        manager = KVManager(layers, format)
        sequence = manager.open()
        for layer in range(layers):
            manager.append(sequence, layer, k, v)

    count = tokens // BLOCK_TOKENS
    blocks = [torch.unflatten(x[:, : count * BLOCK_TOKENS], 1, (count, BLOCK_TOKENS)).transpose(0, 1) for x in (k, v)]

    def seal(layout: RecordLayout, records: torch.Tensor) -> None:
        for _ in range(layers):
            ops.seal(blocks[0], blocks[1], layout, records, list(range(count)))

    calls: dict[str, Any] = {"prefill exact": prefill}
    for format in formats:
        layout = RecordLayout(get_format(format), LayerSpec(g.kv_heads, g.head_dim, g.dtype))
        records = torch.zeros(count, layout.record_bytes, dtype=torch.uint8)
        calls |= {f"append {format}": partial(append, format), f"seal {format}": partial(seal, layout, records)}
    stats = {key: Stats.of(taken) for key, taken in interleave(calls, rounds, warmup=1).items()}
    own, shape = stats.pop("prefill exact"), Shape(1, g.kv_heads, g.group, g.head_dim, tokens, 0)
    rows = [Row(SUITE, name, "exact", "DynamicCache", "prefill", own.median, "s", shape, own.p20, own.p80, own.n)]
    for call, taken in stats.items():
        (op, _, format), share = call.partition(" "), taken.scaled(1 / own.median)
        rows.append(
            Row(
                SUITE, name, format, f"qkv {op}", "share_of_prefill", share.median, "share", shape, share.p20,
                share.p80, share.n, "prefill exact", own.median / taken.median, note=served_by("seal"),
            )
        )  # fmt: skip
    return rows
