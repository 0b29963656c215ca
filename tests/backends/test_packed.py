"""Continuous batching with the example scheduler: what each request gets alone, shared, preempted."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv import KVManager, models
from qkv.backends.packed import PackedModel
from qkv.errors import OutOfBlocks, ShapeError, UnsupportedModel
from qkv.prefix import Namespace

PLACE = Path(__file__).parent.parent.parent / "examples" / "scheduler.py"
found = importlib.util.spec_from_file_location("scheduler", PLACE)
assert found is not None
scheduler = importlib.util.module_from_spec(found)
found.loader.exec_module(scheduler)  # type: ignore[union-attr]  # a file has a loader


def namespace(manager: KVManager) -> Namespace:
    return Namespace("tiny", ((2, 16, "float32"),) * 3, manager.format.id, 1, 128, manager.sink_tokens)


def prompts(count: int, shared: int = 0) -> list[list[int]]:
    torch.manual_seed(8)
    start = torch.randint(3, 256, (shared,)).tolist()
    lengths = torch.randint(1, 500, (count,)).tolist()
    return [start + torch.randint(3, 256, (length,)).tolist() for length in lengths]


def run(model: Any, requests: list[Any], name: bool = False, **options: Any) -> Any:
    manager = KVManager(3, options.pop("format", "kivi4"), num_blocks=options.pop("num_blocks", None))
    made = scheduler.Scheduler(PackedModel(model, manager), namespace(manager) if name else None, **options)
    made.run(requests)
    manager.check()
    return made


def alone(model: Any, prompt: list[int], new_tokens: int, **options: Any) -> list[int]:
    request = scheduler.Request(prompt, new_tokens)
    run(model, [request], **options)
    made: list[int] = request.made
    return made


def test_sixteen_requests_are_each_alone(tiny: Any) -> None:
    model = tiny("llama")
    requests = [scheduler.Request(prompt, 8) for prompt in prompts(16)]
    made = run(model, requests)
    assert made.steps < sum(len(request.prompt) // 256 + 8 for request in requests) / 4, "they share steps"
    for request in requests:
        assert request.made == alone(model, request.prompt, 8)


def test_a_packed_step_is_transformers_own(tiny: Any, generate: Any) -> None:
    """`exact` against generate() with transformers' cache."""
    model = tiny("llama")
    ids = torch.tensor([prompts(1)[0]])
    want = generate(model, ids, None, max_new_tokens=12)[0, ids.shape[1] :].tolist()
    assert alone(model, ids[0].tolist(), 12, format="exact") == want


def test_requests_with_one_beginning_compute_it_once(tiny: Any) -> None:
    model = tiny("llama")
    requests = [scheduler.Request(prompt, 6) for prompt in prompts(8, shared=1024)]
    made = run(model, requests, name=True, most_running=1)
    everything = sum(len(request.prompt) + 5 for request in requests)
    assert made.computed == everything - 7 * 1024
    for request in requests:
        assert request.made == alone(model, request.prompt, 6)


def test_preemption_loses_nothing(tiny: Any) -> None:
    model = tiny("llama")
    requests = [scheduler.Request(prompt, 60) for prompt in prompts(6, shared=300)]
    made = run(model, requests, format="exact", num_blocks=12)
    assert sum(request.preempted for request in requests) > 0
    assert made.manager.pool.capacity <= 12
    for request in requests:
        assert request.made == alone(model, request.prompt, 60, format="exact")
    with pytest.raises(OutOfBlocks):
        run(model, [scheduler.Request(prompts(1, shared=1800)[0], 4)], num_blocks=8)


def test_a_real_model_answers_each_request_as_alone() -> None:
    """The example as a user runs it, with so few blocks that it has to preempt."""
    if os.environ.get("QKV_OFFLINE") == "1" and not models.is_cached("smollm2-135m"):
        pytest.skip("QKV_OFFLINE=1 and smollm2-135m is not in the cache")
    words = ["--requests", "8", "--dtype", "float32", "--num-blocks", "9", "--check"]
    done = subprocess.run([sys.executable, PLACE, *words], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 of 8 answers are those of one request at a time" in done.stdout
    assert "preempted 0 times" not in done.stdout


def test_what_cannot_be_packed_is_refused(tiny: Any) -> None:
    with pytest.raises(UnsupportedModel, match="sliding_attention"):
        PackedModel(tiny("gemma2"), KVManager(3))
    with pytest.raises(ShapeError, match="got 2 layers, wanted the model's 3"):
        PackedModel(tiny("llama"), KVManager(2))
    manager = KVManager(3)
    model = PackedModel(tiny("llama"), manager)
    with manager.plan([manager.open()], [3]) as step, pytest.raises(ShapeError, match=r"wanted \[3\] each"):
        model.forward(step, torch.tensor([4, 5]), torch.arange(2))
    manager.check()
