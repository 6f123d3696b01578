"""What a stored block's key binds: the model's weights, its geometry, adapter, salt and content.

Reads model and adapter folders; knows nothing of stores. Runs in the scheduler's process.
"""

from __future__ import annotations

import hashlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Adapter", "Feature", "content_extras", "folder_digest", "tenant_salt"]

_log = logging.getLogger(__name__)
_READERS: Final = 8
"""Files that are read at once; hashing holds no lock of the interpreter."""
_LONG_SECONDS: Final = 1.0


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
    """Digest (32 bytes) of a folder of weights: names and contents of all files, several read side
    by side. Remembered for the life of the process, as vLLM keeps what it has loaded.

    All of every file: samples missed tensors that had been changed, whose KV was then taken for
    that of the others.

    Raises:
        ConfigError: there is no such folder, or it cannot be read.
    """
    folder, began = Path(path), time.monotonic()
    if not folder.is_dir():
        raise ConfigError(f"{path!r} is not a folder of weights")
    digest, nbytes = hashlib.sha256(b"cacheflow/folder\0"), 0
    try:
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        with ThreadPoolExecutor(_READERS) as readers:
            for file, (size, content) in zip(files, readers.map(_file_digest, files), strict=True):
                name = file.relative_to(folder).as_posix().encode()
                digest.update(len(name).to_bytes(8, "little") + name + content)
                nbytes += size
    except OSError as error:
        raise ConfigError(f"the weights in {path!r} cannot be read: {error}") from error
    seconds = time.monotonic() - began
    if seconds > _LONG_SECONDS:
        _log.info("reading the %.1f GB of %s to name them took %.1f s", nbytes / 1e9, path, seconds)
    return digest.digest()


def _file_digest(file: Path) -> tuple[int, bytes]:
    """Its size, and the digest of its contents."""
    with file.open("rb") as data:
        content = hashlib.file_digest(data, "sha256").digest()
        return data.tell(), content


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
