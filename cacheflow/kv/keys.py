"""Content-addressed keys: prefix-chained per chunk, the same bytes on any host.

A key binds everything that decides a chunk's KV values: the model (root) and every token up to
and including the chunk (chain). SHA-256 over typed, length-prefixed fields; no builtin ``hash``.
"""

from __future__ import annotations

import hashlib
import re
import struct
import sys
from array import array
from typing import TYPE_CHECKING, Final, TypeAlias

from cacheflow.errors import ConfigError
from cacheflow.types import ChunkKey, ObjectKey, ObjectKind, Span

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "KEY_FORMAT",
    "IdentityValue",
    "chunk_keys",
    "extend_keys",
    "format_name",
    "key_root",
    "model_id",
    "parse_name",
    "tenant_id",
    "tenant_salt",
]

KEY_FORMAT: Final = 1
"""Changes whenever the same content would get another key."""

IdentityValue: TypeAlias = "str | int | bool | bytes | None"

_NAME: Final = re.compile(
    r"([0-9a-f]{64})\.(kv|hidden)\.l(0|[1-9][0-9]{0,9})-(0|[1-9][0-9]{0,9})"
    r"\.h(0|[1-9][0-9]{0,9})-(0|[1-9][0-9]{0,9})"
)


def key_root(identity: Mapping[str, IdentityValue], salt: bytes = b"") -> bytes:
    """Digest (32 bytes) that starts every chain: key format, model identity, tenant salt.

    The salt only ever enters a hash. Fields are sorted by name, typed and length-prefixed, so no
    two different identities can encode to the same bytes.

    Raises:
        ConfigError: a name is not a str, or a value not a str, int, bool, bytes or None.
    """
    fields = _field(KEY_FORMAT) + _field(salt) + _identity(identity)
    return hashlib.sha256(b"cacheflow/root\0" + fields).digest()


def model_id(identity: Mapping[str, IdentityValue]) -> bytes:
    """16 bytes that name the model in a chunk's header, whoever the tenant is.

    Raises:
        ConfigError: as :func:`key_root`.
    """
    return hashlib.sha256(b"cacheflow/model\0" + _identity(identity)).digest()[:16]


def tenant_id(salt: bytes = b"") -> bytes:
    """16 bytes that name the tenant in a chunk's header, whatever the model is.

    A digest of the salt, so a salt that can be guessed can be confirmed: take a long random one.
    """
    return hashlib.sha256(b"cacheflow/tenant\0" + _field(salt)).digest()[:16]


def tenant_salt(salt: bytes, tenant: str) -> bytes:
    """The salt of one tenant of many: the operator's ``salt`` itself for the unnamed one.

    Who does not know ``salt`` cannot tell the others' either, however well their names can be
    guessed.
    """
    if not tenant:
        return salt
    return hashlib.sha256(b"cacheflow/salt\0" + _field(salt) + _field(tenant)).digest()


def chunk_keys(
    root: bytes,
    tokens: Sequence[int],
    chunk_tokens: int,
    extras: Sequence[tuple[int, bytes]] = (),
) -> tuple[ChunkKey, ...]:
    """Keys of the whole chunks of ``tokens``; a rest shorter than a chunk has none.

    ``extras``: ``(token position, content digest)`` of media or embeddings that stand behind
    placeholder tokens; they count for the chunk that holds the position and all after it.

    Raises:
        ConfigError: a token is not an integer in ``[0, 2**64)`` (says at which position), an extra
            is not at one of the tokens, or ``chunk_tokens`` is not positive.
        ValueError: ``root`` is not a digest of 32 bytes.
    """
    keys: list[ChunkKey] = []
    extend_keys(keys, root, tokens, chunk_tokens, extras)
    return tuple(keys)


