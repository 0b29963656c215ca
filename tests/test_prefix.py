"""Names of blocks: the same in every process, different for anything that matters, and vLLM's where asked for."""

import hashlib
import os
import subprocess
import sys
from array import array
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.errors import InputError
from qkv.prefix import Namespace, Prefix, cbor, link, token_bytes, vllm_names

ROOT = Path(__file__).parent.parent
SPACE = Namespace("w", ((8, 128, "bfloat16"),) * 2, "kivi4", 1, block_tokens=4, sink_tokens=2)
IDS = [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1, *range(1000, 1024)]


def test_names_are_the_same_for_ever() -> None:
    """Stored blocks are found by these: whoever changes them gives old stores up."""
    prefix = Prefix(SPACE, range(11), tail_tokens=0)
    assert SPACE.root.hex() == "64b417d0b2a531575986cfb3b3ff567921e2dd3de8212c02fdf5db901be16553"
    assert prefix.start is not None
    assert prefix.start.hex() == "0adff667d7306c6676117e1d779de83680c83d5b945a6d616d20a054d643d2b6"
    assert [key.hex() for key in prefix.keys] == [
        "732f33961662e79bf8e59a435ff511fcee3406de3a95db02b4eefb3b9f3f11f3",
        "9ba345a17680c344fe5c37e6c5ad296405507a5974d9efb2b5594157cdcdded7",
    ]


def test_names_by_hand() -> None:
    prefix = Prefix(SPACE, [7, 8, 1, 2, 3, 4, 5], tail_tokens=0)
    start = hashlib.sha256(SPACE.root + bytes([7, 0, 0, 0, 8, 0, 0, 0])).digest()
    assert prefix.start == start
    assert prefix.keys == [hashlib.sha256(start + b"".join(bytes([n, 0, 0, 0]) for n in (1, 2, 3, 4))).digest()]


