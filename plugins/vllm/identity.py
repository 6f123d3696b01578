"""What a stored block's key binds: the model's weights, its geometry, adapter, salt and content.

Reads model and adapter folders (sizes and samples of the weights, not all of them); knows nothing
of stores. Runs in the scheduler's process.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Adapter", "Feature", "content_extras", "folder_digest", "tenant_salt"]

_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 64 << 10
_WHOLE_BYTES: Final = 4 << 20
"""Files up to this size are hashed whole."""


class Adapter(Protocol):
    """The part of vLLM's LoRARequest that decides values."""

    @property
    def lora_name(self) -> str: ...

    @property
    def lora_path(self) -> str: ...


class Position(Protocol):
    """Where an item's placeholders stand."""

    @property
    def offset(self) -> int: ...

    @property
    def length(self) -> int: ...


class Feature(Protocol):
    """The part of vLLM's MultiModalFeatureSpec that decides values."""

    @property
    def identifier(self) -> str: ...

    @property
    def mm_position(self) -> Position: ...


@lru_cache(maxsize=256)
def folder_digest(path: str) -> bytes:
    """Digest (32 bytes) of a folder of weights: names, sizes, small files whole, large ones by
    samples spread evenly over them. Remembered for the life of the process.

    Raises:
        ConfigError: there is no such folder, or it cannot be read.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"{path!r} is not a folder of weights")
    digest = hashlib.sha256(b"cacheflow/folder\0")
    try:
        for file in sorted(p for p in folder.rglob("*") if p.is_file()):
            name = file.relative_to(folder).as_posix().encode()
            digest.update(len(name).to_bytes(8, "little") + name + _file_digest(file))
    except OSError as error:
        raise ConfigError(f"the weights in {path!r} cannot be read: {error}") from error
    return digest.digest()


def _file_digest(file: Path) -> bytes:
    size = file.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with file.open("rb") as data:
        if size <= _WHOLE_BYTES:
            digest.update(data.read())
            return digest.digest()
        for sample in range(_SAMPLES):
            data.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            digest.update(data.read(_SAMPLE_BYTES))
    return digest.digest()


def tenant_salt(setting: bytes, cache_salt: str | None, adapter: Adapter | None) -> bytes:
    """What separates requests with the same tokens: the operator's salt, the request's
    ``cache_salt`` and the adapter, each with its length before it.

    Raises:
        ConfigError: the adapter's folder cannot be read, so its values cannot be named.
    """
    parts = [setting, b"" if cache_salt is None else b"s" + cache_salt.encode()]
    if adapter is not None:
        parts += [adapter.lora_name.encode(), folder_digest(adapter.lora_path)]
    if not any(parts):
        return b""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def content_extras(features: Iterable[Feature]) -> Sequence[tuple[int, bytes]]:
    """Position and digest of every multimodal item, for :func:`cacheflow.kv.chunk_keys`."""
    extras = []
    for feature in features:
        where = feature.mm_position
        text = f"{where.length}:{feature.identifier}".encode()
        extras.append((where.offset, hashlib.sha256(b"cacheflow/item\0" + text).digest()))
    return extras
