"""What users do with a cache: padding, beams, rollback, chunks, turns; and what must be refused."""

import warnings
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from qkv.backends.transformers import QKVCache, enable
from qkv.errors import FormatError, ShapeError, UnsupportedModel

V4 = transformers.__version__.startswith("4.")


@pytest.fixture
def model(tiny: Any) -> Any:
    model = tiny("qwen2")
    enable(model)
    return model


@pytest.fixture
def ids() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randint(3, 256, (1, 400))


def records_of(cache: QKVCache, row: int = 0, layer: int = 0) -> torch.Tensor:
    held = cache.manager._layers.records.records(layer)
    assert held is not None
    return held[list(cache.rows.sequences[row].block_ids)].clone()


@pytest.mark.parametrize("format", ["exact", "kivi2"])
def test_padded_batch_of_three_equals_three_single_runs(format: str, model: Any, generate: Any) -> None:
    lengths, width = (400, 283, 351), 400
    torch.manual_seed(4)
    batch, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    singles = []
    for row, length in enumerate(lengths):
        batch[row, width - length :] = torch.randint(3, 256, (length,))
        mask[row, width - length :] = 1
        singles.append(generate(model, batch[row : row + 1, width - length :], QKVCache(model.config, format)))
    cache = QKVCache(model.config, format)
    together = generate(model, batch, cache, mask)
    cache.manager.check()
    for row, (length, single) in enumerate(zip(lengths, singles, strict=True)):
        assert torch.equal(together[row, width - length :], single[0])
        assert cache.manager.length(cache.rows.sequences[row]) == length + 19, "padding must not be stored"


def test_padding_never_enters_a_record(model: Any) -> None:
    """The same K and V with and without padding give the same bytes."""
    k, v = torch.randn(2, 1, 2, 400, 16)
    padded, plain = QKVCache(model.config, "kivi2"), QKVCache(model.config, "kivi2")
    mask = torch.zeros(1, 450, dtype=torch.bool)
    mask[:, 50:] = True
    pad = torch.randn(1, 2, 50, 16) * 100
    for layer in range(3):
        padded.update(torch.cat([pad, k], 2), torch.cat([pad, v], 2), layer)
        padded.layers[layer].commit(padded.rows.step_mask(layer, mask, 450))
        plain.update(k, v, layer)
        plain.layers[layer].commit(None)
    assert torch.equal(records_of(padded), records_of(plain))
    dense = padded.rows.dense(0)[0]
    assert dense.shape == (1, 2, 450, 16)
    assert (dense[:, :, :50] == 0).all()
    assert torch.equal(dense[:, :, 50:], plain.rows.dense(0)[0])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_beam_search(family: str, tiny: Any, generate: Any, ids: torch.Tensor) -> None:
    model = tiny(family)
    want = generate(model, ids, DynamicCache(config=model.config), num_beams=3)
    enable(model)
    cache = QKVCache(model.config, "exact")
    assert torch.equal(generate(model, ids, cache, num_beams=3), want)
    cache.manager.check()


def test_beams_share_records(model: Any, call: Any, ids: torch.Tensor) -> None:
    cache = QKVCache(model.config, "kivi2")
    call(model, ids, cache)
    alone = cache.memory()
    cache.batch_repeat_interleave(4)
    assert len({tuple(sequence.block_ids) for sequence in cache.rows.sequences}) == 1
    assert cache.memory() == alone, "exact pieces are shared too, until a row writes"
    assert alone.records > 0
    cache.manager.check()


@pytest.mark.parametrize("attention", ["qkv", "eager"])
@pytest.mark.parametrize("chunk", [None, 150])
def test_equal_rows_are_stored_once(
    attention: str, chunk: int | None, tiny: Any, generate: Any, call: Any, ids: torch.Tensor
) -> None:
    """`generate` repeats a prompt for each beam and sample before it is read; other rows stay by themselves."""
    model = tiny("llama")
    if attention == "qkv":
        enable(model)
    else:
        warnings.filterwarnings("ignore", message="qkv: an attention other than qkv's")
    other = ids.flip(1)
    batch, alone, both = torch.cat([ids, other, ids, ids]), *(QKVCache(model.config, "kivi4") for _ in range(2))
    for first in range(0, 400, chunk or 400):
        part = slice(first, first + (chunk or 400))
        call(model, ids[:, part], alone)
        call(model, batch[:, part], both)
    assert both.held().records == 2 * alone.held().records > 0
    assert both.memory().total <= 2.3 * alone.memory().total
    both.manager.check()
    tokens = torch.tensor([[5], [6], [7], [5]])
    got = call(model, tokens, both).logits
    want = [call(model, token[None], cache).logits for token, cache in ((tokens[0], alone.fork()), (tokens[2], alone))]
    for row, expected in ((0, want[0]), (3, want[0]), (2, want[1])):
        torch.testing.assert_close(got[row], expected[0])
    both.manager.check()
    samples = QKVCache(model.config, "kivi4")
    generate(model, ids, samples, num_return_sequences=3, do_sample=True)
    assert len({sequence.block_ids[0] for sequence in samples.rows.sequences}) == 1


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_prompt_lookup_decoding_crops(family: str, tiny: Any, generate: Any) -> None:
    model = tiny(family)
    torch.manual_seed(5)
    ids = torch.randint(3, 256, (1, 40)).repeat(1, 8)  # repetition, so that candidates are found
    enable(model)
    options = {"max_new_tokens": 30, "eos_token_id": 2}  # 4.57 cannot look up without an end token
    plain = generate(model, ids, QKVCache(model.config, "exact"), **options)
    cache = QKVCache(model.config, "exact")
    looked_up = generate(model, ids, cache, prompt_lookup_num_tokens=5, **options)
    assert torch.equal(looked_up, plain)
    cache.manager.check()


