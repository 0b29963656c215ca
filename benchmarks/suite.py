"""What `make bench` runs: every speed that the README states, in about twenty minutes on two cores.

    python benchmarks/suite.py                 # all five
    python benchmarks/suite.py decode model    # some

Each part replaces benchmarks/results/PART.jsonl when it has finished. Then `python benchmarks/tables.py`. Run it on a
machine with nothing else to do; ratios are of one process and interleaved, absolute times are of one day.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qkv import models
from qkv.bench import decode, divergence, errors, model, offload, prefill, rows, seal
from qkv.bench.data import Geometry, capture, text_ids

RESULTS = Path(__file__).parent / "results"
SHAPES = (  # KV heads, group, head_dim
    Geometry(8, 4, 128, torch.bfloat16),  # Llama 3 8B
    Geometry(8, 1, 128, torch.bfloat16),
    Geometry(3, 3, 64, torch.bfloat16),  # SmolLM2 135M
)
CONTEXTS = (2048, 8192, 32768)
FORMATS = ("kivi2", "kivi4", "int8")
THREADS = (1, 2)
MODEL, ALSO_CAPTURED = "smollm2-135m", "qwen2.5-coder-0.5b"
CAPTURED_TOKENS = 2048
PEER_LIMIT = 4096  # hqq takes minutes to read 8k tokens
_loaded: dict[str, Any] = {}


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def load(name: str) -> Any:
    if name not in _loaded:
        _loaded[name] = models.load(name)
    return _loaded[name]


def run_decode() -> list[rows.Row]:
    found = []
    for shape in SHAPES:
        for threads in THREADS:
            say(f"{shape.kv_heads} x {shape.head_dim}, group {shape.group}, threads {threads}")
            options = decode.DecodeOptions(shape, CONTEXTS, FORMATS, threads=threads, rounds=10, seconds=6)
            found += decode.run(options, say)
    for name in (MODEL, ALSO_CAPTURED):
        say(f"errors on K and V of {name}")
        loaded, tokenizer = load(name)
        captured = capture(loaded, text_ids(tokenizer, CAPTURED_TOKENS))
        found += errors.captured(decode.SUITE, name, captured, FORMATS)
    say(f"what rounding adds to the answers of {MODEL}")
    found += divergence.run(*models.load(MODEL, "float32"), MODEL, CAPTURED_TOKENS, FORMATS)
    return found


def run_prefill() -> list[rows.Row]:
    found = []
    for threads in THREADS:
        options = prefill.PrefillOptions(SHAPES[0], formats=FORMATS, threads=threads, rounds=5, seconds=10)
        found += prefill.run(options, say)
    return found


def run_seal() -> list[rows.Row]:
    found = []
    for threads in THREADS:
        found += seal.run(seal.SealOptions(SHAPES[0], threads=threads, rounds=10), say)
    loaded, tokenizer = load(MODEL)
    return found + seal.model_share(loaded, tokenizer, MODEL, 4096, FORMATS)


def run_model() -> list[rows.Row]:
    return model.run(*load(MODEL), model.ModelOptions(MODEL, formats=FORMATS, peer_limit=PEER_LIMIT), say)


def run_offload() -> list[rows.Row]:
    return offload.run(*load(MODEL), offload.OffloadOptions(MODEL), say)


PARTS: dict[str, Callable[[], list[rows.Row]]] = {
    "decode": run_decode,
    "prefill": run_prefill,
    "seal": run_seal,
    "model": run_model,
    "offload": run_offload,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    chosen = parser.parse_args().parts or list(PARTS)
    if unknown := [part for part in chosen if part not in PARTS]:
        parser.error(f"got {', '.join(unknown)}, wanted some of {', '.join(PARTS)}")
    RESULTS.mkdir(exist_ok=True)
    for part in chosen:
        began = time.perf_counter()
        print(part, file=sys.stderr, flush=True)
        found = PARTS[part]()
        with (RESULTS / f"{part}.jsonl").open("w") as target:
            rows.write(found, target)
        print(f"{part}: {len(found)} rows, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
