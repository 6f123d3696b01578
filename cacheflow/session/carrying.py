"""A session as a folder: its tokens, and an archive of those of its chunks that are stored.

The archive is that of ``cacheflow store export``. Another flow of the same model takes the folder
up under keys of its own, whatever its salt and tenant; chunks that are missing are recomputed.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cacheflow.errors import BackendError, CapacityError, ConfigError, IntegrityError
from cacheflow.kv import model_id, restamp, verify
from cacheflow.memory import buffer_from
from cacheflow.tasks import to_the_end
from cacheflow.tiers.archive import open_regular, read_archive, write_archive
from cacheflow.types import TransferStatus, Write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from cacheflow.abc import StorageBackend
    from cacheflow.kv import Stamp
    from cacheflow.memory import Lease
    from cacheflow.tiers.archive import ArchiveWriter
    from cacheflow.types import ChunkInfo, ChunkKey

__all__ = ["Carried", "Contents", "load_session", "read_tokens", "save_session"]

_FORMAT: Final = 1
_TOKENS: Final = "session.json"
_CHUNKS: Final = "chunks.cacheflow"
_MAX_BYTES: Final = 64 << 20
"""Of the file of tokens: millions of them."""


@dataclass(frozen=True, slots=True)
class Carried:
    """How many chunks there are, and how many were copied."""

    chunks: int
    copied: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What a folder says it has."""

    tokens: list[int]
    names: tuple[str, ...]
    """Digests of the chunks' keys, in hex, as they were where they come from."""


async def save_session(
    path: Path,
    tokens: Sequence[int],
    keys: Sequence[ChunkKey],
    identity: Mapping[str, Any],
    tiers: Mapping[str, StorageBackend],
) -> Carried:
    """Write the new folder ``path``; see :meth:`cacheflow.session.Session.export`."""
    text = {
        "format": _FORMAT,
        "model": model_id(identity).hex(),
        "tokens": list(tokens),
        "chunks": [key.digest.hex() for key in keys],
    }
    writing = asyncio.ensure_future(asyncio.to_thread(_write, path, text))
    try:
        await to_the_end(writing)  # a folder that is made is known, and taken away again
        found = {name: await _asked(tier, keys) for name, tier in tiers.items()}
        async with write_archive(path / _CHUNKS) as archive:
            for at in range(len(keys)):
                copies = [
                    (tiers[name], info) for name, infos in found.items() for info in infos[at]
                ]
                await _add_one(archive, copies)
    except BaseException:
        if not writing.cancelled() and writing.exception() is None:  # else it is not ours
            await to_the_end(asyncio.to_thread(_remove, path))
        raise
    return Carried(len(keys), archive.count)


async def read_tokens(path: Path, identity: Mapping[str, Any]) -> Contents:
    """What is in ``path``.

    Raises:
        ConfigError: it is no session, or one of another model.
        IntegrityError: its file of tokens is damaged.
    """
    return await asyncio.to_thread(_read, path, model_id(identity).hex())


async def load_session(
    path: Path,
    contents: Contents,
    keys: Sequence[ChunkKey],
    stamp: Stamp,
    tier: StorageBackend,
) -> Carried:
    """Store the chunks in ``path`` under ``keys`` in ``tier``; the damaged ones are left out.

    Raises:
        ConfigError: the archive cannot be read.
        IntegrityError: it is no archive, or was cut short.
    """
    ours = dict(zip(contents.names, keys, strict=False))
    copied = 0
    async with aclosing(read_archive(path / _CHUNKS)) as objects:
        async for archived in objects:
            key = ours.get(archived.name.partition(".")[0])
            if key is None:
                continue
            try:
                async with archived.read() as (info, data):
                    copied += await _store(tier, info, key, stamp, data)
            except (IntegrityError, BackendError, CapacityError):
                continue  # it will be recomputed
    return Carried(len(keys), copied)


async def _asked(tier: StorageBackend, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
    try:
        return await tier.lookup(keys)
    except Exception:  # a third party's backend may raise anything: it has nothing then
        return [() for _ in keys]


async def _add_one(
    archive: ArchiveWriter, copies: Sequence[tuple[StorageBackend, ChunkInfo]]
) -> None:
    """Every object of a chunk once, from the first tier that delivers it."""
    done = set()
    for tier, info in copies:
        if info.key in done:
            continue
        try:
            if await archive.add(tier, info):
                done.add(info.key)
        except (BackendError, IntegrityError):
            continue  # another tier may have it; else it will be recomputed


async def _store(
    tier: StorageBackend, info: ChunkInfo, key: ChunkKey, stamp: Stamp, data: Lease
) -> bool:
    payload = data.view[info.payload_offset :]

    def renamed() -> tuple[ChunkInfo, bytes]:
        if stamp.auth is not None:
            stamp.auth.check_header(info)
            verify(info, info.key.layers, payload, stamp.auth)
        return restamp(info, key, stamp, payload)

    made, header = await asyncio.to_thread(renamed)
    part = data.part(info.payload_offset, info.nbytes - info.payload_offset)
    [result] = await tier.store([Write(made, (buffer_from(header), part))])
    return result.status is TransferStatus.OK


def _write(path: Path, text: Mapping[str, object]) -> None:
    try:
        path.mkdir(mode=0o700, parents=True)
    except (OSError, ValueError) as error:  # a path with a NUL in it is a ValueError
        raise ConfigError(f"export to {str(path)!r}: {error}") from error
    try:
        file = path / _TOKENS
        file.touch(mode=0o600)
        file.write_text(json.dumps(text), encoding="utf-8")
    except OSError as error:
        _remove(path)
        raise ConfigError(f"export to {str(path)!r}: {error}") from error


def _remove(path: Path) -> None:
    """Half an export is none."""
    with suppress(OSError):
        (path / _TOKENS).unlink(missing_ok=True)
        path.rmdir()


def _read(path: Path, model: str) -> Contents:
    try:
        with open(path / _TOKENS, "rb", opener=open_regular) as file:
            data = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"import from {str(path)!r}: {error}") from error
    try:
        if len(data) > _MAX_BYTES:
            raise ValueError("it is too long")
        text = json.loads(data)
        contents = Contents([int(t) for t in text["tokens"]], tuple(map(str, text["chunks"])))
        version, theirs = text["format"], text["model"]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise IntegrityError(f"{path / _TOKENS} is damaged: {error}") from None
    if version != _FORMAT:
        raise ConfigError(f"import from {path}: format {version}, this version reads {_FORMAT}")
    if theirs != model:
        raise ConfigError(f"import from {path}: the session is of another model")
    return contents