def test_chunked_prefill(model: Any, generate: Any, ids: torch.Tensor) -> None:
    want = generate(model, ids, QKVCache(model.config, "exact"))
    cache = QKVCache(model.config, "exact")
    assert torch.equal(generate(model, ids, cache, prefill_chunk_size=64), want)
    quantised = QKVCache(model.config, "kivi4")
    generate(model, ids, quantised, prefill_chunk_size=64)
    once = QKVCache(model.config, "kivi4")
    generate(model, ids, once)
    assert [len(s.block_ids) for s in quantised.rows.sequences] == [len(s.block_ids) for s in once.rows.sequences]


@pytest.mark.parametrize("format", ["exact", "kivi4"])
def test_second_turn_on_the_same_cache(format: str, model: Any, generate: Any, ids: torch.Tensor) -> None:
    cache = QKVCache(model.config, format)
    first = generate(model, ids[:, :300], cache)
    before = records_of(cache)
    second = torch.cat([first, ids[:, 300:]], dim=1)
    out = generate(model, second, cache)
    assert torch.equal(records_of(cache)[: len(before)], before)
    if format == "exact":
        assert torch.equal(out, generate(model, second, QKVCache(model.config, format)))


def test_old_records_survive_tokens_crop_fork_and_beams(
    model: Any, call: Any, generate: Any, ids: torch.Tensor
) -> None:
    cache = QKVCache(model.config, "kivi2")
    call(model, ids, cache)
    old = records_of(cache)
    assert len(old) == 2
    for _ in range(10):
        call(model, torch.randint(3, 256, (1, 100)), cache)
    twin = cache.fork()
    cache.crop(-500)
    call(model, torch.randint(3, 256, (1, 300)), cache)
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    call(model, torch.randint(3, 256, (3, 200)), cache)
    cache.manager.check()
    for row in range(3):
        assert torch.equal(records_of(cache, row)[:2], old)
    assert torch.equal(records_of(twin)[:2], old)
    twin.reset()
    cache.reset()
    cache.manager.check()
    assert cache.manager._ledger.pieces.num_free == cache.manager._ledger.pieces.capacity
    assert torch.isfinite(call(model, ids, cache).logits).all()


def test_the_quantised_cache_is_really_read(model: Any, call: Any, ids: torch.Tensor) -> None:
    cache = QKVCache(model.config, "kivi2")
    call(model, ids, cache)
    twin = cache.fork()
    clean = call(model, ids[:, :1], twin).logits
    cache.manager._layers.records.records(1)[cache.rows.sequences[0].block_ids[0]] ^= 85  # type: ignore[index]  # it is there
    assert not torch.equal(call(model, ids[:, :1], cache).logits, clean)


def test_crop_in_every_spelling(model: Any, call: Any, ids: torch.Tensor) -> None:
    cache = QKVCache(model.config, "kivi4")
    call(model, ids, cache)
    cache.crop(-10)
    assert cache.get_seq_length() == 390
    cache.crop(385)
    assert cache.get_seq_length() == 385
    cache.crop(9999)
    assert cache.get_seq_length() == 385
    with pytest.raises(ShapeError, match="got -386, wanted at least -385"):
        cache.crop(-386)
    cache.crop(0)
    assert cache.get_seq_length() == (0 if V4 else 385)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_any_other_attention_gets_dequantised_tensors(
    implementation: str, tiny: Any, call: Any, ids: torch.Tensor
) -> None:
    model = tiny("llama", implementation)
    want = [call(model, ids, reference := DynamicCache(config=model.config)), call(model, ids[:, :3], reference)]
    cache = QKVCache(model.config, "exact")
    first = call(model, ids, cache)
    with pytest.warns(UserWarning, match="enable"):
        second = call(model, ids[:, :3], cache)
    assert (first.logits - want[0].logits).abs().max() <= 1e-4
    assert (second.logits - want[1].logits).abs().max() <= 1e-4


def test_a_four_dimensional_mask_is_obeyed(tiny: Any, call: Any, ids: torch.Tensor) -> None:
    model = tiny("llama")
    short = ids[:, :60]
    mask = torch.full((1, 1, 60, 60), torch.finfo(torch.float32).min).triu(1)
    mask[..., :, 5:9] = torch.finfo(torch.float32).min
    mask[..., range(5, 9), range(5, 9)] = 0
    want = call(model, short, DynamicCache(config=model.config), mask).logits
    enable(model)
    got = call(model, short, QKVCache(model.config, "exact"), mask).logits
    assert (got - want).abs().max() <= 1e-4


