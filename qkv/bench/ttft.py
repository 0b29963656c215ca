"""`qkv bench offload`, first part: time to first token behind a stored prefix, with a cold page cache.

Contestants read the same prompt and question, in turn: computed by transformers and by qkv; taken from the store with
layers read ahead, by a manager whose memory was used before as an engine's is, and by a new one, which gets memory from
the system page by page; all layers first, then computed. Next to them a plain `preadv` of the same extents into memory
used before, from which T*, the shortest time that loading and computing can take together (qkv/offload/prefetch.py
`ideal`), is worked out; and the store's reader, which checks what it reads, into the same memory.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from qkv.backends.identity import namespace_of
from qkv.backends.transformers import QKVCache, cache_argument
from qkv.bench.data import geometry_of, text_ids
from qkv.bench.offload import OffloadOptions
from qkv.bench.rows import Row, Shape
from qkv.bench.timing import Stats, interleave
from qkv.offload.disk import DiskStore
from qkv.offload.io import FileIO
from qkv.offload.prefetch import ideal
from qkv.offload.segment import Segment

SUITE = "offload"
AHEAD, NEW, FIRST = WAYS = "read ahead", "read ahead, new cache", "all layers first"
Say = Callable[[str], None]


class Counting(FileIO):
    """Counts what is read."""

    read = 0

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        done = super().preadv(fd, buffers, offset)
        self.read += done
        return done


def drop_cached(folder: str) -> None:
    """Have the kernel forget the files' pages, so that the next read is the disk's."""
    for path in Path(folder).rglob("*.h5"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


class Prefix:
    """One format's stored prefix of a model, and the ways to have the question's first token behind it."""

    def __init__(self, model: Any, store: DiskStore, format: str, ids: torch.Tensor, question: torch.Tensor) -> None:
        self.model, self.store, self.format, self.ids, self.question = model, store, format, ids, question
        self._argument = cache_argument(model)
        self.resident = QKVCache(model.config, format)
        self.namespace = namespace_of(model, self.resident.manager)
        self.resident.attach(store, self.namespace, model.device)
        self.forward(ids, self.resident)
        name = self.resident.persist(ids)
        entry = next(entry for entry in store.entries() if entry.name == name)
        with store.segment(entry) as segment:
            self.path, self.head = segment.path, segment.head
        self.engine = self._attached()
        self.token = int(self.from_memory().argmax())

    def forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        with torch.inference_mode():
            out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self._argument: cache})
        made: torch.Tensor = out.logits[0, -1]
        return made

    def from_memory(self) -> torch.Tensor:
        return self.forward(self.question, self.resident.fork())

    def _attached(self) -> QKVCache:
        cache = QKVCache(self.model.config, self.format)
        cache.attach(self.store, self.namespace, self.model.device)
        return cache

    def forget(self) -> None:
        """The engine's memory is free again: nothing of the prefix is found in it."""
        self.engine.reset()
        pool = self.engine.manager.pool
        pool.evict(pool.stats().evictable)

    def from_store(self, how: str) -> torch.Tensor:
        """Look up, load, compute the question. how: one of WAYS. `forget` first."""
        cache, wait = self._attached() if how == NEW else self.engine, how == FIRST
        tokens = cache.restore(self.ids, left=0, wait=False)
        assert tokens == self.ids.shape[1], "the store has lost the prefix"
        sequence = cache.rows.sequences[0]
        if wait:
            sequence.arrive()
        logits = self.forward(self.question, cache)
        assert int(logits.argmax()) == self.token
        return logits

    def computed(self) -> torch.Tensor:
        """Nothing stored: the whole prompt."""
        cache = QKVCache(self.model.config, self.format)
        self.forward(self.ids, cache)
        return self.forward(self.question, cache)

    @property
    def layer_bytes(self) -> int:
        return sum(self.head.header.parts(0))

    def raw(self, buffer: memoryview) -> list[float]:
        """Seconds of one `preadv` a layer into touched memory; nothing is checked."""
        header, took = self.head.header, []
        fd = os.open(self.path, os.O_RDONLY)
        try:
            for layer in range(header.layers):
                began, size, done = time.perf_counter(), sum(header.parts(layer)), 0
                while done < size:
                    at = self.head.data_offset + layer * header.extent + done
                    done += os.preadv(fd, [buffer[done:size]], at)
                took.append(time.perf_counter() - began)
        finally:
            os.close(fd)
        return took

    def read(self, buffer: memoryview) -> None:
        """The same bytes by the store's own reader, every checksum looked at."""
        with Segment.open(self.path) as segment:
            for layer in range(segment.header.layers):
                _, *blocks, sink, tail = segment.header.parts(layer)
                records, sink = sum(blocks), sum(blocks) + sink
                parts = buffer[:records], buffer[records:sink], buffer[sink : sink + tail]
                segment.read_layer(layer, parts[0], sink=parts[1], tail=parts[2])

    def computes(self) -> tuple[list[float], float]:
        """Seconds of each layer, and of all the rest, for the question over what is in memory."""
        layers = self.model.get_decoder().layers
        begins, ends = [0.0] * len(layers), [0.0] * len(layers)
        hooks = []
        for number, layer in enumerate(layers):
            hooks.append(
                layer.register_forward_pre_hook(lambda *_, n=number: begins.__setitem__(n, time.perf_counter()))
            )
            hooks.append(layer.register_forward_hook(lambda *_, n=number: ends.__setitem__(n, time.perf_counter())))
        began = time.perf_counter()
        try:
            self.from_memory()
        finally:
            total = time.perf_counter() - began
            for hook in hooks:
                hook.remove()
        each = [end - begin for begin, end in zip(begins, ends, strict=True)]
        return each, total - sum(each)


