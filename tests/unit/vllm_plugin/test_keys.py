"""Keys bind what decides a block's values, and nothing is stored where they cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from cacheflow.errors import ConfigError
from cacheflow.plugins.vllm.identity import folder_digest
from cacheflow.plugins.vllm.keyring import Keyring
from cacheflow.plugins.vllm.settings import VllmSettings, policy_of
from tests.unit.vllm_plugin.minivllm import MiniRequest

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = list(range(64))


@dataclass
class Position:
    offset: int
    length: int


@dataclass
class Item:
    identifier: str
    mm_position: Position


@dataclass
class Lora:
    lora_name: str
    lora_path: str


def keys(salt: bytes = b"", **fields: object) -> tuple[bytes, ...]:
    request = MiniRequest("r", TOKENS, **fields)  # type: ignore[arg-type]
    found = Keyring({"model": "m"}, salt, 16).keys(request)
    assert found is not None
    return tuple(key.digest for key in found)


def test_every_part_of_the_identity_counts(tmp_path: Path) -> None:
    """Another salt, adapter (by name or content) or image gives other keys, from the first block
    it can have changed."""
    for name, content in (("a", b"1"), ("b", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter.safetensors").write_bytes(content)
    variants = [
        keys(),
        keys(b"operator"),
        keys(cache_salt="operator"),
        keys(cache_salt=""),
        keys(lora_request=Lora("x", str(tmp_path / "a"))),
        keys(lora_request=Lora("x", str(tmp_path / "b"))),
        keys(lora_request=Lora("y", str(tmp_path / "a"))),
    ]
    assert len({found[0] for found in variants}) == len(variants)
    image = keys(mm_features=[Item("cat", Position(20, 8))])
    assert image[0] == keys()[0]
    assert len({image[1], keys(mm_features=[Item("dog", Position(20, 8))])[1], keys()[1]}) == 3


def test_keys_grow_with_the_tokens() -> None:
    """Decoding appends keys to those there are; whole blocks only."""
    ring, request = Keyring({}, b"", 16), MiniRequest("r", TOKENS[:40])
    first = tuple(ring.keys(request) or ())
    request.all_token_ids = TOKENS
    assert tuple(ring.keys(request) or ())[:2] == first
    assert len(first) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_embeds": object()},
        {"pooling_params": object()},
        {"resumable": True},
        {"mm_features": [Item("", Position(0, 4))]},
        {"lora_request": Lora("x", "/dev/null/x")},
    ],
)
def test_what_tokens_do_not_name_is_refused(fields: dict[str, object]) -> None:
    """Such requests have no keys, so they are neither restored nor stored."""
    request = MiniRequest("r", TOKENS, **fields)  # type: ignore[arg-type]
    assert Keyring({}, b"", 16).keys(request) is None


def test_new_weights_have_new_keys() -> None:
    """After a renewal nothing that was stored is found any more."""
    ring, request = Keyring({}, b"", 16), MiniRequest("r", TOKENS)
    before = list(ring.keys(request) or ())
    ring.renew()
    assert set(before).isdisjoint(ring.keys(request) or ())


def test_folders_are_told_apart(tmp_path: Path) -> None:
    """Other weights in a large file, or another name, are another folder."""
    digests = set()
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        content = bytes([number == 1]) * (8 << 20)
        (folder / ("weights" if number < 2 else "heights")).write_bytes(content)
        digests.add(folder_digest(str(folder)))
    assert len(digests) == 3


def test_any_changed_byte_is_another_folder(tmp_path: Path) -> None:
    """Wherever it is in a large file whose size stays: a tensor that was trained on, say."""
    file, digests = tmp_path / "model.safetensors", set()
    for at in (None, 1, 4 << 20, (6 << 20) + 12_345, (8 << 20) - 1):
        folder_digest.cache_clear()
        content = bytearray(8 << 20)
        if at is not None:
            content[at] = 1
        file.write_bytes(content)
        digests.add(folder_digest(str(tmp_path)))
    assert len(digests) == 5


def test_settings_and_a_requests_own_policy() -> None:
    """Unknown settings and policies vLLM cannot follow are refused by name; a request's hint is
    only a hint."""
    settings = VllmSettings.parse({"policy": "load", "save": False})
    assert policy_of(settings, None) == "load"
    assert policy_of(settings, {"cacheflow_policy": "recompute"}) == "recompute"
    assert policy_of(settings, {"cacheflow_policy": "nonsense"}) == "load"
    with pytest.raises(ConfigError, match="setting policy"):
        VllmSettings.parse({"policy": "cake"})
    with pytest.raises(ConfigError, match="setting stagin"):
        VllmSettings.parse({"stagin": 1})
