"""`qkv bench`: parses options and prints (needs typer and rich). Progress goes to stderr, results to stdout."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from qkv.bench import checks, decode, divergence, errors, model, offload, pool, prefill, report, rows, seal
from qkv.bench.data import Geometry, capture, geometry_of, text_ids
from qkv.bench.rows import Row
from qkv.errors import InputError

CAPTURED_TOKENS = 2048

app = typer.Typer(no_args_is_help=True, help="Measure qkv here, next to torch and transformers, in one process.")
out, err = Console(markup=False, highlight=False), Console(stderr=True, markup=False, highlight=False)

KVHeads = Annotated[int, typer.Option(help="KV heads of a layer.")]
Group = Annotated[int, typer.Option(help="Query heads a KV head.")]
HeadDim = Annotated[int, typer.Option(help="Channels of a head.")]
DType = Annotated[str, typer.Option(help="Of K, V and queries: bfloat16, float16 or float32.")]
Formats = Annotated[list[str] | None, typer.Option("--format", help="Repeat for several; see `qkv formats`.")]
Threads = Annotated[int | None, typer.Option(help="Of torch and qkv; default: torch's own number.")]
Rounds = Annotated[int, typer.Option(help="Samples of each contestant; two more are dropped as warm-up.")]
Evict = Annotated[int | None, typer.Option(help="MiB read before each sample, untimed; default: the last-level cache.")]
Json = Annotated[str | None, typer.Option("--json", help="Write JSON lines to this file, or - for stdout, no tables.")]
Model = Annotated[
    str | None, typer.Option("--model", help="Take the shape (and dtype) of this model; see `qkv models ls`.")
]


@app.callback()
def _group() -> None:
    """Measure qkv here, next to torch and transformers, in one process."""


@contextmanager
def _results(json: str | None) -> Iterator[list[Row]]:
    """A list to fill; printed or written when the block ends. Raises InputError if the file cannot be written."""
    found: list[Row] = []
    path = None if json in (None, "-") else Path(str(json))
    if path is not None:
        try:
            with path.open("a"):  # now, not after minutes
                pass
        except OSError as error:
            raise InputError(
                f"json: got {json!r}, wanted a file that can be written, or -; {error.strerror}"
            ) from error
    yield found
    if json == "-":
        rows.write(found, sys.stdout)
        return
    report.show(out, found)
    if path is not None:
        with path.open("w", encoding="utf-8") as target:
            rows.write(found, target)


def _say(text: str) -> None:
    err.print(text, style="dim", soft_wrap=True)


def _load(name: str, dtype: str = "auto") -> tuple[Any, Any]:
    from qkv import models

    _say(f"loading {name}")
    return models.load(name, dtype)


def _mib(value: int | None) -> int | None:
    return None if value is None else value << 20


@app.command("decode")
def decode_command(  # noqa: PLR0913  # each is an option of the command line
    kv_heads: KVHeads = 2,
    group: Group = 4,
    head_dim: HeadDim = 128,
    dtype: DType = "bfloat16",
    model: Model = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens stored; repeat for several.")] = None,
    q_len: Annotated[int, typer.Option(help="Queries: 1 decodes, more verify a draft.")] = 1,
    formats: Formats = None,
    threads: Threads = None,
    rounds: Rounds = 12,
    layers: Annotated[int | None, typer.Option(help="Distinct layers in a sample; default: 4 to 16, by size.")] = None,
    evict: Evict = None,
    json: Json = None,
) -> None:
    """One attention call over a stored context, against torch's fastest SDPA and against plain reads."""
    shape = Geometry(kv_heads, group, head_dim, checks.dtype(dtype))
    given: dict[str, Any] = {"contexts": tuple(context)} if context else {}
    given |= {"formats": checks.formats(formats)} if formats else {}
    given |= {"q_len": q_len, "threads": threads, "rounds": rounds, "layers": layers, "evict": _mib(evict)}
    options = decode.DecodeOptions(shape, **given)
    options.check()
    with _results(json) as found:
        if model is None:
            found += decode.run(options, _say)
            return
        loaded, tokenizer = _load(model)
        options = decode.DecodeOptions(geometry_of(loaded), case=model, **given)
        found += decode.run(options, _say)
        _say("errors on captured K and V")
        captured = capture(loaded, text_ids(tokenizer, min(CAPTURED_TOKENS, max(options.contexts))))
        found += errors.captured(decode.SUITE, model, captured, options.formats, q_len)
        tokens = min(CAPTURED_TOKENS, max(options.contexts))
        found += divergence.run(*_load(model, "float32"), model, tokens, options.formats)


@app.command("prefill")
def prefill_command(  # noqa: PLR0913  # each is an option of the command line
    kv_heads: KVHeads = 2,
    group: Group = 4,
    head_dim: HeadDim = 128,
    dtype: DType = "bfloat16",
    model: Model = None,
    history: Annotated[list[int] | None, typer.Option(help="Tokens stored before the chunk; repeatable.")] = None,
    chunk: Annotated[int, typer.Option(help="Queries, with K and V of their own.")] = 512,
    formats: Formats = None,
    threads: Threads = None,
    rounds: Rounds = 5,
    evict: Evict = None,
    json: Json = None,
) -> None:
    """A chunk of a long prompt over a quantised history, against SDPA on dense K and V."""
    shape = Geometry(kv_heads, group, head_dim, checks.dtype(dtype))
    given: dict[str, Any] = {"histories": tuple(history)} if history else {}
    given |= {"formats": checks.formats(formats)} if formats else {}
    given |= {"chunk": chunk, "threads": threads, "rounds": rounds, "evict": _mib(evict)}
    prefill.PrefillOptions(shape, **given).check()
    with _results(json) as found:
        if model is not None:
            shape, given["case"] = geometry_of(_load(model)[0]), model
        found += prefill.run(prefill.PrefillOptions(shape, **given), _say)