def run(model: Any, tokenizer: Any, options: OffloadOptions, length: int, folder: str, say: Say) -> list[Row]:
    """Rows of one length. folder: an empty one, on the disk to measure."""
    name, question, formats, rounds = options.name, options.question, options.formats, options.rounds
    io = Counting()
    ids = text_ids(tokenizer, length + question)
    with DiskStore(Path(folder) / f"store-{length}", io=io) as store:
        say(f"  {length:,} tokens: computing and storing {', '.join(formats)}")
        made = {format: Prefix(model, store, format, ids[:, :length], ids[:, length:]) for format in formats}
        contestants, raws, computes = _contestants(model, made, ids)
        say(f"  {length:,} tokens: {', '.join(contestants)}")

        def before(name: str) -> None:
            drop_cached(store.path)
            for prefix in made.values():
                prefix.forget()

        times = interleave(contestants, rounds, warmup=1, before=before)
        rows = _rows(name, length, question, model, made, times)
        for format, prefix in made.items():
            rows += _pipeline(rows[0], prefix, times, raws[format], computes[format])
        io.read = 0
        main = made[formats[0]]
        main.forget()
        main.from_store(FIRST)
        useful = main.layer_bytes * main.head.header.layers
        note = f"{io.read:,} bytes read, head included, of {useful:,} used"
        rows.append(
            _row(rows[0], formats[0], "qkv", "read amplification", Stats.of([io.read / useful]), "x", note=note)
        )
    return rows


def _contestants(
    model: Any, made: dict[str, Prefix], ids: torch.Tensor
) -> tuple[dict[str, Callable[[], object]], dict[str, list[list[float]]], dict[str, list[tuple[list[float], float]]]]:
    from transformers import DynamicCache

    first = next(iter(made.values()))
    buffer = memoryview(bytearray(max(prefix.head.header.extent for prefix in made.values())))
    contestants: dict[str, Callable[[], object]] = {
        "recompute, DynamicCache": lambda: _plain(model, ids, DynamicCache(config=model.config)),
        f"recompute, {first.format}": first.computed,
    }
    raws: dict[str, list[list[float]]] = {format: [] for format in made}
    computes: dict[str, list[tuple[list[float], float]]] = {format: [] for format in made}
    for format, prefix in made.items():
        for how in WAYS:
            contestants[f"store, {how}, {format}"] = partial(prefix.from_store, how)
        contestants[f"raw preadv, {format}"] = lambda f=format, p=prefix: raws[f].append(p.raw(buffer))  # type: ignore[misc]
        contestants[f"reader, {format}"] = partial(prefix.read, buffer)
        contestants[f"in memory, {format}"] = lambda f=format, p=prefix: computes[f].append(p.computes())  # type: ignore[misc]
    return contestants, raws, computes


