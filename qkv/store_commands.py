"""The `qkv store` commands: what is in a store, whether it is whole, and room in it. Parses and prints."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from qkv.budget import parse_bytes
from qkv.errors import BackendUnavailable, InputError

app = typer.Typer(no_args_is_help=True, help="Look after a store of documents that were read before.")
out, err = Console(markup=False, highlight=False), Console(stderr=True, markup=False, highlight=False)

Place = Annotated[Path, typer.Argument(help="The store's folder.")]
KeyOption = Annotated[Path | None, typer.Option("--key-file", help="16 to 64 secret bytes that it is kept with.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON lines on stdout.")]


def open_store(path: Path, limit: str = "50GiB", key_file: Path | None = None, *, readonly: bool = False) -> Any:
    """A DiskStore. Raises InputError, StoreLocked, BackendUnavailable."""
    try:
        from qkv.offload.disk import DiskStore
    except ImportError as error:
        raise BackendUnavailable("store", f"{error}; pip install 'qkv[store]'") from None
    try:
        key = None if key_file is None else key_file.read_bytes()
        return DiskStore(path, parse_bytes(limit), key=key, readonly=readonly)
    except OSError as error:
        raise InputError(f"store {path}: {error.strerror or error} ({error.filename or path})") from None


@app.command("ls")
def ls(store: Place, key_file: KeyOption = None, as_json: JsonOption = False) -> None:
    """Every segment, the next one to be evicted first."""
    table = Table("segment", "namespace", "after", "tokens", "MB", "prefill s")
    with open_store(store, key_file=key_file, readonly=True) as opened:
        for entry in opened.entries():
            if as_json:
                print(json.dumps(entry._asdict()))
            tokens = f"{entry.first}+{entry.blocks} blocks, {entry.tail_tokens}"
            size, seconds = f"{entry.bytes / 1e6:.1f}", f"{entry.seconds:.1f}"
            table.add_row(entry.name[:16], entry.namespace[:8], entry.parent[:16], tokens, size, seconds)
    if not as_json:
        out.print(table)


@app.command("info")
def info(
    store: Place,
    segment: Annotated[str, typer.Argument(help="The first digits of a segment's name; none: of the store.")] = "",
    key_file: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """What a segment says about itself: model, format, geometry, sizes. Or a store's sizes by namespace."""
    with open_store(store, key_file=key_file, readonly=True) as opened:
        told = _of_segment(opened, segment) if segment else _of_store(opened)
    if as_json:
        print(json.dumps(told))
        return
    table = Table("", "", show_header=False)
    for name, value in told.items():
        table.add_row(name, str(value))
    out.print(table)


@app.command("verify")
def verify(store: Place, key_file: KeyOption = None) -> None:
    """Read every byte of every segment. Damaged ones are put into quarantine/; exit code 1 if there are any."""
    with open_store(store, key_file=key_file) as opened:
        total = sum(entry.bytes for entry in opened.entries())
        with _bytes_bar("verify", total) as advance:
            whole, bad, unread = opened.verify(advance)
    for name in bad:
        err.print(f"damaged, in quarantine/ now: {name}", style="red", soft_wrap=True)
    for name in unread:
        err.print(f"not read (another key or version, or an error of the disk), left: {name}", soft_wrap=True)
    out.print(f"{whole} segments are whole, {len(bad)} damaged, {len(unread)} not read")
    if bad or unread:
        raise typer.Exit(1)


@app.command("gc")
def gc(
    store: Place,
    limit: Annotated[str | None, typer.Option(help="Also evict until all takes at most so much: 20GiB.")] = None,
    key_file: KeyOption = None,
) -> None:
    """Remove damaged files and segments that cannot be reached; with --limit, evict too. Nothing else is touched."""
    with open_store(store, key_file=key_file) as opened:
        before = opened.disk_usage()
        gone = opened.collect()
        gone += [] if limit is None else opened.shrink(parse_bytes(limit))
        out.print(f"{len(gone)} files removed, {(before - opened.disk_usage()) / 1e6:.1f} MB freed")


@app.command("rm")
def rm(
    store: Place,
    segments: Annotated[list[str], typer.Argument(help="First digits of names, as `ls` shows them.")],
    key_file: KeyOption = None,
) -> None:
    """Remove segments, and all that stand on them."""
    with open_store(store, key_file=key_file) as opened:
        for name in [_name(opened, segment) for segment in segments]:
            if any(entry.name == name for entry in opened.entries()):  # it may have stood on an earlier one
                for gone in opened.remove(name):
                    out.print(f"removed {gone}", soft_wrap=True)


@app.command("export")
def export(
    store: Place,
    segment: Annotated[str, typer.Argument(help="First digits of a name, as `ls` shows it.")],
    file: Annotated[Path, typer.Argument(help="The file to make: HDF5, readable by `QKVCache.load`.")],
    key_file: KeyOption = None,
) -> None:
    """Write a segment and all it stands on to one file of its own, verified on the way."""
    if file.exists():
        raise InputError(f"export: {file} exists; give another name, or remove it")
    with open_store(store, key_file=key_file, readonly=True) as opened:
        entry = next(e for e in opened.entries() if e.name == _name(opened, segment))
        with _bytes_bar("export", None) as advance:
            try:
                size = opened.export(entry, str(file), advance)
            except OSError as error:
                raise InputError(f"export: {file}: {error.strerror or error}") from None
    out.print(f"{file}: {size / 1e6:.1f} MB")


def _name(opened: Any, start: str) -> str:
    names = [entry.name for entry in opened.entries() if entry.name.startswith(start)]
    if len(names) != 1:
        raise InputError(f"segment {start!r}: {len(names)} names begin so, wanted one; see `qkv store ls`")
    return str(names[0])


def _of_store(opened: Any) -> dict[str, Any]:
    entries = opened.entries()
    told: dict[str, Any] = {
        "path": opened.path,
        "segments": len(entries),
        "bytes on disk": opened.disk_usage(),
        "prefill seconds kept": round(sum(entry.seconds for entry in entries), 1),
    }
    for namespace in sorted({entry.namespace for entry in entries}):
        told[f"namespace {namespace[:16]}"] = sum(entry.bytes for entry in entries if entry.namespace == namespace)
    return told


def _of_segment(opened: Any, start: str) -> dict[str, Any]:
    entry = next(e for e in opened.entries() if e.name == _name(opened, start))
    with opened.segment(entry) as segment:
        header, stat = segment.header, segment.io.fstat(segment.fd)
        about = json.loads(header.about)
        geometry = about.pop("geometry")
        return {
            "name": entry.name,
            "file": segment.path,
            "written": datetime.fromtimestamp(stat.st_mtime, timezone.utc).isoformat(timespec="seconds"),
            "stands on": header.parent or "-",
            "blocks": f"{header.first_block} to {header.first_block + header.blocks}",
            "exact tokens": f"{header.sink_tokens} first, {header.tail_tokens} newest",
            "layers": f"{header.layers}, KV heads x head_dim, dtype: {sorted({tuple(layer) for layer in geometry})}",
            "bytes": header.layers * header.extent,
            "prefill seconds": round(header.seconds, 2),
            "checksums": "keyed BLAKE2b" if segment.key else "xxh3-128",
            "created by": header.created_by,
            **about,
        }


@contextmanager
def _bytes_bar(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda done: progress.advance(task, done)
