"""What one sequence takes over from another: the same state, proven by name, or nothing."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from qkv import AttendOptions, KVManager, Sequence, prefix
from qkv.errors import InputError, OutOfBlocks
from qkv.prefix import Namespace

OPTIONS = AttendOptions(0.25)
LAYERS, DIM = 2, 16


def namespace(manager: KVManager, **changes: Any) -> Namespace:
    made = Namespace("weights", ((1, DIM, "float32"),) * LAYERS, manager.format.id, 1, 128, manager.sink_tokens)
    return replace(made, **changes)


def kv(tokens: list[int], first: int, run: int = 0) -> torch.Tensor:
    """[2, 1, T, D]: K and V that depend on the token, its position and the run that computes them."""
    rows = [
        torch.randn(2, 1, 1, DIM, generator=torch.Generator().manual_seed(hash((token, at, run)) % 2**40))
        for at, token in enumerate(tokens, first)
    ]
    return torch.cat(rows, 2) if rows else torch.zeros(2, 1, 0, DIM)


def append(manager: KVManager, sequence: Sequence, tokens: list[int], run: int = 0) -> None:
    k, v = kv(tokens, manager.length(sequence), run)
    for layer in range(LAYERS):
        manager.append(sequence, layer, k + layer, v - layer)


def ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50000), k=count)


def bits(manager: KVManager, sequence: Sequence) -> list[torch.Tensor]:
    """Everything a later step could see."""
    view = [manager.view(sequence, layer) for layer in range(LAYERS)]
    return [part for each in view for part in (each.sink, each.records[each.block_ids], each.tail, each.block_lengths)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("format", ["kivi2", "int8"])
@pytest.mark.parametrize("length", [300, 448, 700])
def test_a_hit_goes_on_exactly_as_the_run_that_wrote_it(format: str, length: int) -> None:
    manager = KVManager(LAYERS, format)
    name, tokens = namespace(manager), ids(900)
    writer = manager.open(tokens, name)
    append(manager, writer, tokens[:length])
    assert manager.checkpoint(writer)
    at_checkpoint = bits(manager, writer)
    append(manager, writer, tokens[length:])
    manager.check()
    before = manager.pool.stats()
    match = manager.match(tokens, name)
    assert manager.pool.stats() == before, "a match has no side effects"
    assert (match.hit_tokens, match.tokens_left) == ({"device": length}, 900 - length)
    reader = manager.open(tokens, name)
    assert manager.length(reader) == length
    assert same(bits(manager, reader), at_checkpoint)
    found = len(reader.block_ids)
    append(manager, reader, tokens[length:])
    manager.check()
    assert same(bits(manager, reader), bits(manager, writer))
    assert reader.block_ids[:found] == writer.block_ids[:found] != ()
    manager.close(writer)
    manager.close(reader)
    manager.check()
    again = manager.open(tokens, name)
    assert same(bits(manager, again), at_checkpoint), "it outlives its sequences"


def test_the_longest_checkpoint_that_fits_is_taken() -> None:
    manager = KVManager(LAYERS, "kivi4")
    name, tokens = namespace(manager), ids(900)
    writer = manager.open(tokens, name)
    for length in (300, 400, 410, 800):
        append(manager, writer, tokens[manager.length(writer) : length])
        assert manager.checkpoint(writer)
    for asked, found in ((900, 800), (800, 410), (411, 410), (410, 400), (400, 300), (300, 0), (64, 0), (0, 0)):
        assert manager.length(manager.open(tokens[:asked], name)) == found
        hits = manager.match(tokens[:asked], name)
        assert sum(hits.hit_tokens.values()) == found
        assert hits.tokens_left == asked - found
    changed = [*tokens[:405], 7, *tokens[406:]]
    assert manager.length(manager.open(changed, name)) == 400
    manager.check()


def test_blocks_without_a_checkpoint_only_on_request() -> None:
    manager = KVManager(LAYERS, "kivi4")
    name, tokens = namespace(manager), ids(700)
    append(manager, manager.open(tokens, name), tokens)
    assert manager.length(manager.open(tokens, name)) == 0
    reader = manager.open(tokens, name, reuse="blocks")
    assert manager.length(reader) == 64 + 4 * 128
    assert manager.match(tokens, name, reuse="blocks").tokens_left == 700 - 576
    append(manager, reader, tokens[576:])
    manager.check()
    with pytest.raises(InputError, match="reuse: got 'some'"):
        manager.open(tokens, name, reuse="some")


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "w2"}, {"geometry": ((1, DIM, "float16"),) * LAYERS}, {"rope": "linear 2"}, {"adapter": "lora"},
        {"shard": "1/2"}, {"numerics": "chunks of 512"}, {"salt": "tenant b"}, {"layout_version": 2},
    ],
)  # fmt: skip
def test_another_namespace_never_shares(change: dict[str, Any]) -> None:
    manager = KVManager(LAYERS, "kivi4")
    name, tokens = namespace(manager), ids(700)
    writer = manager.open(tokens, name)
    append(manager, writer, tokens)
    assert manager.checkpoint(writer)
    longer = [*tokens, 1]
    assert manager.length(manager.open(longer, name)) == 700
    for reuse in ("same", "blocks"):
        assert manager.length(manager.open(longer, replace(name, **change), reuse=reuse)) == 0
        assert manager.match(longer, replace(name, **change), reuse=reuse).hit_tokens == {}


def test_a_collision_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every link of a sequence has the name it would have with any other tokens."""
    names = iter(range(10**6))
    monkeypatch.setattr(prefix, "link", lambda parent, content: next(names).to_bytes(32, "big"))
    manager = KVManager(LAYERS, "kivi4")
    name, tokens = namespace(manager), ids(700)
    writer = manager.open(tokens, name)
    append(manager, writer, tokens)
    assert manager.checkpoint(writer)
    for other in (ids(701, seed=2), [*tokens[:100], 9, *tokens[101:], 5], [*tokens[:690], 9, *tokens[691:], 5]):
        names = iter(range(10**6))
        refused = manager.pool.stats().refused
        taken = manager.open(other, name)
        assert manager.length(taken) == 0
        assert manager.pool.stats().refused == refused + (other[:600] != tokens[:600])
    names = iter(range(10**6))
    assert manager.length(manager.open([*tokens, 1], name)) == 700


