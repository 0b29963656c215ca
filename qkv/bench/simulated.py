"""`qkv bench offload`, third part: what this machine cannot hold. SIMULATED: device and model are numbers and sleeps.

The code that is driven is the real one (qkv/offload/prefetch.py `Prefetch`, qkv/offload/ring.py `Ring`): its threads,
its order, its depth. Bytes and layers are not there: reading and computing wait as long as they would take.
"""

import random
import time
from dataclasses import dataclass
from functools import partial

import torch

from qkv.bench.rows import Row, Shape
from qkv.bench.timing import Stats
from qkv.bench.ttft import SUITE
from qkv.formats import get_format
from qkv.offload.prefetch import Prefetch, ideal
from qkv.offload.ring import Ring, Slab
from qkv.spec import LayerSpec, RecordLayout


@dataclass(frozen=True)
class Model:
    """Shapes that decide times. parameters: of all layers; flops: a second, that a prompt reaches."""

    name: str
    layers: int
    kv_heads: int
    group: int
    head_dim: int
    parameters: float
    flops: float
    memory_rate: float  # bytes a second: a decode step reads weights and records once

    def record_bytes(self, format: str, tokens: int) -> int:
        """Of one layer."""
        chosen = get_format(format)
        if format == "exact":
            return tokens * 2 * self.kv_heads * self.head_dim * 2
        layout = RecordLayout(chosen, LayerSpec(self.kv_heads, self.head_dim, torch.bfloat16))
        return tokens // 128 * layout.record_bytes


LLAMA_70B = Model("70B-class (80 x 8 x 128)", 80, 8, 8, 128, 70e9, 4e14, 3e12)
DEVICES = {"NVMe 7 GB/s": 7e9, "host over PCIe 4, 25 GB/s": 25e9, "host over PCIe 5, 50 GB/s": 50e9}
JITTER = 0.3  # a read takes up to so much longer


def _until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 2e-4:
        time.sleep(left - 1e-4)
    while time.perf_counter() < moment:
        pass


def _wait(seconds: list[float], layer: int, slab: memoryview) -> None:
    _until(time.perf_counter() + seconds[layer])


def run(tokens: int = 131072, question: int = 512, rounds: int = 3, model: Model = LLAMA_70B) -> list[Row]:
    """Rows for each device: re-prefill of a stored prefix, and decoding with a quarter of the layers resident."""
    rows = []
    for device, rate in DEVICES.items():
        for format in ("kivi2", "exact"):
            loads = model.record_bytes(format, tokens) / rate
            rows += _prefix(model, device, format, tokens, question, rounds, loads)
        rows += _decode(model, device, tokens, rounds, model.record_bytes("kivi2", tokens) / rate)
    return rows


def _prefix(model: Model, device: str, format: str, tokens: int, question: int, rounds: int, load: float) -> list[Row]:
    compute = 2 * model.parameters * question / model.flops / model.layers
    attention = 4 * question * tokens * model.kv_heads * model.group * model.head_dim / model.flops
    rng, over, taken = random.Random(0), [], []
    for _ in range(rounds):
        loads = [load * rng.uniform(1, 1 + JITTER) for _ in range(model.layers)]
        computes = [(compute + attention) * rng.uniform(1, 1 + JITTER) for _ in range(model.layers)]
        began = time.perf_counter()
        prefetch = Prefetch(partial(_wait, loads), model.layers, 64, seconds=60)
        for layer in range(model.layers):
            slab = prefetch.take(layer)
            prefetch.done(slab)  # the rows are copied to the pool, then the slab is free
            _until(time.perf_counter() + computes[layer])
        taken.append(time.perf_counter() - began)
        over.append(taken[-1] / ideal(loads, computes))
    shape = Shape(1, model.kv_heads, model.group, model.head_dim, tokens, question)
    note = f"SIMULATED {device}: a layer's load {load * 1e3:.2f} ms, compute {(compute + attention) * 1e3:.2f} ms"
    rows = []
    for metric, unit, stats in (("ttft", "s", Stats.of(taken)), ("T/T*", "x", Stats.of(over))):
        impl, spread = f"simulated, read ahead, {device}", (stats.p20, stats.p80, stats.n)
        rows.append(Row(SUITE, model.name, format, impl, metric, stats.median, unit, shape, *spread, note=note))
    return rows


def _decode(model: Model, device: str, tokens: int, steps: int, load: float) -> list[Row]:
    """A quarter of the layers resident. A step's compute: weights and records read once from device memory."""
    size = model.record_bytes("kivi2", tokens)
    compute = (2 * model.parameters / model.layers + size) / model.memory_rate
    streamed = [layer for layer in range(model.layers) if layer % 4]
    rng = random.Random(1)
    ring = Ring(
        lambda layer, slab: _until(time.perf_counter() + load * rng.uniform(1, 1 + JITTER)), streamed,
        [Slab(64, torch.device("cpu")) for _ in range(3)], 60,
    )  # fmt: skip
    samples = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        for layer in range(model.layers):
            if layer % 4:
                ring.take(layer)
            _until(time.perf_counter() + compute)
        samples.append(time.perf_counter() - began)
    ring.stop()
    bound = max(load * (1 + JITTER / 2) * len(streamed), compute * model.layers)
    stats = Stats.of([seconds / bound for seconds in samples[1:]])
    shape = Shape(1, model.kv_heads, model.group, model.head_dim, tokens, 1)
    note = (
        f"SIMULATED {device}: I/O {load * (1 + JITTER / 2) * len(streamed) * 1e3:.0f} ms, "
        f"compute {compute * model.layers * 1e3:.0f} ms a step; a quarter of the layers resident"
    )
    spread = (stats.p20, stats.p80, stats.n)
    impl = f"simulated, streamed, {device}"
    metric = "T/max(I/O, compute)"
    return [Row(SUITE, model.name, "kivi2", impl, metric, stats.median, "x", shape, *spread, note=note)]
