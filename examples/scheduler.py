"""Continuous batching over KVManager in a page: a token budget, chunked prefill, sharing, preemption.

    python examples/scheduler.py --model smollm2-135m --requests 16

Every step takes one token of each running request and fills the rest of its token budget with chunks of waiting
prompts. A request takes over what earlier ones have computed of its prompt. When no block is left, the running request
that is cheapest to compute again gives up its blocks and waits for its turn; nothing else is lost.

`--check --dtype float32` compares every answer with that of the request alone. (In bfloat16 torch's own linear layers
round differently with more rows, so a near tie may fall otherwise.)
"""

import argparse
import time
from collections import deque
from dataclasses import dataclass, field

import torch
from prometheus_client import REGISTRY, start_http_server

from qkv import KVManager
from qkv.backends.packed import PackedModel
from qkv.errors import OutOfBlocks
from qkv.metrics import Collector
from qkv.models import load
from qkv.prefix import Namespace
from qkv.sequence import Sequence


@dataclass(eq=False)
class Request:
    """A prompt, and what has been made of it."""

    prompt: list[int]
    new_tokens: int
    made: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    preempted: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.made


class Scheduler:
    """Runs requests to their end. `computed`: tokens that went through the model."""

    def __init__(
        self,
        model: PackedModel,
        namespace: Namespace | None,
        *,
        token_budget: int = 512,
        chunk: int = 256,
        most_running: int = 8,
    ) -> None:
        self.model, self.manager, self.namespace = model, model.manager, namespace
        self.token_budget, self.chunk, self.most_running = token_budget, chunk, most_running
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.computed = self.steps = 0

    def run(self, requests: list[Request]) -> None:
        self.waiting.extend(requests)
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        """One forward pass over what fits."""
        self._admit()
        work = self._choose()
        while True:
            sequences = [request.sequence for request, _ in work]
            try:
                plan = self.manager.plan(sequences, [count for _, count in work])
                break
            except OutOfBlocks:
                if len(self.running) == 1:
                    raise  # alone, and still too large
                victim = min(self.running, key=self._loss)
                self._preempt(victim)
                work = [item for item in work if item[0] is not victim]
                if not work:
                    return
        ids, positions = [], []
        for request, count in work:
            at = self.manager.length(request.sequence)
            ids += request.tokens[at : at + count]
            positions += range(at, at + count)
        with plan as step:
            logits = self.model.forward(step, torch.tensor(ids), torch.tensor(positions))
        self.computed += len(ids)
        self.steps += 1
        for (request, _), row in zip(work, logits, strict=True):
            self._advance(request, row)

    def _admit(self) -> None:
        """Open waiting requests while their prompts are likely to fit."""
        while self.waiting and len(self.running) < self.most_running:
            request = self.waiting[0]
            room = self.manager.pool.available
            needed = len(request.tokens) // 128 + 1
            if self.running and room is not None and needed > room:
                return
            self.waiting.popleft()
            tokens = request.tokens
            request.sequence = (
                self.manager.open(tokens, self.namespace) if self.namespace is not None else self.manager.open()
            )
            self.running.append(request)

    def _choose(self) -> list[tuple[Request, int]]:
        """Decode steps first, then chunks of prompts, within the token budget."""
        left = {request: len(request.tokens) - self.manager.length(request.sequence) for request in self.running}
        work = [(request, 1) for request, count in left.items() if count == 1]
        budget = self.token_budget - len(work)
        for request, count in left.items():
            at = self.manager.length(request.sequence)
            count = min(count, self.chunk - at % self.chunk)  # chunks end at multiples: equal prompts are cut alike
            if left[request] > 1 and count <= budget:
                work.append((request, count))
                budget -= count
        return work

    def _advance(self, request: Request, logits: torch.Tensor) -> None:
        length = self.manager.length(request.sequence)
        if length < len(request.tokens):  # a chunk of a prompt
            if self.namespace is not None:
                self.manager.checkpoint(request.sequence)
            return
        token = int(logits.argmax())
        request.made.append(token)
        if self.namespace is not None:
            self.manager.name_tokens(request.sequence, [token])
        if len(request.made) == request.new_tokens:
            self.manager.close(request.sequence)
            self.running.remove(request)

    def _loss(self, request: Request) -> float:
        """Measured seconds of work lost for each byte that would be free."""
        freed, seconds = self.manager.cost(request.sequence)
        return seconds / freed if freed else float("inf")

    def _preempt(self, request: Request) -> None:
        """Its published blocks stay where they are until their place is needed, and are found again if they survive."""
        self.manager.close(request.sequence)
        request.sequence, request.preempted = None, request.preempted + 1
        self.running.remove(request)
        self.waiting.append(request)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--format", default="kivi4")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--check", action="store_true", help="run each request alone too; exit 1 if an answer differs")
    parser.add_argument("--metrics-port", type=int, help="serve metrics there, for `qkv stats`")
    options = parser.parse_args()
    loaded, tokenizer = load(options.model, options.dtype)
    manager = KVManager(loaded.config.num_hidden_layers, options.format, num_blocks=options.num_blocks)
    text = "The ledger of the harbour lists ships, cargoes and tolls. " * 80
    requests = [
        Request(tokenizer(text[: 900 + 200 * number] + f"Entry {number}:")["input_ids"], 12)
        for number in range(options.requests)
    ]
    layer = (loaded.config.num_key_value_heads, loaded.config.head_dim, str(loaded.dtype))
    name = Namespace(options.model, (layer,) * manager.num_layers, manager.format.id, 1, 128, manager.sink_tokens)
    if options.metrics_port is not None:
        REGISTRY.register(Collector(manager, options.model, loaded))
        start_http_server(options.metrics_port)
    scheduler = Scheduler(PackedModel(loaded, manager), name)
    began = time.perf_counter()
    scheduler.run(requests)
    seconds = time.perf_counter() - began
    wanted = sum(len(request.prompt) + request.new_tokens - 1 for request in requests)
    print(
        f"{len(requests)} requests in {scheduler.steps} steps, {seconds:.1f} s; {scheduler.computed} of {wanted} tokens"
    )
    print(f"preempted {sum(request.preempted for request in requests)} times; {manager.pool.stats()}")
    for request in requests[:3]:
        print(repr(tokenizer.decode(request.made)))
    if options.check:
        alone = [Request(request.prompt, request.new_tokens) for request in requests]
        for request in alone:
            own = KVManager(manager.num_layers, options.format)
            Scheduler(PackedModel(loaded, own), None).run([request])
        equal = sum(request.made == other.made for request, other in zip(requests, alone, strict=True))
        print(f"{equal} of {len(requests)} answers are those of one request at a time")
        raise SystemExit(equal < len(requests))


if __name__ == "__main__":
    main()
