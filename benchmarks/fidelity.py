"""How much answer a format loses: needle retrieval and continuation KL, decoding against stored records.

    python benchmarks/fidelity.py --model qwen2.5-coder-0.5b --tokens 1024 4096 > benchmarks/results/fidelity.jsonl

Per model and length: one exact prefill of almanac prose with five needles; its K and V go through the real QKVCache of
every format and window. `needle`: greedy `generate()` on a fork of that cache, five keys, share answered right.
`kl`: mean KL(exact || format) in nats over 128 tokens of the text that follows, read against the records in one call.
One JSON row a measured number (docs/design.md section 10).
"""

import argparse
import json
import platform
import random
import subprocess

import torch

from qkv import documents, models
from qkv.backends.transformers import QKVCache, cache_argument, enable

KEYS = ("harbour", "violin", "glacier", "orchard", "compass")
WINDOWS = {
    "none": (0, 0),
    "tail64": (0, 64),
    "sink64+tail64": (64, 64),
    "sink128+tail64": (128, 64),
    "sink128+tail128": (128, 128),
}
FORMATS = ("kivi2", "kivi3", "kivi4/kivi2", "kivi4", "int8")
CONTINUATION = 128


class Bench:
    """One model and one context length."""

    def __init__(self, name: str, tokens: int, seed: int) -> None:
        self.name, self.tokens = name, tokens
        self.model, self.tokenizer = models.load(name)
        enable(self.model)
        self.argument = cache_argument(self.model)
        rng = random.Random(seed)
        self.values = {key: str(rng.randrange(10**6, 10**7)) for key in KEYS}
        prose = self.ids(documents.almanac_prose())
        self.context = self._context(prose)
        self.continuation = prose[:, self.tokens + 512 : self.tokens + 512 + CONTINUATION]
        self.exact = QKVCache(self.model.config, "exact")
        self.forward(self.context, self.exact)
        self.reference = self.log_probabilities(self.exact)

    def ids(self, text: str) -> torch.Tensor:
        ids: torch.Tensor = self.tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids
        return ids

    def _context(self, prose: torch.Tensor) -> torch.Tensor:
        """Prose of `tokens` tokens with the needles at five depths."""
        needles = [
            self.ids(f"\nThe special magic number for {key} is: {value}.\n") for key, value in self.values.items()
        ]
        room = self.tokens - sum(needle.shape[1] for needle in needles)
        parts, step = [], room // (len(needles) + 1)
        for index, needle in enumerate(needles):
            parts += [prose[:, index * step : (index + 1) * step], needle]
        parts.append(prose[:, len(needles) * step : room])
        return torch.cat(parts, dim=1)

    def forward(self, ids: torch.Tensor, cache: QKVCache, keep: int = 1) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.model(input_ids=ids, logits_to_keep=keep, **{self.argument: cache}).logits
        return logits

    def fill(self, format: str, window: tuple[int, int] | None) -> QKVCache:
        """The exact context's K and V through the real cache class of `format`."""
        sizes = {} if window is None else {"sink_tokens": window[0], "tail_tokens": window[1]}
        cache = QKVCache(self.model.config, format, **sizes)
        for layer in cache.layers:
            k, v = self.exact.manager.gather(self.exact.rows.sequences[0], layer.index)
            layer.update(k.unsqueeze(0), v.unsqueeze(0))
            layer.commit(None)
        return cache

    def log_probabilities(self, cache: QKVCache) -> torch.Tensor:
        twin = cache.fork()
        logits = self.forward(self.continuation, twin, CONTINUATION)
        twin.reset()
        return logits[0].double().log_softmax(-1)

    def kl(self, cache: QKVCache) -> tuple[float, float]:
        """Mean KL and share of equal top-1 tokens."""
        other = self.log_probabilities(cache)
        kl = (self.reference.exp() * (self.reference - other)).sum(-1).mean()
        return float(kl), float((self.reference.argmax(-1) == other.argmax(-1)).double().mean())

    def needle(self, cache: QKVCache) -> float:
        right = 0
        for key, value in self.values.items():
            what = f"special magic number for {key} mentioned in the text"
            prompt = f"\nQuestion: What is the {what}?\nAnswer: The {what} is:"
            ids = torch.cat([self.context, self.ids(prompt)], dim=1)
            twin = cache.fork()
            with torch.inference_mode():
                made = self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=10,
                    do_sample=False,
                    **{self.argument: twin},
                )
            twin.reset()
            right += value in self.tokenizer.decode(made[0, ids.shape[1] :]).replace(" ", "")
        return right / len(self.values)


def _row(bench: Bench, cache: QKVCache, label: tuple[str, str], measured: tuple[str, str, float, int]) -> None:
    format, window = label
    case, metric, value, count = measured
    layer = cache.manager.layout(0).layer
    row = {
        "suite": "fidelity",
        "case": f"{case} {bench.name} {bench.tokens}",
        "format": format,
        "impl": f"QKVCache window={window}",
        "metric": metric,
        "value": round(value, 5),
        "unit": "nats" if metric == "kl" else "share",
        "n": count,
        "baseline": "exact",
        "shape": {"batch": 1, "kv_heads": layer.kv_heads, "head_dim": layer.head_dim, "context": bench.tokens},
        "bytes": cache.memory().total,
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
        **_commit(),
    }
    print(json.dumps(row), flush=True)


def _commit() -> dict[str, str | bool]:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()

    return {"commit": git("rev-parse", "--short", "HEAD"), "dirty": bool(git("status", "--porcelain"))}


def run(bench: Bench, windows: bool) -> None:
    """All formats in their default window with needles; with `windows`, the KL of every other window too."""
    _row(bench, bench.exact, ("exact", "default"), ("needle", "exact_match", bench.needle(bench.exact), len(KEYS)))
    for format in FORMATS:
        for window in ["default", *(WINDOWS if windows else [])]:
            cache = bench.fill(format, WINDOWS.get(window))
            kl, top1 = bench.kl(cache)
            _row(bench, cache, (format, window), ("continuation", "kl", kl, CONTINUATION))
            _row(bench, cache, (format, window), ("continuation", "top1", top1, CONTINUATION))
            if window == "default":
                _row(bench, cache, (format, window), ("needle", "exact_match", bench.needle(cache), len(KEYS)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["qwen2.5-coder-0.5b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--windows", action="store_true", help="measure every window, not only the default")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name in arguments.model:
        for tokens in arguments.tokens:
            run(Bench(name, tokens, arguments.seed), arguments.windows)


if __name__ == "__main__":
    main()
