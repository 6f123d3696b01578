"""Opening a folder for the subcommands, reading its index, and choosing objects from it."""

from __future__ import annotations

import asyncio
import re
from abc import abstractmethod
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, TypeAlias, cast

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from cacheflow.abc import StorageBackend
from cacheflow.cli.output import progress
from cacheflow.errors import ConfigError
from cacheflow.kv import format_name
from cacheflow.registry import load_backend
from cacheflow.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from cacheflow.settings import TierSettings
    from cacheflow.types import ChunkInfo, ObjectKey

__all__ = [
    "DiskStore",
    "Folder",
    "Yes",
    "check_is_used",
    "choose",
    "collect",
    "confirm",
    "opened",
    "parse_bytes",
    "parse_seconds",
    "remove",
    "scan",
    "tier_of",
]

Folder: TypeAlias = Annotated[Path, typer.Argument(help="Folder of the store.", show_default=False)]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

_MIN_PREFIX: Final = 4
"""Hex digits of a key that are wanted at least: fewer are a typing error, not a wish."""
_BATCH: Final = 64
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")
_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


class Room(Protocol):
    """Bytes used, and how many may be."""

    used: int
    cap: int
    floor: int
    free: int


class StoredFile(Protocol):
    """A file of the store; ``key`` is None if it is no object by its name."""

    path: Path
    key: ObjectKey | None
    nbytes: int
    modified: float


class Imported(Protocol):
    """What an import did."""

    stored: int
    kept: int
    refused: tuple[tuple[str, str], ...]


class DiskStore(StorageBackend):
    """What a backend on files offers operators beside the contract."""

    @abstractmethod
    async def room(self) -> Room: ...

    @abstractmethod
    async def files(self) -> Sequence[StoredFile]: ...

    @abstractmethod
    async def export_objects(
        self, archive: Path, infos: Sequence[ChunkInfo], copied: Callable[[int], None]
    ) -> int: ...

    @abstractmethod
    async def import_objects(self, archive: Path, copied: Callable[[int], None]) -> Imported: ...


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[DiskStore]:
    """The store in ``folder``, which must be one, with the limits of the tier that has it."""
    await asyncio.to_thread(check_is_used, folder)
    options = {**_limits(folder), "path": str(folder), "create": False}
    backend = cast("DiskStore", await load_backend("nvme").open(options))
    try:
        yield backend
    finally:
        await backend.aclose()


def check_is_used(folder: Path) -> None:
    """What a command can say better than the backend, which has options that it has not.

    Raises:
        ConfigError: the folder is not there, or empty.
    """
    try:
        is_empty = not any(folder.expanduser().iterdir())
    except FileNotFoundError:
        raise ConfigError(
            f"{folder}: no such folder; give the path of a tier whose backend is nvme"
        ) from None
    except OSError:
        return
    if is_empty:
        raise ConfigError(f"{folder} is empty: nothing was ever stored there")


def _limits(folder: Path) -> dict[str, Any]:
    tier = tier_of(folder)
    names = ("max_bytes", "min_free_bytes")
    return {name: tier.options[name] for name in names if name in tier.options} if tier else {}


def tier_of(folder: Path) -> TierSettings | None:
    """The tier of the settings (CACHEFLOW_TIERS) that has this folder."""
    for tier in Settings().tiers:
        path = tier.options.get("path")
        if tier.backend == "nvme" and path and _full(Path(path)) == _full(folder):
            return tier
    return None


def _full(folder: Path) -> Path:
    return folder.expanduser().absolute()


async def scan(folder: Path) -> list[ChunkInfo]:
    """All valid objects of the store in ``folder``."""
    async with opened(folder) as backend:
        return await collect(backend)


async def collect(backend: DiskStore) -> list[ChunkInfo]:
    """All valid objects, read with a progress bar."""
    total = len(await backend.files())
    infos = []
    with progress() as bar:
        task = bar.add_task("reading headers", total=total)
        async for info in backend.scan():
            infos.append(info)
            bar.advance(task)
    return infos


def choose(infos: Sequence[ChunkInfo], keys: Sequence[str]) -> list[ChunkInfo]:
    """The objects that ``keys`` (names, or first digits of chunk keys) name."""
    chosen: dict[str, ChunkInfo] = {}
    for key in keys:
        found = {format_name(info.key): info for info in infos if _is_named(info, key.lower())}
        if not found:
            raise ConfigError(f"no stored object is named {key!r}: `cacheflow store ls` lists them")
        chosen |= found
    return list(chosen.values())


def _is_named(info: ChunkInfo, key: str) -> bool:
    if key == format_name(info.key):
        return True
    return len(key) >= _MIN_PREFIX and info.key.chunk.digest.hex().startswith(key)


def confirm(question: str, *, yes: bool) -> None:
    """Ask unless ``yes``; anything but yes ends the command with exit code 1."""
    if not yes and not typer.confirm(question, err=True):
        raise typer.Exit(1)


async def remove(backend: StorageBackend, keys: Sequence[ObjectKey]) -> int:
    """Delete with a progress bar; returns how many were there."""
    removed = 0
    with progress() as bar:
        task = bar.add_task("removing", total=len(keys))
        for at in range(0, len(keys), _BATCH):
            batch = keys[at : at + _BATCH]
            removed += sum(await backend.delete(batch))
            bar.advance(task, len(batch))
    return removed


def parse_bytes(text: str) -> int:
    """``10GiB`` as a number of bytes, for options."""
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise typer.BadParameter(f"{text!r} is not a size: 800MB, 10GiB, 123456") from None


def parse_seconds(text: str) -> float:
    """``7d`` as a number of seconds, for options."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a duration: 90s, 30m, 12h, 7d, 2w")
    return float(match[1]) * _UNITS[match[2]]
