"""Keys: the same content has the same key everywhere, other content has another."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.errors import ConfigError
from cacheflow.kv import chunk_keys, extend_keys, format_name, key_root, parse_name
from cacheflow.types import ChunkKey, ObjectKey, ObjectKind, Span

if TYPE_CHECKING:
    from collections.abc import Mapping

IDENTITY: Mapping[str, str | int | bool | bytes | None] = {
    "model": "m",
    "revision": None,
    "layers": 30,
    "tied": True,
    "adapter": b"\x00\x01",
}

sizes = st.integers(0, 500) | st.integers(0, 2**31)
spans = st.tuples(sizes, sizes).map(lambda t: Span(t[0], t[0] + t[1]))
object_keys = st.builds(
    ObjectKey,
    st.binary(min_size=32, max_size=32).map(ChunkKey),
    spans,
    spans,
    st.sampled_from(ObjectKind),
)


def test_keys_are_pinned() -> None:
    """The key of this content never changes (None in the hashed tuple)."""
    keys = chunk_keys(key_root(IDENTITY, b"salt"), range(512), 256)
    assert [key.digest.hex() for key in keys] == [
        "71d739bea8d4ad01514ec08c568eb4e1479fd29ee8c10ad9ac67b77a6e770770",
        "d38504111143215746eff46a9e4099d21edf366afd3ef5cd350a13aa94e5ec08",
    ]


@pytest.mark.parametrize("seed", ["0", "1", "12345"])
def test_keys_do_not_depend_on_the_process(seed: str) -> None:
    """Another process with another hash seed makes the same keys."""
    code = (
        "from cacheflow.kv import chunk_keys, key_root;"
        "root = key_root({'b': None, 'a': 'x', 'n': 3});"
        "print([k.digest.hex() for k in chunk_keys(root, list(range(600)), 256)])"
    )
    env = {**os.environ, "PYTHONHASHSEED": seed}
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()
    root = key_root({"n": 3, "a": "x", "b": None})
    assert out == str([k.digest.hex() for k in chunk_keys(root, tuple(range(600)), 256)])


def test_only_whole_chunks_have_keys() -> None:
    """Less than a chunk is a miss, not a crash."""
    root = key_root({})
    assert chunk_keys(root, [], 256) == ()
    assert chunk_keys(root, [1] * 255, 256) == ()
    assert len(chunk_keys(root, [1] * 256, 256)) == 1
    assert len(chunk_keys(root, [1] * 511, 256)) == 1


@given(tokens=st.lists(st.integers(0, 2**64 - 1), min_size=8, max_size=40), at=st.integers(0, 39))
def test_a_changed_token_changes_its_chunk_and_all_after_it(tokens: list[int], at: int) -> None:
    """Keys chain: equal up to the chunk before the change, different from there on."""
    at %= len(tokens)
    other = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    root = key_root({})
    pairs = list(zip(chunk_keys(root, tokens, 4), chunk_keys(root, other, 4), strict=True))
    for index, (mine, theirs) in enumerate(pairs):
        assert (mine == theirs) == (index < at // 4)


class Watched(list[int]):
    """A list that counts the tokens taken out of it."""

    taken = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.taken += len(found) if isinstance(index, slice) else 1
        return found


@given(
    tokens=st.lists(st.integers(0, 2**64 - 1), max_size=60),
    known=st.integers(0, 20),
    limit=st.integers(1, 30),
    position=st.none() | st.integers(0, 59),
)
def test_keys_come_in_pieces(
    tokens: list[int], known: int, limit: int, position: int | None
) -> None:
    """Piece by piece, after any number of known keys: the same keys as in one go. No piece looks at
    more than its limit (in whole chunks), and none at tokens that have a key."""
    root, watched = key_root({}), Watched(tokens)
    extras = [] if position is None or position >= len(tokens) else [(position, b"image")]
    whole = chunk_keys(root, tokens, 4, extras)
    keys = list(whole[:known])
    start, done = 4 * len(keys), False
    while not done:
        before = watched.taken
        done = extend_keys(keys, root, watched, 4, extras, limit=limit)
        assert watched.taken - before <= -(-limit // 4) * 4
    assert tuple(keys) == whole
    assert watched.taken == len(tokens) - start


def test_a_bad_token_in_a_later_piece_has_its_position() -> None:
    """Positions count from the first token, not from that of the piece."""
    keys: list[ChunkKey] = []
    tokens = [1] * 9 + [-1]
    assert not extend_keys(keys, key_root({}), tokens, 2, limit=4)
    assert not extend_keys(keys, key_root({}), tokens, 2, limit=4)
    assert len(keys) == 4
    with pytest.raises(ConfigError, match="position 9"):
        extend_keys(keys, key_root({}), tokens, 2, limit=4)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "m2"},
        {"revision": ""},
        {"revision": "None"},
        {"layers": 31},
        {"layers": "30"},
        {"tied": 1},
        {"tied": False},
        {"adapter": b"\x00"},
        {"adapter": "\x00\x01"},
        {"extra": None},
    ],
)
def test_everything_in_the_identity_counts(change: dict[str, str | int | bytes | None]) -> None:
    """Model, revision, adapter, dtype and their types."""
    assert key_root({**IDENTITY, **change}) != key_root(IDENTITY)


def test_fields_cannot_run_into_each_other() -> None:
    """Length-prefixed: moving a character from one field to the next is another identity (23)."""
    assert key_root({"a": "xy", "b": "z"}) != key_root({"a": "x", "b": "yz"})
    assert key_root({"ab": "x"}) != key_root({"a": "bx"})


def test_a_salt_separates_tenants() -> None:
    """Other salt, other keys; no salt is a value of its own."""
    roots = {key_root(IDENTITY, salt) for salt in (b"", b"a", b"b", b"\x00")}
    assert len(roots) == 4
    assert b"tenant-secret" not in key_root(IDENTITY, b"tenant-secret")


def test_media_behind_placeholders_counts() -> None:
    """Two images behind the same placeholder tokens: other keys from their chunk on (11)."""
    root, tokens = key_root({}), [7] * 1024
    first = chunk_keys(root, tokens, 256, [(300, b"image one")])
    second = chunk_keys(root, tokens, 256, [(300, b"image two")])
    moved = chunk_keys(root, tokens, 256, [(301, b"image one")])
    plain = chunk_keys(root, tokens, 256)
    assert first[0] == second[0] == plain[0]
    assert first[1] != plain[1]
    for keys in zip(first[1:], second[1:], moved[1:], plain[1:], strict=True):
        assert len(set(keys)) == 4


@pytest.mark.parametrize(
    "bad", [-1, 2**64, 1 << 20000, 1.5, True, None, "1"], ids=lambda v: type(v).__name__
)
def test_impossible_tokens_are_named(bad: object) -> None:
    """The error says which token at which position."""
    with pytest.raises(ConfigError, match="position 3"):
        chunk_keys(key_root({}), [0, 1, 2, bad, 4], 2)  # type: ignore[list-item]


def test_identity_values_must_be_plain() -> None:
    """A value that cannot be encoded is refused by name."""
    with pytest.raises(ConfigError, match="rope"):
        key_root({"rope": 1.5})  # type: ignore[dict-item]


@pytest.mark.parametrize("bad", ["\ud800", 10**5000], ids=["surrogate", "huge"])
def test_identity_values_must_be_encodable(bad: str | int) -> None:
    """Lone surrogates and integers too long to print are a ConfigError, too."""
    with pytest.raises(ConfigError, match="rope"):
        key_root({"rope": bad})
    with pytest.raises(ConfigError, match="not a string"):
        key_root({1: "rope"})  # type: ignore[dict-item]


def test_text_is_not_taken_for_tokens() -> None:
    """Bytes would silently be read as packed token ids."""
    for text in (b"12345678", bytearray(8)):
        with pytest.raises(ConfigError, match="not tokenized"):
            chunk_keys(key_root({}), text, 1)


@pytest.mark.parametrize("position", [-1, 4, 10**9])
def test_media_must_stand_at_a_token(position: int) -> None:
    """Media whose position is off would not be in any key: refused, not forgotten (11)."""
    with pytest.raises(ConfigError, match=f"position {position} "):
        chunk_keys(key_root({}), [1, 2, 3, 4], 2, [(position, b"image")])


def test_chunks_and_roots_must_make_sense() -> None:
    """No chunk length of zero; no root that is not a digest."""
    with pytest.raises(ConfigError, match="chunk_tokens"):
        chunk_keys(key_root({}), [1], 0)
    with pytest.raises(ValueError, match="32 bytes"):
        chunk_keys(b"root", [1], 1)


@given(object_keys)
def test_names_are_read_back(key: ObjectKey) -> None:
    """parse(format(k)) == k, and names are safe file names of bounded length."""
    name = format_name(key)
    assert parse_name(name) == key
    assert len(name) < 200
    assert set(name) <= set("0123456789abcdefghijklmnopqrstuvwxyz.-")


@given(st.lists(object_keys, min_size=2, max_size=2, unique=True))
def test_different_keys_have_different_names(keys: list[ObjectKey]) -> None:
    """The file-name codec is injective."""
    assert format_name(keys[0]) != format_name(keys[1])


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../../etc/passwd",
        "a" * 64 + ".kv.l0-30.h0-3.tmp",
        "A" * 64 + ".kv.l0-30.h0-3",
        "a" * 64 + ".kv.l00-30.h0-3",
        "a" * 64 + ".kv.l0-30.h0-3\n",
        "a" * 64 + ".pickle.l0-30.h0-3",
        "a" * 64 + ".kv.l30-2.h0-3",
        "a" * 63 + ".kv.l0-30.h0-3",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    """Only names to the letter are object names."""
    with pytest.raises(ValueError, match="not"):
        parse_name(name)