def test_attention_without_any_cache(tiny: Any, ids: torch.Tensor) -> None:
    model = tiny("gemma2")
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        enable(model)
        assert (model(ids, use_cache=False).logits - want).abs().max() <= 1e-4


def test_nothing_is_dequantised_while_qkv_attends(
    model: Any, generate: Any, ids: torch.Tensor, monkeypatch: Any
) -> None:
    from qkv.backends.layer import QKVLayer

    calls = []
    monkeypatch.setattr(QKVLayer, "dense", lambda self, side: calls.append(side))
    generate(model, ids, QKVCache(model.config, "kivi4"))
    assert calls == []


def test_wrong_use_is_refused(model: Any, call: Any, ids: torch.Tensor) -> None:
    with pytest.raises(FormatError, match="kivi4"):
        QKVCache(model.config, "kivi7")
    with pytest.raises(ShapeError, match="sliding"):
        QKVCache(model.config, "kivi4", sliding="maybe")
    cache = QKVCache(model.config, "kivi4")
    mask = torch.ones(1, 400, dtype=torch.long)
    mask[:, :7] = 0
    call(model, ids, cache, mask)
    changed = torch.ones(1, 401, dtype=torch.long)
    changed[:, :3] = 0
    with pytest.raises(ShapeError, match="changes position 3"):
        call(model, ids[:, :1], cache, changed)
    cache.reset()
    call(model, ids, cache)
    two_rows = ids[:, :1].repeat(2, 1)
    with pytest.raises(ShapeError, match="got 2 rows"):
        call(model, two_rows, cache)
    assert cache.get_seq_length() == 400
    assert torch.isfinite(call(model, ids[:, :1], cache).logits).all()
    with pytest.raises(UnsupportedModel, match="differ in shape"):
        QKVCache(model.config).update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 8), 0)


@pytest.mark.filterwarnings("ignore:`output_attentions=True`:UserWarning")  # 4.57 warns as well
def test_output_attentions_and_training_are_refused(model: Any, call: Any, generate: Any, ids: torch.Tensor) -> None:
    with pytest.raises(UnsupportedModel, match="output_attentions"):
        call(model, ids, QKVCache(model.config), output_attentions=True)
    with pytest.raises(UnsupportedModel, match="output_attentions"):
        generate(model, ids, QKVCache(model.config), output_attentions=True, return_dict_in_generate=True)
    model.train()
    with pytest.raises(UnsupportedModel, match="training"):
        model(ids)
    model.eval()


def test_latent_attention_is_refused_by_name(tiny: Any) -> None:
    overrides = {
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model("deepseek_v3", num_hidden_layers=2, **overrides)
    with pytest.raises(UnsupportedModel, match="MLA"):
        QKVCache(config)


def test_linear_attention_layers_stay_with_transformers(tiny: Any, call: Any, ids: torch.Tensor) -> None:
    """Only a plain attention layer of a hybrid is quantised; the report names the others and says why."""
    if V4:
        with pytest.raises(UnsupportedModel, match="jamba has state-space layers"):
            QKVCache(transformers.JambaConfig())
    model = tiny("lfm2", "sdpa", num_hidden_layers=2, full_attn_idxs=[1], layer_types=["conv", "full_attention"])
    want = call(model, ids, None).logits
    if V4:
        with pytest.raises(UnsupportedModel, match="lfm2 has conv layers"):
            QKVCache(model.config, "exact")
        return
    enable(model)
    cache = QKVCache(model.config, "exact")
    conv, attention = cache.report()
    assert (conv.held_by.split()[0], conv.format) == ("transformers", "exact")
    assert "not a plain attention layer" in conv.reason
    assert attention.held_by == "qkv"
    call(model, ids[:, :300], cache)
    got = [call(model, ids[:, i : i + 1], cache).logits for i in range(300, 400)]
    assert (torch.cat(got, 1) - want[:, 300:]).abs().max() <= 1e-4


@pytest.mark.parametrize("format", ["exact", "kivi4"])
def test_an_all_sliding_model_gives_back_what_its_window_has_passed(tiny: Any, generate: Any, format: str) -> None:
    model = tiny("mistral", implementation="qkv")
    ids = torch.randint(3, 256, (2, 40))
    slides, keeps = QKVCache(model.config, format), QKVCache(model.config, format)
    assert slides.manager.window == 64
    keeps.manager._ledger.window = None
    tokens = [generate(model, ids, cache, max_new_tokens=700) for cache in (slides, keeps)]
    assert torch.equal(*tokens)
    slides.manager.check()
    assert slides.held().total < keeps.held().total * (0.75 if format == "exact" else 0.9)
    ends = {"max_new_tokens": 300, "eos_token_id": 2, "suppress_tokens": [2]}  # 4.57 cannot look up without an end
    drafted = generate(model, ids[:1], QKVCache(model.config, format), prompt_lookup_num_tokens=8, **ends)
    assert torch.equal(drafted, generate(model, ids[:1], QKVCache(model.config, format), **ends))
