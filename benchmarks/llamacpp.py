"""Cost of attention to a stored context, a token and KV head: qkv against llama.cpp in its best setting.

    pip install --no-deps --target .bench-llama llama-cpp-python diskcache     # builds from source, minutes
    PYTHONPATH=.bench-llama python benchmarks/llamacpp.py --threads 1 > benchmarks/results/llamacpp.jsonl

llama.cpp has no call for attention alone, so a whole model of random weights with few layers and a tiny width decodes
one token at several context lengths, and what is compared is the slope of its time over the length: weights, norms and
the loop around them do not grow with the context and stay in the intercept. qkv's slope is that of `KVManager.attend`
over as many layers. Same shapes, same thread count, one process, in turn, caches filled with other bytes before each
sample. llama.cpp gets every setting of K and V it accepts here, with and without flash attention, and the lowest slope
counts. Its slope also holds building the mask; qkv's holds nothing else that grows. Filling its cache is not timed.
"""

import argparse
import ctypes
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as ll
import numpy as np
import torch

from qkv.bench import checks, contest, rows
from qkv.bench.baselines import Problem
from qkv.bench.data import Geometry, keys_values, queries
from qkv.bench.reading import Reader
from qkv.bench.timing import Line, Stats, fit_line, interleave

VOCABULARY, WIDTH, BATCH = 64, 256, 512
TYPES = {"f16": 1, "q4_0": 2, "q8_0": 8}  # ggml's numbers
SETTINGS = (  # K, V, flash attention; a quantised V needs it
    ("f16", "f16", False), ("f16", "f16", True), ("q4_0", "f16", False), ("q8_0", "f16", False),
    ("q4_0", "q4_0", True), ("q8_0", "q8_0", True),
)  # fmt: skip
SUITE, BEST = "llamacpp", "llama.cpp best"


def write_model(path: Path, shape: Geometry, layers: int, context: int) -> None:
    """A llama of random float16 weights without a vocabulary."""
    rng, heads = np.random.default_rng(0), shape.kv_heads * shape.group
    out = gguf.GGUFWriter(str(path), "llama")
    out.add_context_length(context)
    out.add_embedding_length(WIDTH)
    out.add_feed_forward_length(WIDTH)
    out.add_block_count(layers)
    out.add_head_count(heads)
    out.add_head_count_kv(shape.kv_heads)
    out.add_key_length(shape.head_dim)
    out.add_value_length(shape.head_dim)
    out.add_rope_dimension_count(shape.head_dim)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_vocab_size(VOCABULARY)
    out.add_tokenizer_model("no_vocab")

    def matrix(name: str, rows_: int, columns: int) -> None:
        out.add_tensor(name, (rng.standard_normal((rows_, columns)) * columns**-0.5).astype(np.float16))

    def norm(name: str) -> None:
        out.add_tensor(name, np.ones(WIDTH, np.float32))

    matrix("token_embd.weight", VOCABULARY, WIDTH)
    matrix("output.weight", VOCABULARY, WIDTH)
    norm("output_norm.weight")
    for i in range(layers):
        norm(f"blk.{i}.attn_norm.weight")
        norm(f"blk.{i}.ffn_norm.weight")
        matrix(f"blk.{i}.attn_q.weight", heads * shape.head_dim, WIDTH)
        matrix(f"blk.{i}.attn_k.weight", shape.kv_heads * shape.head_dim, WIDTH)
        matrix(f"blk.{i}.attn_v.weight", shape.kv_heads * shape.head_dim, WIDTH)
        matrix(f"blk.{i}.attn_output.weight", WIDTH, heads * shape.head_dim)
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            matrix(f"blk.{i}.{name}.weight", WIDTH, WIDTH)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def features() -> str:
    """What the installed llama.cpp was compiled for. A ready-made wheel may lack AVX512: build from source."""
    told = [part.strip().removeprefix("CPU : ") for part in ll.llama_print_system_info().decode().split("|")]
    return "llama.cpp with " + " ".join(part.partition(" =")[0] for part in told if part.endswith("= 1"))


class Llama:
    """One llama.cpp context in one setting: `fill` to a length, then `decode` and `forget` a token there repeatedly."""

    def __init__(self, model: Any, threads: int, setting: tuple[str, str, bool], context: int) -> None:
        k, v, flash = setting
        self.name = f"llama.cpp {k}/{v} flash {'on' if flash else 'off'}"
        wanted = ll.llama_context_default_params()
        wanted.n_ctx, wanted.n_batch, wanted.n_ubatch = context + 2 * BATCH, BATCH, BATCH
        wanted.n_threads = wanted.n_threads_batch = threads
        wanted.type_k, wanted.type_v, wanted.flash_attn_type = TYPES[k], TYPES[v], int(flash)
        self.context = ll.llama_init_from_model(model, wanted)
        if not self.context:
            raise RuntimeError(f"{self.name}: llama.cpp refuses this setting")
        self.memory, self.length = ll.llama_get_memory(self.context), 0
        self._one = (ll.llama_token * 1)(7)

    def fill(self, length: int) -> None:
        """Read random tokens until `length` are stored."""
        rng = np.random.default_rng(self.length)
        while self.length < length:
            count = min(BATCH, length - self.length)
            tokens = (ll.llama_token * count)(*rng.integers(0, VOCABULARY, count).tolist())
            self._run(tokens, count)
            self.length += count

    def decode(self) -> None:
        """One token behind what is stored."""
        self._run(self._one, 1)

    def forget(self) -> None:
        """Take that token away again."""
        ll.llama_memory_seq_rm(self.memory, 0, self.length, -1)

    def _run(self, tokens: Any, count: int) -> None:
        # the batch does not own the tokens: they are kept alive by the caller
        if failed := ll.llama_decode(self.context, ll.llama_batch_get_one(tokens, count)):
            raise RuntimeError(f"{self.name}: llama_decode gave {failed}")
        ll.llama_synchronize(self.context)