def extend_keys(
    keys: list[ChunkKey],
    root: bytes,
    tokens: Sequence[int],
    chunk_tokens: int,
    extras: Sequence[tuple[int, bytes]] = (),
    *,
    limit: int | None = None,
) -> bool:
    """Append to ``keys``, those of leading chunks of ``tokens``, the keys of the chunks after them.

    Looks at no token of the chunks that have a key, and at no more than ``limit`` of the others
    (rounded up to a chunk), about 0.06 us for each. True once every whole chunk has its key. Takes
    the rest, and raises, as :func:`chunk_keys` does.
    """
    if len(root) != 32:
        raise ValueError(f"a root is 32 bytes from key_root(), got {len(root)}")
    if chunk_tokens <= 0:
        raise ConfigError(f"chunk_tokens must be positive, got {chunk_tokens}")
    first, total = len(keys), len(tokens)
    start = first * chunk_tokens
    stop = total if limit is None else min(total, start - -limit // chunk_tokens * chunk_tokens)
    by_chunk: dict[int, list[tuple[int, bytes]]] = {}
    for position, digest in sorted(extras):
        if not 0 <= position < total:
            raise ConfigError(f"extra at position {position} is beyond the {total} tokens")
        by_chunk.setdefault(position // chunk_tokens, []).append((position, digest))
    words = memoryview(_words(tokens[start:stop], start)).cast("B")
    nbytes = 8 * chunk_tokens
    length = struct.pack("<Q", nbytes)
    previous = keys[-1].digest if keys else root
    for index in range(first, first + len(words) // nbytes):
        chain = hashlib.sha256(b"cacheflow/chunk\0" + previous + length)
        chain.update(words[(index - first) * nbytes : (index - first + 1) * nbytes])
        for position, content in by_chunk.get(index, ()):
            chain.update(_field(position) + _field(content))
        previous = chain.digest()
        keys.append(ChunkKey(previous))
    return stop == total


def format_name(key: ObjectKey) -> str:
    """A file-name-safe name, different for different keys: the inverse of :func:`parse_name`."""
    layers, heads = key.layers, key.heads
    return (
        f"{key.chunk.digest.hex()}.{key.kind.value}"
        f".l{layers.start}-{layers.stop}.h{heads.start}-{heads.stop}"
    )


def parse_name(name: str) -> ObjectKey:
    """The key that :func:`format_name` writes as ``name``.

    Raises:
        ValueError: ``name`` is not such a name, to the letter.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"not an object name: {name[:120]!r}")
    digest, kind, *numbers = match.groups()
    first, last, low, high = map(int, numbers)
    return ObjectKey(
        ChunkKey(bytes.fromhex(digest)), Span(first, last), Span(low, high), ObjectKind(kind)
    )


def _identity(identity: Mapping[str, IdentityValue]) -> bytes:
    if odd := [name for name in identity if not isinstance(name, str)]:
        raise ConfigError(f"model identity: the name {odd[0]!r} is not a string")
    fields = [struct.pack("<Q", len(identity))]
    for name in sorted(identity):
        try:
            fields += [_field(name), _field(identity[name])]
        except (TypeError, ValueError) as error:  # lone surrogates, integers too long to print
            raise ConfigError(f"model identity {name!r}: {error}") from None
    return b"".join(fields)


def _field(value: IdentityValue) -> bytes:
    match value:
        case None:
            tag, data = b"n", b""
        case bool():
            tag, data = b"t", bytes([value])
        case int():
            tag, data = b"i", str(value).encode()
        case str():
            tag, data = b"s", value.encode()
        case bytes():
            tag, data = b"b", value
        case _:
            raise TypeError(f"{type(value).__name__} cannot be part of a key")
    return tag + struct.pack("<Q", len(data)) + data


def _words(tokens: Sequence[int], start: int) -> array[int]:
    """Tokens as little-endian 64-bit words; the first stands at position ``start``."""
    if isinstance(tokens, bytes | bytearray | memoryview):
        raise ConfigError("tokens are bytes, not token ids: was the text not tokenized?")
    try:
        words = array("Q", tokens)
    except (TypeError, OverflowError, ValueError):
        raise ConfigError(_first_bad_token(tokens, start)) from None
    if bool in set(map(type, tokens)):
        raise ConfigError(_first_bad_token(tokens, start))
    if sys.byteorder == "big":
        words.byteswap()
    return words


def _first_bad_token(tokens: Sequence[int], start: int) -> str:
    for position, token in enumerate(tokens, start):
        bad_type = isinstance(token, bool) or not hasattr(token, "__index__")
        if bad_type or not 0 <= token < 1 << 64:
            shown = hex(token)[:40] if isinstance(token, int) and token >> 64 > 0 else repr(token)
            return f"token {shown} at position {position} is not a token id (0 <= id < 2**64)"
    return "the tokens are not a sequence of token ids"
