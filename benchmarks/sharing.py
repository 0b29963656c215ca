"""What sharing saves on a real model: beams, parallel samples, questions over one prefix, and that the answers stay.

    python benchmarks/sharing.py [--model smollm2-135m] [--prompt 4096] [--prefix 6000]

Bytes are those of blocks and pieces held (`QKVCache.held`), each counted once, and of the tensors
allocated. Prints one JSON object a case; the tracked results are in benchmarks/results/sharing.jsonl.
"""

import argparse
import json
import random
from typing import Any

import torch

from qkv import KVManager
from qkv.backends.packed import PackedModel
from qkv.backends.transformers import QKVCache, cache_argument, enable
from qkv.bench.data import text_ids
from qkv.models import load
from qkv.prefix import Namespace

CHUNK = 512


def generate(model: Any, ids: torch.Tensor, cache: Any, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    out: torch.Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), pad_token_id=0, eos_token_id=None, **{cache_argument(model): cache},
        **{"do_sample": False, **options},
    )  # fmt: skip
    return out


def rows_of(model: Any, ids: torch.Tensor, case: str, rows: int, new_tokens: int, **options: Any) -> dict[str, Any]:
    """Bytes of `rows` beams or samples against one greedy row, after as many tokens."""
    one, many = QKVCache(model.config, "kivi2"), QKVCache(model.config, "kivi2")
    generate(model, ids, one, max_new_tokens=new_tokens)
    generate(model, ids, many, max_new_tokens=new_tokens, **options)
    many.manager.check()
    held, alone = many.held(), one.held()
    prompt_blocks = {tuple(sequence.block_ids[:30]) for sequence in many.rows.sequences}
    return {
        "case": case, "rows": len(many.rows.sequences), "prompt": ids.shape[1], "new_tokens": new_tokens,
        "one_bytes": alone.total, "bytes": held.total, "ratio": held.total / alone.total,
        "allocated_ratio": many.memory().total / one.memory().total,
        "records_of_prompt_held_once": len(prompt_blocks) == 1,
    }  # fmt: skip


def lookup(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Prompt-lookup decoding against plain greedy decoding, same format."""
    plain = generate(model, ids, QKVCache(model.config, "kivi4"), max_new_tokens=64)
    cache = QKVCache(model.config, "kivi4")
    looked_up = generate(model, ids, cache, max_new_tokens=64, prompt_lookup_num_tokens=8)
    cache.manager.check()
    return {"case": "prompt lookup", "prompt": ids.shape[1], "identical": torch.equal(plain, looked_up)}


def assisted(name: str, draft: str, tokens: int) -> dict[str, Any]:
    """Assisted decoding (a smaller model drafts) against plain greedy decoding, same format, both in float32."""
    (model, tokenizer), (assistant, _) = load(name, "float32"), load(draft, "float32")
    enable(model)
    ids = text_ids(tokenizer, tokens)
    plain = generate(model, ids, QKVCache(model.config, "kivi4"), max_new_tokens=64)
    cache = QKVCache(model.config, "kivi4")
    drafted = generate(model, ids, cache, max_new_tokens=64, assistant_model=assistant)
    cache.manager.check()
    return {
        "case": "assisted decoding", "model": name, "assistant": draft, "prompt": tokens,
        "identical": torch.equal(plain, drafted),
    }  # fmt: skip


def shared_prefix(model: Any, document: list[int], questions: list[list[int]]) -> dict[str, Any]:
    """Each question behind the document: with what is shared, and each all by itself."""
    shared = KVManager(model.config.num_hidden_layers, "kivi2")
    layer = (model.config.num_key_value_heads, model.config.head_dim, str(model.dtype))
    name = Namespace("model", (layer,) * shared.num_layers, shared.format.id, 1, 128, shared.sink_tokens)
    computed, worst, equal = [0, 0], 0.0, 0
    for question in questions:
        logits = []
        for alone in (False, True):
            manager = KVManager(shared.num_layers, "kivi2") if alone else shared
            packed, tokens = PackedModel(model, manager), document + question
            sequence = manager.open() if alone else manager.open(tokens, name)
            while (at := manager.length(sequence)) < len(tokens):
                end = min(at + CHUNK, len(document) if at < len(document) else len(tokens))
                with manager.plan([sequence], [end - at]) as step:
                    made = packed.forward(step, torch.tensor(tokens[at:end]), torch.arange(at, end))
                computed[alone] += end - at
                if end == len(document) and not alone:
                    manager.checkpoint(sequence)
            logits.append(made.float())
            manager.close(sequence)
        worst = max(worst, float((logits[0] - logits[1]).abs().max()))
        equal += torch.equal(*logits)
    shared.check()
    return {
        "case": "shared prefix", "prefix": len(document), "questions": len(questions), "computed": computed[0],
        "computed_alone": computed[1], "ratio": computed[0] / computed[1], "logits_bit_equal": equal,
        "largest_difference": worst,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--prefix", type=int, default=6000)
    parser.add_argument("--assisted", nargs=2, default=["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"])
    options = parser.parse_args()
    model, tokenizer = load(options.model)
    ids = text_ids(tokenizer, max(options.prompt, options.prefix))
    enable(model)
    prompt = ids[:, : options.prompt]
    print(json.dumps(rows_of(model, prompt, "beam search", 4, 32, num_beams=4)), flush=True)
    samples = {"do_sample": True, "num_return_sequences": 8, "top_k": 50}
    print(json.dumps(rows_of(model, prompt, "parallel samples", 8, 100, **samples)), flush=True)
    print(json.dumps(lookup(model, ids[:, :1024].repeat(1, 2))), flush=True)
    print(json.dumps(assisted(*options.assisted, 512)), flush=True)
    rng = random.Random(0)
    questions = [rng.choices(range(1000, 40000), k=rng.randint(8, 40)) for _ in range(8)]
    print(json.dumps(shared_prefix(model, ids[0, : options.prefix].tolist(), questions)), flush=True)


if __name__ == "__main__":
    main()