def test_a_run_that_computed_equal_tokens_otherwise_keeps_its_own_bytes() -> None:
    manager = KVManager(LAYERS, "kivi4")
    name, shared = namespace(manager), ids(400)
    runs, wanted = [[*shared, *ids(300, seed=run)] for run in (1, 2)], []
    for run, tokens in enumerate(runs):
        writer = manager.open(tokens, name)
        append(manager, writer, tokens, run)
        assert manager.checkpoint(writer)
        wanted.append(bits(manager, writer))
        manager.close(writer)
    manager.check()
    assert not same(*wanted)
    for tokens, want in zip(runs, wanted, strict=True):
        reader = manager.open([*tokens, 1], name)
        assert manager.length(reader) == 700
        assert same(bits(manager, reader), want)
    manager.check()


def test_pressure_drops_checkpoints_then_refuses_and_loses_nothing() -> None:
    manager = KVManager(LAYERS, "kivi4", num_blocks=6)
    name, tokens = namespace(manager), ids(700)
    writer = manager.open(tokens, name)
    append(manager, writer, tokens)
    assert manager.checkpoint(writer)
    manager.close(writer)
    other = manager.open(ids(700, seed=3), name)
    append(manager, other, ids(700, seed=3))  # evicts
    manager.check()
    assert manager.length(manager.open([*tokens, 1], name)) == 0
    want = bits(manager, other)
    with pytest.raises(OutOfBlocks):
        append(manager, manager.open(), ids(700, seed=4))
    assert same(bits(manager, other), want)
    manager.check()


def test_a_private_block_makes_room() -> None:
    manager = KVManager(LAYERS, "kivi4", num_blocks=9)
    name, tokens = namespace(manager), ids(700)
    for run in range(2):
        writer = manager.open(tokens, name)
        append(manager, writer, tokens, run)
        assert manager.checkpoint(writer)  # the same place is kept once
        manager.close(writer)
    first = manager.open([*tokens[:500], *ids(200, seed=5)], name)
    append(manager, first, [*tokens[:500], *ids(200, seed=5)], 7)
    manager.checkpoint(first)
    manager.close(first)
    big = manager.open()
    append(manager, big, ids(64 + 9 * 128 + 64))
    manager.check()