def measure(
    arguments: argparse.Namespace, shape: Geometry, peer: Callable[..., Llama], reader: Reader
) -> dict[str, dict[int, Stats]]:
    """Seconds of a decode step (llama.cpp) or of attention in all layers (qkv), by contestant and context.

    All contexts take part in every round: a slope over lengths measured minutes apart is that of the machine's mood.
    """
    evict, calls, peers = reader.evictor(None), {}, {}
    for context in arguments.context:
        print(f"filling {context:,}", file=sys.stderr, flush=True)
        k, v = keys_values(shape, context)
        problem = Problem(queries(shape, k, 1), k, v, shape.head_dim**-0.5)
        for name in arguments.format:
            calls[f"qkv {name}", context] = contest.qkv(problem, name, arguments.layers).run
        for setting in SETTINGS:
            one = peer(setting, context)
            one.fill(context)
            calls[one.name, context], peers[str((one.name, context))] = one.decode, one

    def before(name: str) -> None:
        if name in peers:
            peers[name].forget()
        if evict is not None:
            evict(name)

    times = interleave({str(key): call for key, call in calls.items()}, arguments.rounds, before=before)
    found: dict[str, dict[int, Stats]] = {}
    for key in calls:
        found.setdefault(key[0], {})[key[1]] = Stats.of(times[str(key)])
    return found


def report(arguments: argparse.Namespace, shape: Geometry, found: dict[str, dict[int, Stats]]) -> list[rows.Row]:
    """Times at each context, then slopes a token and KV head; ratios against llama.cpp's lowest slope."""
    lines: dict[str, Line] = {}
    for name, by in found.items():
        line = fit_line((context, stats.median) for context, stats in by.items())
        assert line is not None
        lines[name] = line
    best = min((name for name in lines if name.startswith("llama.cpp")), key=lambda name: lines[name].slope)
    at = partial(rows.Shape, 1, shape.kv_heads, shape.group, shape.head_dim, q_len=1)
    made = []
    for name, by in found.items():
        impl, format = ("qkv", name.removeprefix("qkv ")) if name.startswith("qkv") else (name, name.split()[1])
        told = f"{arguments.layers} layers"
        for context, stats in by.items():
            micro = stats.scaled(1e6)
            made.append(
                rows.Row(
                    SUITE, "random", format, impl, "time", micro.median, "us", at(context=context), micro.p20,
                    micro.p80, micro.n, note=f"a step of {told}" if impl != "qkv" else f"attention in {told}",
                )
            )  # fmt: skip
        slope = lines[name].slope * 1e9 / arguments.layers / shape.kv_heads
        ratio = lines[best].slope / lines[name].slope if slope > 0 else None
        made.append(
            rows.Row(
                SUITE, "random", format, impl, "slope", slope, "ns/token", at(context=max(by)), n=len(by),
                baseline=BEST, ratio=ratio,
                note=f"per KV head; fit residual {lines[name].residual:.1%}; best is {best}; {features()}",
            )
        )  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--context", nargs="+", type=int, default=[1024, 2048, 4096, 8192])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--format", nargs="+", default=["kivi2", "kivi4", "int8"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    shape = Geometry(arguments.kv_heads, arguments.group, arguments.head_dim, torch.bfloat16)
    checks.geometry(shape, arguments.format)
    arguments.context = sorted(set(arguments.context))
    checks.each_at_least("context", arguments.context, 1)
    checks.each_at_least("different contexts", [len(arguments.context)], 2)
    with tempfile.TemporaryDirectory() as folder, checks.threads(arguments.threads) as threads:
        quiet = ll.llama_log_callback(lambda level, text, data: None)
        ll.llama_log_set(quiet, ctypes.c_void_p())
        ll.llama_backend_init()
        path = Path(folder) / "random.gguf"
        longest = max(arguments.context)
        write_model(path, shape, arguments.layers, longest + 2 * BATCH)
        model = ll.llama_model_load_from_file(str(path).encode(), ll.llama_model_default_params())
        found = measure(arguments, shape, partial(Llama, model, threads), Reader())
        rows.write(report(arguments, shape, found), sys.stdout)


if __name__ == "__main__":
    main()
