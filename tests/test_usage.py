"""What a manager tells about itself: usage, the cost of dropping a sequence, the account, metrics; from any thread."""

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from qkv import AttendOptions, KVManager, Sequence
from qkv.account import account
from qkv.errors import InputError
from qkv.metrics import Collector, read
from qkv.prefix import Namespace
from qkv.stats import fetch, show

LAYERS = 2


def append(manager: KVManager, sequence: Sequence, tokens: int) -> None:
    for layer in range(LAYERS):
        manager.append(sequence, layer, *torch.randn(2, 1, tokens, 16))


def space(manager: KVManager) -> Namespace:
    return Namespace("w", ((1, 16, "float32"),) * LAYERS, manager.format.id, 1, 128, manager.sink_tokens)


def test_usage_adds_up_to_the_memory() -> None:
    manager = KVManager(LAYERS, "kivi4")
    assert manager.stats().slots == manager.stats().tokens == 0
    piece = LAYERS * 2 * 16 * 16 * 4
    sequence = manager.open()
    append(manager, sequence, 64 + 128 + 70)
    used, held = manager.stats(), manager.memory()
    assert (used.sequences, used.tokens, used.sink, used.tail) == (1, 262, 4 * piece, 5 * piece)
    assert used.records == LAYERS * manager.layout(0).record_bytes  # type: ignore[union-attr]  # bound
    assert used.records + used.records_free == held.records
    assert used.sink + used.tail + used.exact_free == held.exact
    assert (used.slots, used.filled) == (128 + 9 * 16, 262)
    assert used.fragmentation == pytest.approx(10 / 272)
    twin = manager.fork(sequence)
    assert manager.stats().records == used.records, "what is shared counts once"
    manager.crop(twin, 64 + 100)  # inside the block, which the other holds in full
    assert manager.stats().filled == used.filled
    manager.close(sequence)
    assert (manager.stats().slots, manager.stats().filled) == (128 + 64, 164)
    manager.close(twin)
    assert manager.stats().slots == 0
    assert manager.stats().records_free == manager.memory().records


def test_usage_counts_what_sharing_keeps() -> None:
    manager = KVManager(LAYERS, "kivi4")
    tokens = list(range(500))
    sequence = manager.open(tokens, space(manager))
    append(manager, sequence, 500)
    assert manager.checkpoint(sequence)
    before = manager.stats()
    manager.close(sequence)
    after = manager.stats()
    assert (after.checkpoints, after.sequences) == (1, 0)
    assert (after.records, after.sink, after.tail) == (before.records, before.sink, before.tail)
    match = manager.match([*tokens, 1], space(manager))
    assert match.bytes == before.records > 0


def test_the_cost_of_dropping_one_is_what_only_it_holds() -> None:
    manager = KVManager(LAYERS, "exact")
    short, long = manager.open(), manager.open()
    append(manager, short, 300)
    append(manager, long, 1500)
    assert manager.cost(manager.open()) == (0, 0.0)
    for sequence in (short, long):
        freed, seconds = manager.cost(sequence)
        assert freed == manager.held([sequence]).total
        assert seconds == pytest.approx(sequence.spent) != 0
    twin = manager.fork(long)
    assert manager.cost(long) == manager.cost(twin) == (0, 0.0)
    append(manager, twin, 400)
    freed, seconds = manager.cost(twin)
    assert 0 < freed < manager.held([twin]).total
    assert 0 < seconds < twin.spent
    spent = twin.spent
    manager.crop(twin, 950)
    assert twin.spent == pytest.approx(spent / 2)


def test_the_account_has_every_tensor_once() -> None:
    manager, model = KVManager(LAYERS, "kivi4"), torch.nn.Linear(100, 100)
    model.extra = model.weight
    sequence = manager.open()
    append(manager, sequence, 700)
    manager.attend(sequence, 0, torch.randn(2, 1, 16), AttendOptions(0.25))
    lines = {line.what: line for line in account(manager, model, [torch.zeros(7), torch.zeros(3)])}
    assert lines["weights and buffers"].bytes == (100 * 100 + 100) * 4
    assert lines["K and V of other caches"].bytes == 40
    kv = ("KV records, in use", "KV records, free", "exact sink", "exact tail", "exact, free")
    assert sum(lines[name].bytes or 0 for name in kv) == manager.memory().total
    assert (lines["kernel work space"].bytes or 0) > 0
    rest = lines["the rest of the process"]
    assert rest.how == "computed"
    assert 50 << 20 < (rest.bytes or 0) < 20 << 30
    assert all((line.bytes is None) == (line.how == "unobservable") for line in lines.values())


