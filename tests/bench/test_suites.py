"""A small real run of every suite: finite numbers, the baselines present, errors below their bounds."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qkv.bench import contest, decode, divergence, errors, model, offload, prefill, seal, simulated
from qkv.bench.data import Geometry, capture, geometry_of, text_ids
from qkv.bench.rows import Row
from qkv.errors import FormatError, InputError

SMALL = Geometry(2, 2, 32, torch.bfloat16)
# bf16 rounds an output to 2**-9 of itself; the integer path may cost as much again
BF16_BOUND = 5e-3


class Tokenizer:
    """Bytes of the text, modulo the tiny model's vocabulary."""

    def __call__(self, text: str, **options: Any) -> Any:
        ids = torch.tensor([[byte % 256 for byte in text.encode()[:5000]]])
        return type("Encoding", (), {"input_ids": ids})()


@pytest.fixture(scope="module")
def tiny() -> Any:
    config = AutoConfig.for_model(
        "llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=256, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def by(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]


def test_decode() -> None:
    options = decode.DecodeOptions(
        SMALL, (300, 600), ("kivi2", "int8"), threads=1, rounds=3, layers=2, evict=0, case="test"
    )
    rows = decode.run(options)
    assert all(math.isfinite(row.value) and row.n >= 1 for row in rows if row.metric != "break_even")
    for context in (300, 600):
        times = [row for row in by(rows, metric="time", impl="qkv", format="kivi2") if row.shape.context == context]
        assert [row.baseline for row in times][1:] == ["read exact", "read kivi2"]
        assert str(times[0].baseline).startswith("sdpa ")
        for row in times:
            assert row.ratio is not None
            assert row.bytes is not None
            assert row.bytes < 2 * 2 * context * 32 * 2
            assert row.p20 is not None
            assert row.p80 is not None
            assert 0 < row.p20 <= row.value <= row.p80
            assert row.note, "which kernel served is not said"
        dense = [r for r in by(rows, metric="time", format="exact") if r.impl != "read" and r.shape.context == context]
        assert max(row.ratio or 0 for row in dense) == 1.0
        timed = by(rows, metric="time", impl="qkv") + dense
        assert all(0 < (row.error or 0) < BF16_BOUND for row in timed)
    for metric in ("slope", "intercept", "fit_residual", "break_even", "workspace"):
        assert by(rows, metric=metric, format="kivi2"), metric
    assert {row.threads for row in rows} == {1}


@pytest.mark.parametrize("q_len", [1, 5])
def test_default_and_precise_errors_are_numbers_below_their_bounds(q_len: int) -> None:
    for row in errors.random("decode", "test", SMALL, ("kivi2", "kivi4", "int8"), 600, q_len):
        assert 0 < row.value < (1e-4 if row.impl == "qkv precise" else 5e-3), (row.format, row.impl)


def test_prefill() -> None:
    options = prefill.PrefillOptions(SMALL, (256,), 40, ("kivi4",), threads=1, rounds=3, evict=0)
    rows = prefill.run(options)
    (timed,) = by(rows, metric="time", impl="qkv")
    assert timed.shape.context == 296
    assert timed.shape.q_len == 40
    assert str(timed.baseline).startswith("sdpa ")
    assert timed.error is not None
    assert by(rows, metric="workspace")[0].value > 0


def test_seal() -> None:
    rows = seal.run(seal.SealOptions(SMALL, 2, ("kivi2", "int8"), threads=1, rounds=3, evict=0))
    assert [(row.format, row.impl) for row in rows] == [
        ("exact", "copy"), ("kivi2", "qkv seal"), ("kivi2", "qkv unseal"), ("int8", "qkv seal"), ("int8", "qkv unseal"),
    ]  # fmt: skip
    assert all(row.value > 0 and row.baseline == "copy exact" for row in rows)


def test_sealing_as_a_share_of_prefill(tiny: Any) -> None:
    rows = seal.model_share(tiny, Tokenizer(), "tiny", 200, ("kivi2",), rounds=2)
    assert [row.metric for row in rows] == ["prefill", "share_of_prefill", "share_of_prefill"]
    assert [row.impl for row in rows] == ["DynamicCache", "qkv append", "qkv seal"]
    assert all(row.value > 0 for row in rows)


def test_capture_takes_every_layer_and_leaves_the_model_alone(tiny: Any) -> None:
    layers = capture(tiny, text_ids(Tokenizer(), 300))
    assert [(x.k.shape, x.v.shape, x.q.shape) for x in layers] == [((2, 300, 16), (2, 300, 16), (4, 300, 16))] * 2
    assert tiny.config._attn_implementation == "sdpa"
    assert geometry_of(tiny) == Geometry(2, 2, 16, torch.float32)
    rows = errors.captured("decode", "tiny", layers, ("kivi4",))
    assert [row.impl for row in rows] == ["qkv", "qkv precise"]
    assert all(0 < row.value < 5e-3 and row.n == 2 for row in rows)


def test_model(tiny: Any) -> None:
    options = model.ModelOptions("tiny", (100, 200), ("kivi4",), threads=1, rounds=3, peer_limit=100)
    rows = model.run(tiny, Tokenizer(), options)
    for length in (100, 200):
        at = [row for row in rows if row.shape.context == length]
        for metric in ("prefill", "decode"):
            run = {(r.impl, r.format, r.baseline) for r in by(at, metric=metric) if math.isfinite(r.value)}
            kinds = [("DynamicCache", "exact"), ("StaticCache", "exact"), ("QKVCache", "kivi4")]
            wanted = {(*kind, baseline) for kind in kinds for baseline in ("DynamicCache", "StaticCache")}
            assert wanted <= run
        for format in ("quanto4", "quanto2", "hqq4", "hqq2"):
            peers = by(at, format=format)
            assert peers
            assert all(math.isfinite(row.value) or row.note for row in peers)
            assert not any(math.isfinite(row.value) for row in peers if length > 100)
    assert tiny.config._attn_implementation == "sdpa"


def test_offload(tmp_path: Any) -> None:
    config = AutoConfig.for_model(
        "llama", hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=256, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    options = offload.OffloadOptions(
        "tiny", (1200,), 8, ("kivi2", "exact"), share=0.5, rounds=3, steps=3, folder=str(tmp_path), simulated=False
    )
    rows = offload.run(made, Tokenizer(), options, lambda text: None)
    assert all(math.isfinite(row.value) and row.value > 0 for row in rows)
    for impl in ("recompute, DynamicCache", "store, read ahead", "store, all layers first", "raw preadv", "in memory"):
        assert by(rows, impl=impl, metric="ttft"), impl
    (amplification,) = by(rows, metric="read amplification")
    assert 1 <= amplification.value < 1.2
    assert len(by(rows, metric="T/T*")) == 6
    steps = by(rows, metric="decode step")
    assert [row.impl for row in steps] == [
        "resident", "streamed, read ahead", "streamed, one layer at a time", "raw preadv",
    ]  # fmt: skip
    assert all("identical with resident: True" in row.note for row in steps[:3])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="wanted at most 2048 in all"):
        offload.run(made, Tokenizer(), replace(options, lengths=(2040,)), print)


def test_simulated_devices_say_so_and_come_near_the_ideal() -> None:
    model_ = simulated.Model("small", 12, 8, 8, 128, 1e10, 4e14, 3e12)
    rows = simulated.run(tokens=32768, question=512, rounds=2, model=model_)
    assert all("SIMULATED" in row.note and row.impl.startswith("simulated") for row in rows)
    assert all(0.85 < row.value < 4 for row in rows if row.unit == "x"), [row.value for row in rows]


def test_divergence_is_of_the_default_and_the_precise_path(tiny: Any) -> None:
    rows = divergence.run(tiny, Tokenizer(), "tiny", 300, ("kivi2",))
    assert [(row.impl, row.metric) for row in rows] == [("qkv", "kl"), ("qkv precise", "kl"), ("qkv", "kl_added")]
    default, precise, added = (row.value for row in rows)
    assert default > 0
    assert precise > 0
    assert 0 < added < 0.5, "random weights: the format's own loss is tiny"


def test_divergence_wants_float32(tiny: Any) -> None:
    with pytest.raises(InputError, match="wanted float32"):
        divergence.run(copy.deepcopy(tiny).bfloat16(), Tokenizer(), "tiny", 300, ("kivi2",))


def test_every_contestant_reads_the_same_tokens(tiny: Any) -> None:
    """Their caches end at the same length, and exact caches give the same logits."""
    kinds = model.kinds(tiny.config, ("exact",), peers=False)
    runner, ids = model.Runner(tiny), text_ids(Tokenizer(), 64)
    found = []
    for kind in kinds:
        cache = kind.make(65)
        runner.switch(kind)
        runner.forward(ids, cache)
        with torch.inference_mode():
            found.append(tiny(input_ids=ids[:, :1], **{runner.argument: cache}).logits)
        assert int(cache.get_seq_length()) == 65
    tiny.set_attn_implementation("sdpa")
    assert len(found) == 3
    assert all(torch.allclose(found[0], other, atol=1e-4) for other in found[1:])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (decode.DecodeOptions(SMALL, threads=0), "threads: got 0"),
        (decode.DecodeOptions(SMALL, threads=-1), "threads: got -1"),
        (decode.DecodeOptions(SMALL, contexts=()), "context: got none"),
        (decode.DecodeOptions(SMALL, contexts=(0,)), "context: got 0"),
        (decode.DecodeOptions(SMALL, contexts=(3,), q_len=4), "context: got 3, wanted at least 4"),
        (decode.DecodeOptions(SMALL, rounds=0), "rounds: got 0"),
        (decode.DecodeOptions(SMALL, layers=0), "layers: got 0"),
        (decode.DecodeOptions(SMALL, evict=-1), "evict: got -1"),
        (decode.DecodeOptions(SMALL, formats=()), "format: got none"),
        (decode.DecodeOptions(Geometry(0, 1, 64, torch.float32)), "kv_heads: got 0"),
        (prefill.PrefillOptions(SMALL, histories=(0,)), "history: got 0"),
        (prefill.PrefillOptions(SMALL, chunk=0), "chunk: got 0"),
        (seal.SealOptions(SMALL, blocks=0), "blocks: got 0"),
        (offload.OffloadOptions("m", share=1.0), "share: got 1.0"),
        (offload.OffloadOptions("m", rounds=1), "rounds: got 1"),
        (offload.OffloadOptions("m", folder="no/such"), "folder: got 'no/such'"),
        (model.ModelOptions("m", lengths=(20,)), "length: got 20, wanted at least 35"),
        (model.ModelOptions("m", prefill_rounds=0), "prefill_rounds: got 0"),
    ],
)
def test_bad_options_are_refused(options: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        options.check()


@pytest.mark.parametrize(
    ("geometry", "formats", "says"),
    [(SMALL, ("kivi9",), "got 'kivi9'"), (Geometry(1, 1, 40, torch.float32), ("kivi2",), "multiple of 16")],
)
def test_formats_that_cannot_be_are_refused(geometry: Geometry, formats: tuple[str, ...], says: str) -> None:
    for options in (decode.DecodeOptions, prefill.PrefillOptions, seal.SealOptions):
        with pytest.raises(FormatError, match=says):
            options(geometry, formats=formats).check()


def test_a_length_beyond_the_models_context_is_refused(tiny: Any) -> None:
    with pytest.raises(InputError, match="wanted at most 512"):
        model.run(tiny, Tokenizer(), model.ModelOptions("tiny", (513,)))


@pytest.mark.parametrize("op", [contest.OVER_RECORDS, contest.LONG_OVER_RECORDS, "seal", "unseal"])
def test_rows_can_name_the_kernel_of_every_op(op: str) -> None:
    assert contest.served_by(op)
