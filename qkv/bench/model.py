"""`qkv bench model`: tokens a second of a real model, with transformers' caches and with QKVCache.

Each contestant reads the same prompt (timed: prefill), then all decode the same next tokens, one token each in turn.
transformers' QuantizedCache re-quantises everything each 128 tokens; that falls outside of the few tokens timed here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from qkv.bench import checks
from qkv.bench.contest import OVER_RECORDS, served_by
from qkv.bench.data import attention, geometry_of, text_ids
from qkv.bench.decode import Say
from qkv.bench.rows import Row, Shape
from qkv.bench.timing import Stats, interleave
from qkv.errors import InputError

SUITE, PEER = "model", "QuantizedCache"
WARMUP = 3
PROMPT_MULTIPLE = 16  # hqq cannot pack other lengths at 2 bits
QUANTISED = {  # the axes that each package's documentation of the cache recommends
    "quanto": {"axis_key": 0, "axis_value": 0},
    "hqq": {"axis_key": 1, "axis_value": 1},
}


@dataclass(frozen=True)
class ModelOptions:
    """`lengths`: tokens in the cache, at most, at the last of `rounds` decoded tokens.

    `peers`: QuantizedCache too, up to `peer_limit` tokens (hqq reads a prompt in seconds a thousand tokens).
    """

    name: str
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    formats: tuple[str, ...] = ("kivi2", "kivi4", "int8")
    threads: int | None = None
    rounds: int = 16
    prefill_rounds: int = 1
    peers: bool = True
    peer_limit: int | None = None

    @property
    def steps(self) -> int:
        """Tokens decoded by each contestant."""
        return self.rounds + WARMUP

    def check(self) -> None:
        """Raises InputError, FormatError."""
        checks.formats(self.formats)
        checks.at_least("rounds", self.rounds, 1)
        checks.thread_count(self.threads)
        checks.at_least("prefill_rounds", self.prefill_rounds, 1)
        checks.each_at_least("length", self.lengths, self.steps + PROMPT_MULTIPLE)


@dataclass(frozen=True)
class Kind:
    """One kind of cache: how to make it for so many tokens, and the attention that goes with it."""

    format: str
    impl: str
    make: Callable[[int], Any]
    attention: str = "sdpa"


def _qkv_cache(config: Any, format: str, length: int) -> Any:
    """`length` is what other caches are sized by; this one grows."""
    from qkv.backends.transformers import QKVCache

    return QKVCache(config, format)


def kinds(config: Any, formats: tuple[str, ...], peers: bool) -> list[Kind]:
    """The baseline, DynamicCache, first."""
    from transformers import DynamicCache, QuantizedCache, StaticCache

    from qkv.backends.transformers import NAME

    found = [
        Kind("exact", "DynamicCache", lambda length: DynamicCache(config=config)),
        Kind("exact", "StaticCache", lambda length: StaticCache(config=config, max_cache_len=length)),
    ]
    for backend, axes in QUANTISED.items() if peers else ():
        for bits in (4, 2):
            make = partial(QuantizedCache, backend, config, nbits=bits, **axes)
            found.append(Kind(f"{backend}{bits}", PEER, lambda _, make=make: make()))  # type: ignore[misc]  # binds the loop's
    for format in formats:
        found.append(Kind(format, "QKVCache", partial(_qkv_cache, config, format), NAME))
    return found


class Runner:
    """A model that takes any of the caches."""

    def __init__(self, model: Any) -> None:
        from qkv.backends.transformers import cache_argument

        self.model, self.argument = model, cache_argument(model)

    def switch(self, kind: Kind) -> None:
        """Give the model the attention that goes with the cache."""
        if self.model.config._attn_implementation != kind.attention:
            self.model.set_attn_implementation(kind.attention)

    def forward(self, ids: torch.Tensor, cache: Any) -> None:
        """ids [1, T] behind what the cache holds."""
        with torch.inference_mode():
            self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self.argument: cache})


def run(model: Any, tokenizer: Any, options: ModelOptions, say: Say = lambda text: None) -> list[Row]:
    """Prefill and decode rows of every length. Raises InputError, FormatError, UnsupportedModel."""
    options.check()
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and max(options.lengths) > limit:
        raise InputError(f"length: got {max(options.lengths)}, wanted at most {limit}, the context of {options.name}")
    with checks.threads(options.threads), attention(model, "sdpa"):
        runner = Runner(model)
        present, absent = _warm(runner, kinds(model.config, options.formats, options.peers), tokenizer, say)
        ids = text_ids(tokenizer, max(options.lengths))
        rows: list[Row] = []
        for length in options.lengths:
            say(f"{length:,} tokens")
            shape = _shape(model, length)
            beyond = options.peer_limit is not None and length > options.peer_limit
            skipped = [kind for kind in present if beyond and kind.impl == PEER]
            rows += _length(runner, [kind for kind in present if kind not in skipped], ids[:, :length], options, shape)
            reasons = absent | dict.fromkeys(skipped, f"left out beyond {options.peer_limit} tokens, to save time")
            rows += [
                Row(SUITE, options.name, kind.format, kind.impl, metric, float("nan"), "tokens/s", shape, n=0, note=why)
                for kind, why in reasons.items()
                for metric in ("prefill", "decode")
            ]
        return rows


def _shape(model: Any, length: int) -> Shape:
    g = geometry_of(model)
    return Shape(1, g.kv_heads, g.group, g.head_dim, length, 1)


def _warm(runner: Runner, all_kinds: list[Kind], tokenizer: Any, say: Say) -> tuple[list[Kind], dict[Kind, str]]:
    """Those that can run, after a short run of each (kernels are built at first use), and why the others cannot."""
    ids, present, absent = text_ids(tokenizer, 512), [], {}
    for kind in all_kinds:
        say(f"warming up {kind.impl} {kind.format}")
        runner.switch(kind)
        try:
            cache = kind.make(ids.shape[1])
            runner.forward(ids[:, :-PROMPT_MULTIPLE], cache)
            runner.forward(ids[:, -1:], cache)
            runner.forward(ids[:, -1:], cache)
        except Exception as error:
            if kind.impl != PEER:
                raise
            # a peer that is not installed, or breaks, is part of the result
            absent[kind] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        else:
            present.append(kind)
    return present, absent


def _length(runner: Runner, present: list[Kind], ids: torch.Tensor, options: ModelOptions, shape: Shape) -> list[Row]:
    """Rows of one length [1, length]: the prompt is what is left before the decoded tokens."""
    first = (ids.shape[1] - options.steps) // PROMPT_MULTIPLE * PROMPT_MULTIPLE
    prompt, following = ids[:, :first], ids[:, first : first + options.steps]
    caches: dict[Kind, Any] = {}

    def prefill(kind: Kind) -> None:
        caches.pop(kind, None)
        caches[kind] = kind.make(ids.shape[1])
        runner.forward(prompt, caches[kind])

    by_name = {f"{kind.impl} {kind.format}": kind for kind in present}
    switch = lambda name: runner.switch(by_name[name])  # noqa: E731  # a step outside the clock
    calls = {name: partial(prefill, kind) for name, kind in by_name.items()}
    times = interleave(calls, options.prefill_rounds, warmup=0, before=switch)
    rows = _rows(options, by_name, times, ("prefill", prompt.shape[1]), shape, {})

    def decode(kind: Kind, tokens: Iterator[torch.Tensor]) -> None:
        runner.forward(next(tokens), caches[kind])

    calls = {name: partial(decode, kind, iter(torch.split(following, 1, 1))) for name, kind in by_name.items()}
    times = interleave(calls, options.rounds, warmup=WARMUP, before=switch)
    held = {name: caches[kind].memory().total for name, kind in by_name.items() if kind.impl == "QKVCache"}
    held["DynamicCache exact"] = sum(x.keys.nbytes + x.values.nbytes for x in caches[present[0]].layers)
    return rows + _rows(options, by_name, times, ("decode", 1), shape, held)


def _rows(
    options: ModelOptions,
    by_name: dict[str, Kind],
    times: dict[str, list[float]],
    what: tuple[str, int],
    shape: Shape,
    held: dict[str, int],
) -> list[Row]:
    """Tokens a second, each against DynamicCache and against StaticCache. `what`: the metric, and tokens a call."""
    metric, tokens = what
    stats = {name: Stats.of(taken) for name, taken in times.items()}
    rows = []
    for name, kind in by_name.items():
        rate = stats[name].rate(tokens)
        note = served_by(OVER_RECORDS) if kind.impl == "QKVCache" and metric == "decode" else ""
        for baseline in ("DynamicCache", "StaticCache"):
            ratio = stats[f"{baseline} exact"].median / stats[name].median
            rows.append(
                Row(
                    SUITE, options.name, kind.format, kind.impl, metric, rate.median, "tokens/s", shape, rate.p20,
                    rate.p80, rate.n, baseline, ratio, held.get(name), note=note,
                )
            )  # fmt: skip
    return rows