def test_without_psutil_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    rest = account(KVManager(LAYERS))[-1]
    assert (rest.bytes, rest.how) == (None, "unobservable")
    assert "pip install psutil" in rest.note


def metrics(manager: KVManager) -> str:
    registry = CollectorRegistry()
    registry.register(Collector(manager, "main"))
    return generate_latest(registry).decode()


def test_metrics_say_what_the_pool_says(tmp_path: Path) -> None:
    manager = KVManager(LAYERS, "kivi4")
    sequence = manager.open(list(range(700)), space(manager))
    append(manager, sequence, 700)
    manager.checkpoint(sequence)
    manager.open([*range(700), 5], space(manager))
    found = {
        (each.name, *(value for key, value in each.labels.items() if key in ("state", "kind"))): each.value
        for each in read(metrics(manager))
    }
    pool = manager.pool.stats()
    assert found["qkv_blocks", "held"] == pool.held > 0
    assert found["qkv_query_tokens_total",] == pool.query_tokens == 700 + 701
    assert found["qkv_hit_rate",] == pytest.approx(pool.hit_rate) != 0
    assert found["qkv_memory_bytes", "KV records, in use"] == manager.stats().records
    assert found["qkv_regretted_total",] == 0
    path = tmp_path / "metrics.prom"
    path.write_text(metrics(manager))
    console = Console(record=True, width=160)
    show(console, fetch(str(path)))
    shown = console.export_text()
    assert f"{pool.hit_rate:.1%}" in shown
    assert "exact tail" in shown


def test_stats_reads_a_running_process(tmp_path: Path) -> None:
    text = metrics(KVManager(LAYERS)).encode()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [sys.executable, "-c", "from qkv.cli import main; main()", "stats"]
        address = f"http://127.0.0.1:{server.server_address[1]}/metrics"
        done = subprocess.run([*command, address], capture_output=True, text=True, check=False, timeout=120)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert "cache main" in done.stdout
    (tmp_path / "other.prom").write_text("up 1\n")
    (tmp_path / "broken.prom").write_text("qkv_blocks{ 1 2 3\n")
    (tmp_path / "binary.prom").write_bytes(b"\xff\xfe\x00")
    for name in ("other.prom", "broken.prom", "binary.prom", "absent.prom"):
        with pytest.raises(InputError, match=r"metrics: got|stats: got"):
            show(Console(file=sys.stderr), fetch(str(tmp_path / name)))
    with pytest.raises(InputError, match=r"stats: got 'http://127\.0\.0\.1:9/metrics'"):
        fetch("http://127.0.0.1:9/metrics")


def test_readers_of_other_threads_never_disturb_the_engine() -> None:
    """One engine thread, four readers; every figure read is one that some moment had."""
    manager = KVManager(LAYERS, "kivi4", num_blocks=60)
    stop, errors, reads = threading.Event(), list[BaseException](), [0]

    def reader() -> None:
        try:
            while not stop.is_set():
                used, pool = manager.stats(), manager.pool.stats()
                assert 0 <= used.filled <= used.slots
                assert pool.free + pool.held + pool.evictable + pool.kept == pool.capacity <= 60
                manager.pool.events(manager.pool.snapshot()[0])
                manager.match(list(range(800)), space(manager))
                metrics(manager)
                reads[0] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=reader) for _ in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for number in range(60):
            tokens = list(range(number % 7, 600 + number % 7))
            sequence = manager.open(tokens, space(manager))
            append(manager, sequence, 600 - manager.length(sequence))
            manager.checkpoint(sequence)
            twin = manager.fork(sequence)
            manager.crop(twin, 300)
            append(manager, twin, 200)
            for each in (sequence, twin):
                manager.close(each)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
    assert not errors, errors[0]
    assert reads[0] > 10
    manager.check()
