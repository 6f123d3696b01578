"""Stores in folders, for tests of the nvme backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheflow.kv import format_name
from cacheflow.storage_backends.nvme import NvmeBackend
from cacheflow.testing.storage_harness import store_all

if TYPE_CHECKING:
    from pathlib import Path

    from cacheflow.testing.objects import StoredObject

__all__ = ["MANIFEST", "file_of", "listing", "make_store", "names_in", "open_store"]

MANIFEST = "cacheflow-store.json"


async def open_store(folder: Path, **options: object) -> NvmeBackend:
    return await NvmeBackend.open({"path": str(folder), **options})


def file_of(folder: Path, stored: StoredObject) -> Path:
    name = format_name(stored.key)
    return folder / "objects" / name[:2] / name


def listing(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def make_store(folder: Path, *objects: StoredObject) -> None:
    backend = await open_store(folder)
    if objects:
        await store_all(backend, *objects)
    await backend.aclose()
