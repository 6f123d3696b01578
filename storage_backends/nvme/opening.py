"""How a folder becomes a store, or is recognised as one, and how a process joins those that use it.

The manifest decides what is a store. Nothing is written to a folder that is something else, or to
one that can only be read. The first process to open a store removes what the dead have left
unfinished and counts the bytes; the others wait for it, and rely on the ledger from then on.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from typing import TYPE_CHECKING, Final

from cacheflow.errors import ConfigError
from cacheflow.storage_backends.nvme.files import O_DIRECT
from cacheflow.storage_backends.nvme.folder import MANIFEST
from cacheflow.storage_backends.nvme.records import Joined
from cacheflow.storage_backends.nvme.space import Room, Space

if TYPE_CHECKING:
    from cacheflow.storage_backends.nvme.folder import StoreFolder
    from cacheflow.storage_backends.nvme.ledger import Ledger
    from cacheflow.storage_backends.nvme.settings import NvmeOptions
    from cacheflow.storage_backends.threads import IoThreads

__all__ = ["join", "prepare", "room_of"]

_log = logging.getLogger(__name__)
_ASK_AGAIN: Final = 0.02
_REPORT_SECONDS: Final = 2.0


async def prepare(folder: StoreFolder, options: NvmeOptions, threads: IoThreads) -> int:
    """Check ``folder`` or make it; 0 if it can be written, else the ``errno`` that says why not.

    Raises:
        ConfigError: it is no store and cannot become one, one of another version, or one whose
            folders are links.
        IntegrityError: its manifest is damaged.
    """
    if await threads.run(lambda: folder.check_is_free_or_ours(options.create)):
        folder.check_manifest(await threads.run(lambda: _read_manifest(folder)))
    else:
        await threads.run(folder.make)
        await threads.run(lambda: _write_manifest(folder))
    await threads.run(folder.check_no_links)
    if options.direct == "on":
        await threads.run(lambda: _insist_on_direct(folder))
    refusal: int = await threads.run(folder.refusal)
    if refusal:
        why = os.strerror(refusal)
        _log.warning("%s can only be read, nothing is stored in it: %s", folder.root, why)
    else:
        await threads.run(folder.make)
    return refusal


def _read_manifest(folder: StoreFolder) -> bytes:
    try:
        return (folder.root / MANIFEST).read_bytes()
    except OSError as error:
        raise ConfigError(f"{folder.root / MANIFEST} cannot be read: {error.strerror}") from error


def _write_manifest(folder: StoreFolder) -> None:
    temporary, manifest = folder.new_temporary(), folder.root / MANIFEST
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(folder.manifest())
        os.replace(temporary, manifest)
    except FileNotFoundError as error:
        # Whoever else made the store at the same time may have taken ours for a leftover.
        if not manifest.exists():
            raise ConfigError(f"{folder.root} was removed while it was made") from error
    except OSError as error:
        raise ConfigError(f"{folder.root} cannot be written: {error.strerror}") from error


def _insist_on_direct(folder: StoreFolder) -> None:
    try:
        if not O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        os.close(os.open(folder.root / MANIFEST, os.O_RDONLY | O_DIRECT | os.O_CLOEXEC))
    except OSError as error:
        raise ConfigError(
            f"{folder.root}: the file system has no O_DIRECT and option direct is 'on'; set it to "
            f"'auto'"
        ) from error


async def join(
    folder: StoreFolder, options: NvmeOptions, ledger: Ledger, threads: IoThreads
) -> Space:
    """Join those who use the store; the first one counts.

    Raises:
        ConfigError: the ledger cannot be used, or not with those who are there.
    """
    try:
        # Whoever counts is another process: nothing here can be awaited.
        while (joined := await threads.run(ledger.join)) is Joined.WAIT:  # noqa: ASYNC110
            await asyncio.sleep(_ASK_AGAIN)
        if joined is Joined.COUNT:
            await threads.run(lambda: ledger.counted(_clean_and_count(folder)))
        space: Space = await threads.run(lambda: _space(folder, options, ledger))
    except OSError as error:
        where = f"{folder.ledger}: {error.strerror or error}"
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise ConfigError(
                f"{where}: the file system has no file locks; give the tier a folder on another "
                f"one, or use another tier (docs/store.md)"
            ) from error
        raise ConfigError(f"{where}: the store cannot be joined") from error
    return space


def room_of(folder: StoreFolder, options: NvmeOptions, used: int) -> Room:
    """What ``options`` mean for a store that uses so many bytes."""
    size, free = folder.size_bytes(), folder.free_bytes()
    return Room(used, options.cap(size), options.floor(size, free, used), free)


def _space(folder: StoreFolder, options: NvmeOptions, ledger: Ledger) -> Space:
    room = room_of(folder, options, ledger.totals().used)
    space = Space(folder, ledger, room.cap, room.floor)
    if reclaimed := space.reclaim():
        _log.info("%s: finished %d steps of processes that are gone", folder.root, reclaimed)
    return space


def _clean_and_count(folder: StoreFolder) -> int:
    if removed := folder.clear_temporary():
        _log.info("%s: removed %d unfinished files", folder.root, removed)
    total = count = 0
    reported = time.monotonic()
    for file in folder.files():
        total, count = total + file.nbytes, count + 1
        if not count % 1024 and time.monotonic() - reported > _REPORT_SECONDS:
            reported = time.monotonic()
            _log.info("%s: counted %d files so far", folder.root, count)
    return total