def test_names_follow_crops_and_forks() -> None:
    manager = KVManager(LAYERS, "kivi4")
    name, tokens = namespace(manager), ids(700)
    writer = manager.open(tokens[:600], name)
    append(manager, writer, tokens[:600])
    twin = manager.fork(writer)
    manager.crop(twin, 590)  # inside the tail
    manager.name_tokens(twin, ids(110, seed=8))
    append(manager, twin, ids(110, seed=8))
    assert manager.checkpoint(twin)
    assert manager.length(manager.open([*tokens[:590], *ids(110, seed=8), 1], name)) == 700
    manager.crop(writer, 300)  # inside a block: what comes now has no names
    append(manager, writer, ids(300, seed=9))
    assert not manager.checkpoint(writer)
    with pytest.raises(InputError, match="has no names"):
        manager.name_tokens(writer, [1])
    manager.check()


def test_wrong_namespaces_are_refused() -> None:
    manager = KVManager(LAYERS, "kivi4")
    for change in ({"block_tokens": 64}, {"sink_tokens": 0}, {"format": "kivi2"}):
        with pytest.raises(InputError, match="this manager's"):
            manager.open([1], namespace(manager, **change))
    with pytest.raises(InputError, match="without a namespace"):
        manager.open([1])


def machine(seed: int, steps: int) -> None:
    """Any calls in any order; `exact` loses nothing, so what is stored must be what a list of tokens says."""
    rng = random.Random(seed)
    manager = KVManager(
        LAYERS, "exact", sink_tokens=rng.choice([0, 5, 64]), tail_tokens=rng.choice([0, 7, 64]), num_blocks=40
    )
    name = namespace(manager)
    pool = [ids(900, seed=at) for at in range(3)]  # prompts with shared beginnings
    prompts = [*pool, [*pool[0][:400], *pool[1][400:]], [*pool[0][:650], *pool[2][650:]]]
    held: dict[int, tuple[Sequence, list[int], list[int]]] = {}  # its tokens, and what is left of its prompt
    for _ in range(steps):
        verb = rng.choice(["open", "append", "append", "append", "fork", "crop", "keep", "close", "evict"])
        if verb == "open" or not held:
            prompt = rng.choice(prompts)[: rng.randint(1, 900)]
            sequence = manager.open(prompt, name, reuse=rng.choice(["same", "blocks"]))
            length = manager.length(sequence)
            held[sequence.id] = sequence, prompt[:length], prompt[length:]
        else:
            sequence, tokens, left = held[rng.choice(list(held))]
            if verb == "append":
                count = rng.choice([0, 1, 5, 127, 128, 300])
                more, left = left[:count], left[count:]
                try:
                    append(manager, sequence, more)
                except OutOfBlocks:
                    left, more = [*more, *left], []
                held[sequence.id] = sequence, tokens + more, left
            elif verb == "fork" and len(held) < 8:
                twin = manager.fork(sequence)
                held[twin.id] = twin, tokens, left
            elif verb == "crop":
                length = rng.randint(0, len(tokens))
                manager.crop(sequence, length)
                held[sequence.id] = sequence, tokens[:length], [] if length < len(tokens) else left
            elif verb == "keep":
                manager.checkpoint(sequence)
            elif verb == "close":
                manager.close(sequence)
                del held[sequence.id]
            else:
                manager.pool.evict(rng.randint(0, 3))
        manager.check()
        for sequence, tokens, _ in held.values() if rng.random() < 0.1 else ():
            assert manager.length(sequence) == len(tokens)
            if tokens:
                want = kv(tokens, 0)
                assert torch.equal(torch.stack(manager.gather(sequence, 1)), torch.stack([want[0] + 1, want[1] - 1]))


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_calls(seed: int) -> None:
    machine(seed, 150)


@pytest.mark.heavy
@pytest.mark.timeout(3000)
def test_any_order_of_calls_for_20000_steps() -> None:
    for seed in range(100, 140):
        machine(seed, 500)
