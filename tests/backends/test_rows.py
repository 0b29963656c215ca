"""Batch rows: padded rows through crop, fork and reorder; layers that stay with transformers; steps that fail."""

import inspect
import warnings
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache

from qkv.backends.transformers import QKVCache, enable
from qkv.errors import FormatError, QkvError, ShapeError

LENGTHS = (300, 220, 271)


@pytest.fixture
def padded() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(6)
    ids, mask = torch.randint(3, 256, (3, 300)), torch.ones(3, 300, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        mask[row, : 300 - length] = 0
    return ids, mask


def step(rows: int) -> torch.Tensor:
    return torch.arange(rows * 4).view(rows, 4) % 200 + 3


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("verb", ["crop", "fork", "reorder", "select", "mask", "negative", "repeat"])
def test_padded_rows_after_every_row_operation(
    family: str, verb: str, tiny: Any, call: Any, padded: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """The next step gives what one single run a row gives."""
    if (family, verb) == ("gemma2", "crop"):
        pytest.skip("transformers' sliding layers cannot crop past their window; test_a_refused_crop_changes_nothing")
    model = tiny(family)
    enable(model)
    ids, mask = padded
    cache = QKVCache(model.config, "exact")
    call(model, ids, cache, mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    width, rows = 300, [0, 1, 2]
    if verb == "crop":
        cache.crop(-90)
        width = 210
    elif verb == "fork":
        cache = cache.fork()
    elif verb == "reorder":
        rows = [2, 0, 0]
        cache.reorder_cache(torch.tensor(rows))
    elif verb == "repeat":
        rows = [0, 0, 1, 1, 2, 2]
        cache.batch_repeat_interleave(2)
    else:
        chosen = {"select": [2, 1], "mask": [True, False, True], "negative": [-1, 0]}[verb]
        rows = {"select": [2, 1], "mask": [0, 2], "negative": [2, 0]}[verb]
        cache.batch_select_indices(torch.tensor(chosen))
    cache.manager.check()
    whole = torch.cat([mask[rows, :width], torch.ones(len(rows), 4, dtype=torch.long)], dim=1)
    positions = (whole.cumsum(1) - 1)[:, -4:]
    got = call(model, step(len(rows)), cache, whole, position_ids=positions).logits
    for at, row in enumerate(rows):
        alone = torch.cat(
            [ids[row : row + 1, :width][:, mask[row, :width].bool()], step(len(rows))[at : at + 1]], dim=1
        )
        want = call(model, alone, DynamicCache(config=model.config)).logits[:, -4:]
        assert (got[at] - want[0]).abs().max() <= 1e-4


def test_rows_that_do_not_exist_are_refused(tiny: Any, call: Any, padded: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = tiny("llama")
    enable(model)
    cache = QKVCache(model.config, "kivi4")
    call(model, padded[0], cache)
    for wrong in (torch.tensor([3]), torch.tensor([], dtype=torch.long), torch.tensor([True, False])):
        with pytest.raises(ShapeError, match="rows: got"):
            cache.batch_select_indices(wrong)
    assert len(cache.rows.sequences) == 3
    assert torch.isfinite(call(model, step(3), cache).logits).all()


def test_a_refused_crop_changes_nothing(tiny: Any, call: Any, padded: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = tiny("gemma2")
    enable(model)
    cache = QKVCache(model.config, "kivi4")
    call(model, padded[0], cache)
    with pytest.raises(Exception, match=r"(?i)sliding|window|crop"):
        cache.crop(-10)
    assert {layer.get_seq_length() for layer in cache.layers} == {300}


def test_memory_counts_what_transformers_holds(tiny: Any, call: Any, padded: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = tiny("gemma2")
    enable(model)
    cache = QKVCache(model.config, "kivi4")
    call(model, padded[0], cache)
    others = sum(
        getattr(layer, side).untyped_storage().nbytes()
        for layer, row in zip(cache.layers, cache.report(), strict=True)
        if row.held_by != "qkv"
        for side in ("keys", "values")
    )
    assert others > 0
    assert cache.memory().total == cache.manager.memory().total + others
    cache.reset()
    assert all(layer.get_seq_length() == 0 for layer in cache.layers)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_static_cache_keeps_its_results(
    family: str, tiny: Any, call: Any, padded: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """A static cache has places behind the newest token that hold nothing."""
    model = tiny(family)
    ids = padded[0][:1, :90]

    def run() -> torch.Tensor:
        cache = StaticCache(config=model.config, max_cache_len=200)
        first = call(model, ids, cache, cache_position=torch.arange(90), position_ids=torch.arange(90).unsqueeze(0))
        place = torch.arange(90, 94)
        second = call(model, step(1), cache, cache_position=place, position_ids=place.unsqueeze(0))
        return torch.cat([first.logits, second.logits], dim=1)

    want = run()
    enable(model)
    assert (run() - want).abs().max() <= 1e-4


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="4.57's models take no attention function here")
@pytest.mark.parametrize("family", ["qwen2_moe", "phimoe"])
def test_a_window_that_only_the_mask_knows(
    family: str, tiny: Any, call: Any, padded: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """These models never pass their window to attention, only to the mask."""
    sizes = {
        "qwen2_moe": {"num_experts": 2, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 3},
        "phimoe": {"num_local_experts": 2},
    }[family]
    model = tiny(family, sliding_window=64, num_experts_per_tok=2, **sizes)
    assert all(layer.is_sliding for layer in DynamicCache(config=model.config).layers)
    assert "sliding_window" not in inspect.getsource(type(model.model.layers[0].self_attn).forward)
    ids = padded[0][:1]

    def run(cache: Any) -> torch.Tensor:
        return torch.cat([call(model, ids[:, i : i + 50], cache).logits for i in range(0, 300, 50)], dim=1)

    want = run(DynamicCache(config=model.config))
    enable(model)
    for cache in (DynamicCache(config=model.config), QKVCache(model.config, "exact", sliding="quantised")):
        assert (run(cache) - want).abs().max() <= 1e-4


def test_padding_behind_a_crop_replaces_what_was_there(
    tiny: Any, call: Any, padded: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """A row that is padded in the step after a crop keeps only its own tokens, and the next step accepts the mask."""
    model = tiny("llama")
    enable(model)
    ids, mask = padded
    cache = QKVCache(model.config, "exact")
    call(model, ids, cache, mask)
    cache.crop(-90)
    new = torch.ones(3, 4, dtype=torch.long)
    new[1, :3] = 0
    whole = torch.cat([mask[:, :210], new], dim=1)
    call(model, step(3), cache, whole)
    assert [cache.manager.length(row) for row in cache.rows.sequences] == whole.sum(1).tolist()
    call(model, step(3), cache, torch.cat([whole, torch.ones(3, 4, dtype=torch.long)], dim=1))
    cache.manager.check()


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_a_four_dimensional_mask_with_soft_cap_and_sinks(
    family: str, tiny: Any, call: Any, padded: tuple[torch.Tensor, torch.Tensor]
) -> None:
    model = tiny(family)
    ids = padded[0][:1, :60]
    mask = torch.full((1, 1, 60, 60), torch.finfo(torch.float32).min).triu(1)
    mask[..., 20:, 5:9] = torch.finfo(torch.float32).min
    want = call(model, ids, DynamicCache(config=model.config), mask).logits
    enable(model)
    assert (call(model, ids, QKVCache(model.config, "exact"), mask).logits - want).abs().max() <= 1e-4


def test_encoder_and_cross_attention(padded: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Not causal: padded keys, more queries than keys, a bidirectional encoder."""
    from transformers import BartConfig, BartModel

    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=256, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = BartModel(config).eval()
    ids, mask = padded[0][:2, :20], torch.ones(2, 20, dtype=torch.long)
    mask[0, 15:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": padded[0][:2, :50], "use_cache": False}
    with torch.no_grad():
        want = model(**inputs).last_hidden_state
        enable(model)
        assert (model(**inputs).last_hidden_state - want).abs().max() <= 1e-4


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("tokens", [1, 4, 200])
def test_a_step_that_fails_is_taken_back(
    layer: int, tokens: int, tiny: Any, call: Any, padded: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """The next call gives what a cache gives that never saw the step; 200 tokens seal blocks in the layers before."""
    model = tiny("llama")
    enable(model)
    cache, undisturbed = QKVCache(model.config, "kivi4"), QKVCache(model.config, "kivi4")
    for each in (cache, undisturbed):
        call(model, padded[0], each)
    weight = model.model.layers[layer].self_attn.k_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = float("nan")
    with pytest.raises(FormatError, match="k: got nan"):
        call(model, padded[0][:, :tokens], cache)
    with torch.no_grad():
        weight.copy_(kept)
    assert cache.memory().total > 0
    cache.manager.check()
    for _ in range(2):
        got, want = (call(model, step(3), each).logits for each in (cache, undisturbed))
        assert torch.equal(got, want)
    cache.manager.check()
    assert [len(sequence.block_ids) for sequence in cache.rows.sequences] == [1, 1, 1]


@pytest.mark.parametrize("attention", ["qkv", "eager"])
def test_an_interrupted_step_is_taken_back(
    attention: str, tiny: Any, call: Any, padded: tuple[torch.Tensor, torch.Tensor], monkeypatch: Any
) -> None:
    """Also where another attention reads dense tensors, and each layer's step waits for the next call."""
    model = tiny("llama")
    if attention == "qkv":
        enable(model)
    else:
        warnings.filterwarnings("ignore", message="qkv: an attention other than qkv's")
    cache, undisturbed = QKVCache(model.config, "kivi4"), QKVCache(model.config, "kivi4")
    for each in (cache, undisturbed):
        call(model, padded[0], each)

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].mlp, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(model, step(3), cache)
    for _ in range(2):
        got, want = (call(model, step(3), each).logits for each in (cache, undisturbed))
        assert torch.equal(got, want)
    cache.manager.check()


def test_an_interrupted_step_of_a_mixed_cache_is_noticed(
    tiny: Any, call: Any, padded: tuple[torch.Tensor, torch.Tensor], monkeypatch: Any
) -> None:
    """transformers' own layers have kept what they got of it."""
    model = tiny("gemma2", num_hidden_layers=4)
    enable(model)
    cache = QKVCache(model.config, "kivi4")
    assert {row.held_by == "qkv" for row in cache.report()} == {True, False}
    call(model, padded[0], cache)

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    last = max(row.layer for row in cache.report() if row.held_by == "qkv")
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[last].self_attn.q_proj, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(model, step(3), cache)
    with pytest.raises(ShapeError, match="layers hold 300 to 304 tokens"):
        call(model, step(3), cache)
    cache.reset()
    cache.manager.check()
    assert torch.isfinite(call(model, padded[0], cache).logits).all()


def test_padding_may_not_be_forgotten(tiny: Any, call: Any, padded: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = tiny("llama")
    enable(model)
    cache = QKVCache(model.config, "kivi4")
    call(model, padded[0], cache, padded[1])
    with pytest.raises(ShapeError, match="begun with padding"):
        call(model, step(3), cache, torch.ones(3, 304, dtype=torch.long))


def test_a_broken_activation_stays_visible(tiny: Any, call: Any, padded: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = tiny("llama")
    enable(model)
    with torch.no_grad():
        model.model.layers[2].self_attn.q_proj.weight[0, 0] = float("nan")
    cache = QKVCache(model.config, "kivi4")
    call(model, padded[0], cache)
    assert torch.isnan(call(model, step(3), cache).logits).any()


def test_backward_is_an_error_not_a_zero(tiny: Any, padded: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = tiny("llama")
    enable(model)
    loss = model(padded[0], use_cache=False).logits.sum()
    with pytest.raises(QkvError, match="no gradient"):
        loss.backward()


def test_configs_that_cannot_be_served_are_refused_at_once(tiny: Any) -> None:
    model = tiny("llama", head_dim=20)
    with pytest.raises(FormatError, match="got head_dim 20"):
        QKVCache(model.config, "kivi4")
    assert QKVCache(model.config, "exact").report()[0].held_by == "qkv"
    with pytest.raises(ShapeError, match=r"pass model\.config"):
        QKVCache(model)
