"""`qkv bench offload`, second part: decoding over more records than may be resident, the rest streamed from disk.

Three caches with the same tokens decode the same next ones in turn: all resident; a share resident with layers read
ahead; the same without reading ahead. Next to them a plain `preadv` of what is streamed. Pages are dropped before each.
"""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qkv.backends.identity import namespace_of
from qkv.backends.transformers import QKVCache, cache_argument
from qkv.bench.data import geometry_of, text_ids
from qkv.bench.offload import OffloadOptions
from qkv.bench.rows import Row, Shape
from qkv.bench.timing import Stats, interleave
from qkv.bench.ttft import SUITE, Say
from qkv.offload.disk import DiskStore
from qkv.offload.tier import Device, Disk
from qkv.offload.tiered import TieredRecords

SAME_TOKENS = 32


class Decoding:
    """A cache that holds the prompt, and its next token."""

    def __init__(self, model: Any, cache: QKVCache, token: torch.Tensor) -> None:
        self.model, self.cache, self.token = model, cache, token
        self.made: list[int] = []
        self._argument = cache_argument(model)

    def step(self) -> None:
        with torch.inference_mode():
            out = self.model(input_ids=self.token, use_cache=True, logits_to_keep=1, **{self._argument: self.cache})
        self.token = out.logits[:, -1:].argmax(-1)
        self.made.append(int(self.token))

    @property
    def records(self) -> TieredRecords | None:
        held = self.cache.manager._layers.records
        return held if isinstance(held, TieredRecords) else None


def run(model: Any, tokenizer: Any, options: OffloadOptions, length: int, folder: str, say: Say) -> list[Row]:
    """Rows of one length, in the first of the formats. folder: on the disk to measure."""
    name, format, rounds = options.name, options.formats[0], options.steps
    ids = text_ids(tokenizer, length + 1)
    with DiskStore(Path(folder) / f"decode-{length}") as store:
        say(f"  {length:,} tokens: computing them once")
        plain = QKVCache(model.config, format)
        plain.attach(store, namespace_of(model, plain.manager), model.device)
        prompt = Decoding(model, plain, ids[:, :length])
        prompt.step()
        plain.persist(ids[:, :length])
        limit = int(plain.memory().records * options.share)
        runs = {"resident": Decoding(model, plain, ids[:, length:])}
        for impl, slabs in (("streamed, read ahead", 3), ("streamed, one layer at a time", 1)):
            cache = QKVCache(
                model.config, format, tiers=[Device(limit), Disk(folder, 1 << 40)], dtype=model.dtype,
                device=model.device,
            )  # fmt: skip
            run_ = Decoding(model, cache, ids[:, length:])
            assert run_.records is not None
            run_.records.most_slabs = slabs
            cache.attach(store, namespace_of(model, cache.manager), model.device)
            assert cache.restore(ids[:, :length], left=0) == length
            runs[impl] = run_
    streamed = runs["streamed, read ahead"].records
    assert streamed is not None
    held = runs["streamed, read ahead"].cache.memory()
    say(f"  {length:,} tokens: {held.records:,} bytes resident, {held.disk:,} on the disk; decoding")
    with tempfile.TemporaryFile(dir=folder) as file:
        raw = _raw(file.fileno(), held.disk, len(streamed.streamed))
        contestants: dict[str, Callable[[], object]] = {impl: each.step for impl, each in runs.items()}
        contestants["raw preadv"] = raw

        def cold(name: str) -> None:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for each in runs.values():
                if each.records is not None:
                    each.records.drop_cached()

        times = interleave(contestants, rounds, warmup=2, before=cold)
    while len(runs["resident"].made) < SAME_TOKENS:
        for each in runs.values():
            each.step()
    return _rows(model, name, format, length, times, runs, held.disk)


def _raw(fd: int, size: int, layers: int) -> Callable[[], None]:
    """Plain reads of as many bytes as one step streams, a layer each, into touched memory."""
    each = size // layers
    buffer = memoryview(bytearray(os.urandom(each)))
    for layer in range(layers):
        os.pwrite(fd, buffer, layer * each)
    os.fsync(fd)

    def read() -> None:
        for layer in range(layers):
            done = 0
            while done < each:
                done += os.preadv(fd, [buffer[done:]], layer * each + done)

    return read


def _rows(
    model: Any, name: str, format: str, length: int, times: dict[str, list[float]], runs: dict[str, Decoding], size: int
) -> list[Row]:
    shape = geometry_of(model)
    told = Shape(1, shape.kv_heads, shape.group, shape.head_dim, length, 1)
    stats = {impl: Stats.of(samples) for impl, samples in times.items()}
    bound = max(stats["resident"].median, stats["raw preadv"].median)
    rows = []
    for impl, each in stats.items():
        ms, spread = each.scaled(1e3), Stats.of([seconds / bound for seconds in times[impl]])
        same = impl in runs and runs[impl].made == runs["resident"].made
        note = f"{len(runs[impl].made)} greedy tokens identical with resident: {same}" if impl in runs else ""
        made = partial(Row, SUITE, name, format, impl, shape=told, n=each.n)
        rows.append(
            made(
                metric="decode step",
                value=ms.median,
                unit="ms",
                p20=ms.p20,
                p80=ms.p80,
                baseline="resident",
                ratio=stats["resident"].median / each.median,
                bytes=size if impl != "resident" else None,
                note=note,
            )
        )
        if impl.startswith("streamed"):
            note = "step time over the larger of resident compute and raw reads, medians"
            over = "T/max(I/O, compute)"
            rows.append(made(metric=over, value=spread.median, unit="x", p20=spread.p20, p80=spread.p80, note=note))
    return rows