@app.command("seal")
def seal_command(  # noqa: PLR0913  # each is an option of the command line
    kv_heads: KVHeads = 2,
    head_dim: HeadDim = 128,
    dtype: DType = "bfloat16",
    model: Model = None,
    tokens: Annotated[int, typer.Option(help="With --model: length of the prompt whose prefill is timed.")] = 2048,
    blocks: Annotated[int, typer.Option(help="Blocks of 128 tokens a call.")] = 16,
    formats: Formats = None,
    threads: Threads = None,
    rounds: Rounds = 12,
    evict: Evict = None,
    json: Json = None,
) -> None:
    """Encoding and decoding of blocks, against copying the same bytes; with --model, against its prefill."""
    shape = Geometry(kv_heads, 1, head_dim, checks.dtype(dtype))
    given: dict[str, Any] = {"formats": checks.formats(formats)} if formats else {}
    given |= {"blocks": blocks, "threads": threads, "rounds": rounds, "evict": _mib(evict)}
    options = seal.SealOptions(shape, **given)
    options.check()
    checks.at_least("tokens", tokens, 128)
    with _results(json) as found:
        if model is None:
            found += seal.run(options, _say)
            return
        loaded, tokenizer = _load(model)
        options = seal.SealOptions(geometry_of(loaded), case=model, **given)
        found += seal.run(options, _say)
        with checks.threads(threads):
            found += seal.model_share(loaded, tokenizer, model, tokens, options.formats)


@app.command("pool")
def pool_command(
    blocks: Annotated[int, typer.Option(help="Blocks in the pool.")] = 1_000_000,
    prompt: Annotated[int, typer.Option(help="Blocks of each prompt.")] = 1024,
    json: Json = None,
) -> None:
    """What naming, publishing, finding and releasing a block costs in a large pool. No tensors."""
    options = pool.PoolOptions(blocks, prompt)
    options.check()
    with _results(json) as found:
        found += pool.run(options, _say)


@app.command("offload")
def offload_command(  # noqa: PLR0913  # each is an option of the command line
    name: Annotated[str, typer.Option("--model", help="A name from `qkv models ls`, a folder or a .gguf file.")],
    length: Annotated[list[int] | None, typer.Option(help="Tokens of the stored prefix; repeatable.")] = None,
    question: Annotated[int, typer.Option(help="Tokens behind it.")] = 32,
    formats: Formats = None,
    share: Annotated[float, typer.Option(help="Of the records that may be resident while decoding.")] = 0.25,
    rounds: Annotated[int, typer.Option(help="First tokens by each contestant; one more is dropped.")] = 7,
    steps: Annotated[int, typer.Option(help="Tokens decoded by each; two more are dropped.")] = 24,
    threads: Threads = None,
    folder: Annotated[str, typer.Option(help="On the disk to measure; what is written there is removed.")] = ".",
    simulated: Annotated[bool, typer.Option(help="Also simulate devices and a model that are not here.")] = True,
    json: Json = None,
) -> None:
    """First token behind a stored prefix, and decoding with a quarter of the records resident. Cold page cache."""
    given: dict[str, Any] = {"lengths": tuple(length)} if length else {}
    given |= {"formats": checks.formats(formats)} if formats else {}
    given |= {"question": question, "share": share, "rounds": rounds, "steps": steps, "threads": threads}
    options = offload.OffloadOptions(name, folder=folder, simulated=simulated, **given)
    options.check()
    with _results(json) as found:
        loaded, tokenizer = _load(name)
        found += offload.run(loaded, tokenizer, options, _say)


@app.command("model")
def model_command(  # noqa: PLR0913  # each is an option of the command line
    name: Annotated[str, typer.Option("--model", help="A name from `qkv models ls`, a folder or a .gguf file.")],
    length: Annotated[list[int] | None, typer.Option(help="Tokens in the cache at the end; repeatable.")] = None,
    formats: Formats = None,
    threads: Threads = None,
    rounds: Annotated[int, typer.Option(help="Tokens decoded by each; three more are dropped as warm-up.")] = 16,
    prefill_rounds: Annotated[int, typer.Option(help="Prefills by each.")] = 1,
    peers: Annotated[bool, typer.Option(help="Also transformers' QuantizedCache (quanto, hqq; 4 and 2 bits).")] = True,
    peer_limit: Annotated[int | None, typer.Option(help="Leave those out beyond this length.")] = None,
    json: Json = None,
) -> None:
    """Tokens a second of a real model: DynamicCache, StaticCache, QuantizedCache, QKVCache, a token each in turn."""
    given: dict[str, Any] = {"lengths": tuple(length)} if length else {}
    given |= {"formats": checks.formats(formats)} if formats else {}
    given |= {
        "threads": threads,
        "rounds": rounds,
        "prefill_rounds": prefill_rounds,
        "peers": peers,
        "peer_limit": peer_limit,
    }
    options = model.ModelOptions(name, **given)
    options.check()
    with _results(json) as found:
        loaded, tokenizer = _load(name)
        found += model.run(loaded, tokenizer, options, _say)
