"""How a folder becomes a store, or is recognised as one: the manifest decides.

Nothing is written to a folder that is something else, or to one that can only be read.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import aiofiles

from cacheflow.errors import ConfigError
from cacheflow.storage_backends.nvme.folder import MANIFEST

if TYPE_CHECKING:
    from cacheflow.storage_backends.nvme.folder import StoreFolder
    from cacheflow.storage_backends.nvme.settings import NvmeOptions
    from cacheflow.storage_backends.threads import IoThreads

__all__ = ["prepare"]

_log = logging.getLogger(__name__)


async def prepare(folder: StoreFolder, options: NvmeOptions, threads: IoThreads) -> None:
    """Check ``folder`` or make it, and remove what writers that are gone have left.

    Raises:
        ConfigError: it is no store and cannot become one, or one of another version.
        IntegrityError: its manifest is damaged.
    """
    if await threads.run(lambda: folder.check_is_free_or_ours(options.create)):
        folder.check_manifest(await _read_manifest(folder))
    else:
        await threads.run(folder.make)
        await _write_manifest(folder, threads)
    if await threads.run(lambda: os.access(folder.root, os.W_OK)):
        await threads.run(folder.make)
        if reaped := await threads.run(folder.reap_temporaries):
            _log.info("%s: removed %d unfinished files", folder.root, reaped)
    if options.direct == "on":
        await threads.run(lambda: _insist_on_direct(folder))


async def _read_manifest(folder: StoreFolder) -> bytes:
    try:
        async with aiofiles.open(folder.root / MANIFEST, "rb") as file:
            return await file.read()
    except OSError as error:
        raise ConfigError(f"{folder.root / MANIFEST} cannot be read: {error.strerror}") from error


async def _write_manifest(folder: StoreFolder, threads: IoThreads) -> None:
    temporary = await threads.run(folder.new_temporary)
    try:
        async with aiofiles.open(temporary, "xb") as file:
            await file.write(folder.manifest())
        await threads.run(lambda: os.replace(temporary, folder.root / MANIFEST))
    except OSError as error:
        raise ConfigError(f"{folder.root} cannot be written: {error.strerror}") from error


def _insist_on_direct(folder: StoreFolder) -> None:
    try:
        os.close(os.open(folder.root / MANIFEST, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
    except OSError as error:
        raise ConfigError(
            f"{folder.root}: the file system has no O_DIRECT and option direct is 'on'; set it to "
            f"'auto'"
        ) from error
