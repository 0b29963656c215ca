"""A transformers cache kept in a store or in one file: it comes back bit for bit, for the same model only."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from qkv.backends.identity import namespace_of
from qkv.backends.transformers import QKVCache, cache_argument
from qkv.errors import CorruptSegment, ForeignSegment, InputError, LayerLost, ShapeError, UnsupportedModel
from qkv.manager import KVManager
from qkv.offload.disk import DiskStore
from qkv.offload.io import FileIO
from qkv.offload.tier import Device, Disk

T = 500


@pytest.fixture
def llama(tiny: Any) -> Any:
    return tiny("llama", implementation="qkv")


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 256, (1, T), generator=torch.Generator().manual_seed(1))


def computed(model: Any, call: Any, ids: torch.Tensor, format: str = "kivi4", **options: Any) -> QKVCache:
    cache = QKVCache(model.config, format, **options)
    call(model, ids, cache)
    return cache


@pytest.mark.parametrize("format", ["exact", "kivi2", "kivi4/int8"])
def test_a_loaded_cache_goes_on_as_the_saved_one(llama: Any, call: Any, ids: Any, tmp_path: Path, format: str) -> None:
    cache, path = computed(llama, call, ids, format), tmp_path / "cache.h5"
    cache.save(path, ids, llama)
    loaded, known = QKVCache.load(path, llama)
    assert torch.equal(known, ids)
    assert (loaded.manager.format.id, loaded.get_seq_length()) == (format, T)
    more = torch.randint(3, 256, (1, 200))
    assert torch.equal(call(llama, more, loaded).logits, call(llama, more, cache).logits)
    one = more[:, :1]
    assert torch.equal(call(llama, one, loaded).logits, call(llama, one, cache).logits)
    loaded.manager.check()
    assert oct(path.stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize("name", ["bare.h5", "./dotted.h5", "deep/er.h5", "../up.h5", "of all kinds of ÄÖ.h5"])
def test_any_way_to_name_a_file(
    llama: Any, call: Any, ids: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    cache = computed(llama, call, ids)
    cache.save(name, ids, llama)
    loaded, _ = QKVCache.load(name, llama)
    monkeypatch.chdir(tmp_path)
    one = ids[:, :1]
    assert torch.equal(call(llama, one, loaded).logits, call(llama, one, cache).logits)
    assert (tmp_path / "here" / name).is_file()
    with pytest.raises(InputError, match="exists"):
        cache.save(tmp_path / "here" / name, torch.cat([ids, one], 1), llama)


def test_a_loaded_cache_forks_crops_and_is_saved_again(llama: Any, call: Any, ids: Any, tmp_path: Path) -> None:
    computed(llama, call, ids).save(tmp_path / "a.h5", ids, llama)
    cache, _ = QKVCache.load(tmp_path / "a.h5", llama)
    twin = cache.fork()
    call(llama, ids[:, :90], cache)
    cache.save(tmp_path / "b.h5", torch.cat([ids, ids[:, :90]], 1), llama)
    again, known = QKVCache.load(tmp_path / "b.h5", llama)
    assert again.get_seq_length() == known.shape[1] == T + 90
    for each in (again, cache):
        each.crop(-90)
    assert torch.equal(call(llama, ids[:, :5], again).logits, call(llama, ids[:, :5], cache).logits)
    assert torch.equal(call(llama, ids[:, :5], twin).logits, call(llama, ids[:, :5], computed(llama, call, ids)).logits)


def changed(model: Any, what: str) -> Any:
    other = copy.deepcopy(model)
    if what == "one weight's last bit":
        weight = other.model.layers[1].mlp.up_proj.weight.data
        weight.view(torch.int32)[0, 0] ^= 1
    elif what == "a merged LoRA":
        weight = other.model.layers[0].self_attn.q_proj.weight.data
        weight += 1e-3 * torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1])
    elif what == "a LoRA":
        other.model.layers[0].self_attn.q_proj.active_adapters = ["a"]
        other.model.layers[0].self_attn.q_proj.scaling = {"a": 2.0}
    elif what == "RoPE":
        config = copy.deepcopy(model.config)
        if hasattr(config, "rope_parameters"):
            config.rope_parameters = {**config.rope_parameters, "rope_theta": 5e5}
        else:
            config.rope_theta = 5e5
        other = AutoModelForCausalLM.from_config(config, attn_implementation="qkv").eval()
        other.load_state_dict(model.state_dict())
    elif what == "dtype":
        other = other.to(torch.bfloat16)
    return other


class Words:
    """A tokenizer, as far as its identity goes."""

    chat_template = "a"

    def __init__(self, **vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary


@pytest.mark.parametrize("what", ["one weight's last bit", "a merged LoRA", "a LoRA", "RoPE", "dtype"])
def test_another_model_gets_nothing(llama: Any, call: Any, ids: Any, tmp_path: Path, what: str) -> None:
    cache, other = computed(llama, call, ids), changed(llama, what)
    with DiskStore(tmp_path / "store") as store:
        cache.attach(store, namespace_of(llama, cache.manager))
        cache.persist(ids)
        for model, hit in ((llama, T - 1), (other, 0), (copy.deepcopy(llama), T - 1)):
            fresh = QKVCache(model.config)
            fresh.attach(store, namespace_of(model, fresh.manager))
            assert bool(fresh.restore(torch.cat([ids, ids[:, :1]], 1))) == bool(hit)
            fresh.manager.check()
    cache.save(tmp_path / "one.h5", ids, llama)
    field = {"a LoRA": "adapter", "RoPE": "rope", "dtype": "geometry"}.get(what, "weights")
    with pytest.raises(InputError, match=field):
        QKVCache.load(tmp_path / "one.h5", other)


def test_every_field_of_the_identity_counts(llama: Any) -> None:
    words, others = Words(a=0, b=1), Words(a=1, b=0)
    made = [
        namespace_of(
            llama, QKVCache(llama.config, format, sink_tokens=sink).manager, tokenizer, salt=salt, adapter=name
        )
        for format, sink, tokenizer, salt, name in (
            ("kivi4", 64, words, "", ""),
            ("kivi2", 64, words, "", ""),
            ("kivi4", 32, words, "", ""),
            ("kivi4", 64, others, "", ""),
            ("kivi4", 64, None, "", ""),
            ("kivi4", 64, words, "tenant", ""),
            ("kivi4", 64, words, "", "lora"),
        )
    ]
    assert len({namespace.root for namespace in made}) == len(made)
    again = namespace_of(llama, QKVCache(llama.config, "kivi4").manager, Words(b=1, a=0))
    assert again.root == made[0].root
    assert "tenant" not in made[5].told()
    with pytest.raises(UnsupportedModel, match="has 3 layers, of which qkv holds 2"):
        namespace_of(llama, KVManager(2))


def test_a_wrong_salt_or_a_damaged_or_foreign_file_says_so(llama: Any, call: Any, ids: Any, tmp_path: Path) -> None:
    path = tmp_path / "c.h5"
    computed(llama, call, ids).save(path, ids, llama, salt="mine")
    with pytest.raises(InputError, match="another salt"):
        QKVCache.load(path, llama)
    QKVCache.load(path, llama, salt="mine")
    with pytest.raises(InputError, match="exists"):
        computed(llama, call, ids).save(path, ids, llama)
    with pytest.raises(InputError, match=r"got 9 token ids, wanted those of all 500"):
        computed(llama, call, ids).save(tmp_path / "d.h5", ids[:, :9], llama)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.h5"]
    data = bytearray(path.read_bytes())
    for at, error in ((len(data) // 2, LayerLost), (5000, CorruptSegment), (2, ForeignSegment)):
        wrong = tmp_path / f"{at}.h5"
        wrong.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(error):
            QKVCache.load(wrong, llama, salt="mine")
    with pytest.raises(InputError, match="No such file"):
        QKVCache.load(tmp_path / "none.h5", llama)


def test_layers_arrive_while_earlier_ones_are_computed_and_a_lost_one_is_said(
    llama: Any, call: Any, ids: Any, tmp_path: Path
) -> None:
    class Slow(FileIO):
        late = False

        def preadv(self, fd: int, buffers: Any, offset: int) -> int:
            if self.late and offset > 100_000:
                raise OSError(5, os.strerror(5))
            return super().preadv(fd, buffers, offset)

    io = Slow()
    cache = computed(llama, call, ids)
    with DiskStore(tmp_path / "store", io=io) as store:
        cache.attach(store, namespace_of(llama, cache.manager))
        cache.persist(ids)
        for late in (False, True):
            io.late = late
            fresh = QKVCache(llama.config)
            fresh.attach(store, namespace_of(llama, fresh.manager))
            assert fresh.restore(ids, left=0, wait=False) == T
            if late:
                with pytest.raises(LayerLost):
                    call(llama, ids[:, :1], fresh)
                fresh.reset()
                fresh.manager.check()
                call(llama, ids, fresh)
            want = call(llama, ids[:, :1], cache.fork()).logits
            assert torch.equal(call(llama, ids[:, :1], fresh).logits, want)
            assert store.counts["failed"] == late


def test_a_cache_that_cannot_be_kept_whole_is_refused(tiny: Any, call: Any, tmp_path: Path) -> None:
    model = tiny("gemma2", implementation="qkv")
    ids = torch.randint(3, 256, (1, 300))
    with pytest.raises(UnsupportedModel, match="layers"):
        computed(model, call, ids).save(tmp_path / "a.h5", ids, model)
    llama = tiny("llama", implementation="qkv")
    two = torch.randint(3, 256, (2, 300))
    with pytest.raises(InputError, match="got 2 rows, wanted one"):
        computed(llama, call, two).save(tmp_path / "a.h5", two, llama)
    with pytest.raises(InputError, match="at least one block"):
        computed(llama, call, ids[:, :100]).save(tmp_path / "a.h5", ids[:, :100], llama)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["kivi2", "kivi4/int8"])
def test_generation_over_streamed_layers_is_that_of_resident_ones(
    tiny: Any, call: Any, tmp_path: Path, format: str
) -> None:
    llama = tiny("llama", implementation="qkv", num_hidden_layers=8)
    long = torch.randint(3, 256, (1, 1500), generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = {"max_new_tokens": 150, "do_sample": False, "suppress_tokens": [2], "pad_token_id": 2}
    plain = QKVCache(llama.config, format)
    made = [llama.generate(long, **{cache_argument(llama): plain}, **options)]
    limit = plain.memory().records // 2
    room = [Device(limit), Disk(str(tmp_path), "1GiB")]
    tiered = QKVCache(llama.config, format, tiers=room, dtype=torch.float32)
    made.append(llama.generate(long, **{cache_argument(llama): tiered}, **options))
    assert torch.equal(*made)
    held = tiered.memory()
    assert held.records <= limit
    assert held.disk > 0
    other = QKVCache(llama.config, format, tiers=room, dtype=torch.float32)
    with DiskStore(tmp_path / "store") as store:
        for cache in (tiered, other):
            cache.attach(store, namespace_of(llama, cache.manager))
        tiered.persist(made[0][:, :-1])
        assert other.restore(made[0], left=1) == made[0].shape[1] - 1
        last = made[0][:, -1:]
        assert torch.equal(call(llama, last, other).logits, call(llama, last, plain).logits)
    with pytest.raises(ShapeError, match="as was declared"):
        call(llama, long, QKVCache(llama.config, format, tiers=room, dtype=torch.bfloat16))