def _plain(model: Any, ids: torch.Tensor, cache: Any) -> None:
    """transformers as it comes: torch's SDPA, one pass over prompt and question."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_argument(model): cache})
    finally:
        model.set_attn_implementation(implementation)


def _rows(
    name: str, length: int, question: int, model: Any, made: dict[str, Prefix], times: dict[str, list[float]]
) -> list[Row]:
    shape = geometry_of(model)
    told = Shape(1, shape.kv_heads, shape.group, shape.head_dim, length, question)
    recompute = min((key for key in times if key.startswith("recompute")), key=lambda key: median(times[key]))
    rows = []
    for key, samples in times.items():
        impl, _, format = key.rpartition(", ")
        if format not in made:
            impl, format = key, "exact"
        stats, prefix = Stats.of(samples), made[format]
        size = None if impl.startswith(("recompute", "in memory")) else prefix.layer_bytes * prefix.head.header.layers
        note = f"{size / stats.median / 1e9:.2f} GB/s" if size and impl in ("raw preadv", "reader") else ""
        rows.append(Row(
            SUITE, name, format, impl, "ttft", stats.median, "s", told, stats.p20, stats.p80, stats.n, recompute,
            median(times[recompute]) / stats.median, size, note=note,
        ))  # fmt: skip
    return rows


def _pipeline(
    like: Row, prefix: Prefix, times: dict[str, list[float]], raws: list[list[float]],
    computes: list[tuple[list[float], float]],
) -> list[Row]:  # fmt: skip
    """T/T*: T* from plain reads and resident computation of the same rounds. And the reader's rate against those."""
    kept = len(times[f"raw preadv, {prefix.format}"])
    shortest = [
        ideal(loads, layers) + rest for loads, (layers, rest) in zip(raws[-kept:], computes[-kept:], strict=True)
    ]
    over = {
        how: [seconds / least for seconds, least in zip(times[f"store, {how}, {prefix.format}"], shortest, strict=True)]
        for how in WAYS
    }
    loads = [median(each) for each in zip(*raws[-kept:], strict=True)]
    note = (
        f"T* {median(shortest) * 1e3:.1f} ms: raw reads {sum(loads) * 1e3:.1f} ms, layers "
        f"{median(sum(layers) for layers, _ in computes[-kept:]) * 1e3:.1f} ms, fork, embedding and head "
        f"{median(rest for _, rest in computes[-kept:]) * 1e3:.1f} ms; round by round"
    )
    raw, read = (times[f"{way}, {prefix.format}"] for way in ("raw preadv", "reader"))
    rate = Stats.of([plain / checked for plain, checked in zip(raw, read, strict=True)])
    return [
        *(
            _row(like, prefix.format, f"store, {how}", "T/T*", Stats.of(taken), "x", note=note)
            for how, taken in over.items()
        ),
        _row(
            like, prefix.format, "reader", "rate of raw preadv", rate, "share",
            note="opened, read and checked, over plain preadv of the same bytes into the same memory; round by round",
        ),
    ]  # fmt: skip


def _row(like: Row, format: str, impl: str, metric: str, stats: Stats, unit: str, *, note: str) -> Row:
    spread = (stats.p20, stats.p80, stats.n)
    return Row(SUITE, like.case, format, impl, metric, stats.median, unit, like.shape, *spread, note=note)