def test_every_process_gives_the_same_names_without_torch() -> None:
    script = (
        "import sys, types\n"
        f"package = sys.modules['qkv'] = types.ModuleType('qkv'); package.__path__ = [{str(ROOT / 'qkv')!r}]\n"
        "from qkv.prefix import Namespace, Prefix, vllm_names\n"
        "from qkv.pool import BlockPool\n"
        "space = Namespace('w', ((8, 128, 'bfloat16'),) * 2, 'kivi4', 1, 4, 2, salt='s')\n"
        "prefix = Prefix(space, range(50), tail_tokens=0, extra={3: 'picture'})\n"
        "print(space.root.hex(), prefix.keys[-1].hex(), vllm_names(range(50))[-1].hex(), 'torch' in sys.modules)\n"
    )
    told = set()
    for seed in ("0", "4321"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        told.add(done.stdout)
    assert len(told) == 1
    assert told.pop().split()[-1] == "False"


# ---- namespaces ----

CHANGED: dict[str, Any] = {
    "weights": "x",
    "geometry": ((8, 128, "bfloat16"), (8, 128, "float16")),
    "format": "kivi2",
    "layout_version": 2,
    "block_tokens": 8,
    "sink_tokens": 0,
    "rope": "yarn",
    "adapter": "lora",
    "shard": "0/2",
    "numerics": "chunk 512",
    "tokenizer": "t",
    "salt": "tenant",
}


@pytest.mark.parametrize("name", [field.name for field in fields(Namespace)])
def test_every_field_changes_the_root(name: str) -> None:
    assert replace(SPACE, **{name: CHANGED[name]}).root != SPACE.root


def test_fields_do_not_run_into_each_other() -> None:
    assert replace(SPACE, rope="ab").root != replace(SPACE, rope="a", adapter="b").root
    assert replace(SPACE, rope="a").root != replace(SPACE, adapter="a").root


def test_a_salt_is_not_printed() -> None:
    assert "secret" not in repr(replace(SPACE, salt="secret"))


def as_dict(**changes: Any) -> dict[str, Any]:
    known = {field.name: getattr(SPACE, field.name) for field in fields(SPACE)}
    return known | {"geometry": [[8, 128, "bfloat16"]] * 2} | changes


def test_a_namespace_from_a_dict() -> None:
    assert Namespace.from_dict(as_dict()) == SPACE
    assert Namespace.from_dict(as_dict()).root == SPACE.root


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"weight": "w"}, "unknown weight; known are weights, geometry"),
        ({"sink_tokens": -1}, "sink_tokens"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"layout_version": True}, "layout_version"),
        ({"salt": None}, "salt"),
        ({"weights": ""}, "weights"),
        ({"geometry": []}, "geometry"),
        ({"geometry": [[8, 128]]}, "geometry"),
        ({"geometry": [8]}, "geometry"),
        ({"geometry": [[8, 0, "bfloat16"]]}, "head_dim"),
        ({"geometry": [[8.0, 128, "bfloat16"]]}, "KV heads"),
    ],
)
def test_a_namespace_refuses(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        Namespace.from_dict(as_dict(**changes))


def test_a_namespace_says_what_is_missing() -> None:
    with pytest.raises(InputError, match="format missing"):
        Namespace.from_dict({name: value for name, value in as_dict().items() if name != "format"})


# ---- growing, cropping ----


def state(prefix: Prefix) -> tuple[Any, ...]:
    return prefix.length, prefix.start, prefix.sink, [*prefix.keys], [*prefix.contents], prefix.usable


@given(
    st.integers(0, 5),
    st.lists(st.one_of(st.lists(st.integers(0, 3), max_size=9), st.integers(0, 40)), max_size=8),
    st.dictionaries(st.integers(0, 20), st.sampled_from(["a", "b"]), max_size=2),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_way_to_grow_gives_the_same_names(sink: int, steps: list[Any], extra: dict[int, str]) -> None:
    space = replace(SPACE, block_tokens=3, sink_tokens=sink)
    prefix, tokens = Prefix(space, tail_tokens=1, extra=extra), list[int]()
    for step in steps:
        before, copy = state(prefix), prefix.copy()
        if isinstance(step, list):
            prefix.extend(step)
            tokens += step
        else:
            tokens = tokens[:step]
            prefix.crop(len(tokens))
        assert state(copy) == before
        assert state(prefix) == state(Prefix(space, tokens, tail_tokens=1, extra=extra))
        assert prefix.length == len(tokens)


@pytest.mark.parametrize("sink", [0, 2])
@pytest.mark.parametrize("tail", [0, 1, 4, 6])
def test_a_hit_stops_where_the_tail_begins(sink: int, tail: int) -> None:
    """As many blocks as a sequence that computed everything would have sealed, and a token is left to compute."""
    for length in range(40):
        prefix = Prefix(replace(SPACE, sink_tokens=sink), range(length), tail_tokens=tail)
        blocks = 0
        while sink + 4 * (blocks + 1) + tail <= length and sink + 4 * (blocks + 1) < length:
            blocks += 1
        assert prefix.usable == blocks


def test_crop_refuses() -> None:
    prefix = Prefix(SPACE, range(9), tail_tokens=0)
    before = state(prefix)
    for length in (-1, 10):
        with pytest.raises(InputError, match=f"got length {length}, wanted 0 to 9"):
            prefix.crop(length)
    assert state(prefix) == before


def test_what_stands_at_a_token_counts_from_there_on() -> None:
    def keys(**places: str) -> list[bytes | None]:
        extra = {int(place[1:]): value for place, value in places.items()}
        prefix = Prefix(SPACE, [0] * 14, tail_tokens=0, extra=extra)
        return [prefix.start, *prefix.keys]

    plain, late, sooner, other = keys(), keys(p7="a"), keys(p6="a"), keys(p7="b")
    assert len(plain) == 4
    assert late[:2] == plain[:2]
    assert all(len({one[n] for one in (plain, late, sooner, other)}) == 4 for n in (2, 3))
    assert keys(p0="a")[0] != plain[0]
    assert keys(p13="a")[:3] == plain[:3]
    assert keys(p99="a") == plain


@pytest.mark.parametrize("extra", [{-1: "a"}, {"0": "a"}, {0: 1.5}, {0: {"a": 1}}, {0: 2**64}])
def test_what_cannot_be_named_is_refused(extra: dict[Any, Any]) -> None:
    with pytest.raises(InputError):
        Prefix(SPACE, tail_tokens=0, extra=extra)


# ---- token ids ----


class Row:
    """As much of a tensor as is asked for."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def tolist(self) -> Any:
        return self.values


def test_token_bytes() -> None:
    assert token_bytes([1, 256, 2**32 - 1]) == b"\1\0\0\0\0\1\0\0\xff\xff\xff\xff"
    for same in (iter([1, 2]), array("q", [1, 2]), Row([1, 2]), (1, 2)):
        assert token_bytes(same) == token_bytes([1, 2])


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.0], [None], ["1"], Row([[1, 2]]), 5])
def test_what_is_no_token_is_refused(tokens: Any) -> None:
    prefix = Prefix(SPACE, range(9), tail_tokens=0)
    before = state(prefix)
    with pytest.raises(InputError, match="wanted one flat row of ids"):
        prefix.extend(tokens)
    assert state(prefix) == before


def test_a_link_is_the_parent_and_the_content() -> None:
    assert link(b"p" * 32, b"c") == hashlib.sha256(b"p" * 32 + b"c").digest()


# ---- CBOR and vLLM's names ----


@pytest.mark.parametrize(
    ("value", "encoded"),
    # RFC 8949, appendix A
    [
        (0, "00"),
        (23, "17"),
        (24, "1818"),
        (100, "1864"),
        (1000, "1903e8"),
        (1000000, "1a000f4240"),
        (1000000000000, "1b000000e8d4a51000"),
        (2**64 - 1, "1bffffffffffffffff"),
        (-1, "20"),
        (-100, "3863"),
        (False, "f4"),
        (True, "f5"),
        (None, "f6"),
        (b"", "40"),
        (b"\1\2\3\4", "4401020304"),
        ("", "60"),
        ("IETF", "6449455446"),
        ("水", "63e6b0b4"),
        ((), "80"),
        ([1, [2, 3], [4, 5]], "8301820203820405"),
        (tuple(range(1, 26)), "98190102030405060708090a0b0c0d0e0f101112131415161718181819"),
    ],
)
def test_cbor(value: Any, encoded: str) -> None:
    assert cbor(value).hex() == encoded


def test_vllm_names_by_hand() -> None:
    none = hashlib.sha256(b"\x6e" + b"vllm-none-hash").digest()  # text of 14 bytes
    # array of 3: 32 bytes, array of 2 ints, null
    first = hashlib.sha256(b"\x83" + b"\x58\x20" + none + b"\x82\x01\x18\x18" + b"\xf6").digest()
    second = hashlib.sha256(b"\x83" + b"\x58\x20" + first + b"\x82\x03\x19\x01\x00" + b"\x81\x63abc").digest()
    assert vllm_names([1, 24, 3, 256, 9], 2, extra={1: ("abc",)}) == [first, second]
    assert vllm_names([1, 24], 2, extra={0: ()}) == [first]
    seeded = hashlib.sha256(b"\x83" + b"\x58\x20" + hashlib.sha256(b"\x61" + b"0").digest() + b"\x82\x01\x18\x18\xf6")
    assert vllm_names([1, 24], 2, seed="0") == [seeded.digest()]


def test_vllm_names_are_those_of_cbor2() -> None:
    """Made with cbor2 6.3.0: sha256(cbor2.dumps((parent, tokens, extra), canonical=True))."""
    extra = {0: ("lora", "salt"), 1: (("pic", 3), b"\x01\x02", -5, None, True, 2**40)}
    assert [name.hex() for name in vllm_names(IDS)] == [
        "c99ca3f2a9f7b884ac72dc9188529a696039fe1e7b2b8592719c79de3bf46f2c",
        "4a7e39c6d779cb4ad2372cceb6ceb61ca511d4a67771417e68e1a3c01b6224e1",
    ]
    assert [name.hex() for name in vllm_names(IDS, extra=extra)] == [
        "0d84bbcd596aaa06e62c7105419ae25227b71f93bfd1d84406340fe215b31381",
        "60c3d458fb98d144ff2dd45c024c078d537ffcc8144c6fc0302767af47c0da1f",
    ]


def test_vllm_names_refuse() -> None:
    with pytest.raises(InputError, match="block_tokens"):
        vllm_names([1], 0)
    with pytest.raises(InputError):
        vllm_names([-1])
