"""Room in a folder: a cap on its bytes and a floor under the free space, kept by all processes.

Every byte is reserved in the shared ledger before it is written and given back after it is removed,
so the files never have more bytes than the ledger says, whoever dies when. Objects appear and
disappear by moving between their place and a temporary name, which changes no total; what is left
at the temporary name is then removed. :meth:`Space._settle` does that from any state a process can
stop in: it is the last step of every store and removal, and how survivors clean up after the dead.

Blocking calls: run them on I/O threads. No lock is held while files are touched, but for one move
of an object's name, which others who move that name wait for (not for ever).
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from cacheflow.errors import CapacityError
from cacheflow.storage_backends.nvme.moving import CannotExchange, exchange_into
from cacheflow.storage_backends.nvme.records import ENTRIES, FREE, Entry, State

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cacheflow.storage_backends.nvme.folder import StoreFolder
    from cacheflow.storage_backends.nvme.ledger import Ledger
    from cacheflow.storage_backends.nvme.records import Totals

__all__ = ["Room", "Space"]

_log = logging.getLogger(__name__)
_RECLAIM_PATIENCE: Final = 1.0


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of a store and its file system."""

    used: int
    cap: int
    floor: int
    """To be left free on the file system."""
    free: int
    """On the file system, now."""


class Space:
    """The room of one joined store; ``cap`` and ``floor`` in bytes."""

    def __init__(self, folder: StoreFolder, ledger: Ledger, cap: int, floor: int) -> None:
        self.cap = cap
        self.floor = floor
        self._folder = folder
        self._ledger = ledger
        first = ledger.place * ENTRIES
        self._free = list(range(first + ENTRIES - 1, first - 1, -1))
        """Indexes of entries not in use; taken and given back in single steps."""
        self._unsettled: dict[int, Entry] = {}
        """Operations of this store whose last step failed."""
        self._reclaiming = threading.Lock()
        self._leaving = False
        for index, entry in ledger.left_here():
            self._free.remove(index)
            self._end(index, entry)

    def used(self) -> int:
        """Bytes of all files of the store, and of what is being written."""
        return self._ledger.totals().used

    def put(self, path: Path, nbytes: int, fill: Callable[[Path], None]) -> None:
        """Let ``fill`` write a file of at most ``nbytes``, then move it to ``path``.

        Raises:
            CapacityError: over the cap or under the floor; the message names the option.
            OSError: as the system says; nothing is left but what was at ``path`` before.
        """
        index, entry = self._reserve(nbytes)
        temporary = self._temporary(entry)
        try:
            fill(temporary)
            if path.is_dir() and not path.is_symlink():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            placing = replace(entry, state=State.PLACING)
            self._ledger.change(index, placing, pending=-nbytes, written=nbytes)
            entry = placing
            try:
                exchange_into(temporary, path)
            except CannotExchange:
                with self._ledger.name(path.name):
                    size = _size(path) or 0
                    replacing = replace(entry, state=State.REPLACING, replaced=size)
                    self._ledger.change(index, replacing)
                    entry = replacing
                    os.replace(temporary, path)
        finally:
            self._end(index, entry)

    def remove(self, path: Path) -> bool:
        """Remove the file at ``path``; False if there is none.

        Raises:
            OSError: as the system says, or it is a folder.
        """
        try:
            if stat.S_ISDIR(os.lstat(path).st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        except FileNotFoundError:
            return False
        entry = Entry(State.REMOVING, token=secrets.token_bytes(8))
        index = self._take_index()
        try:
            self._ledger.change(index, entry)
            with self._ledger.name(path.name):
                path.rename(self._temporary(entry))
        except FileNotFoundError:
            return False
        finally:
            self._end(index, entry)
        return True

    def reclaim(self) -> int:
        """Finish what the dead have left, and steps of our own that failed; returns how many."""
        if not self._reclaiming.acquire(timeout=_RECLAIM_PATIENCE):
            return 0
        try:
            done = 0
            here = dict(self._ledger.left_here()) if self._unsettled else {}
            for index in list(self._unsettled):
                done += self._end(index, here.get(index, FREE))
            for left in self._ledger.abandoned():
                for index, entry in left:
                    done += self._try_settle(index, entry)
            return done
        finally:
            self._reclaiming.release()

    def leave(self) -> None:
        """Close the ledger, or have it closed by the last operation that is still hung."""
        self._leaving = True
        self._close_if_idle()

    # -- steps ---------------------------------------------------------------------------------

    def _reserve(self, nbytes: int) -> tuple[int, Entry]:
        try:
            return self._try_reserve(nbytes)
        except CapacityError:
            if not self.reclaim():
                raise
        return self._try_reserve(nbytes)

    def _try_reserve(self, nbytes: int) -> tuple[int, Entry]:
        if self._ledger.is_gone():
            raise FileNotFoundError(
                errno.ENOENT,
                "the folder was removed, moved or replaced while it was open; start this process "
                "anew to have a store there",
            )
        # Asking the file system may hang, so it is asked before the turn; what others have written
        # since then is taken off.
        written = self._ledger.totals().written
        free = self._folder.free_bytes() if self.floor else 0
        entry = Entry(State.RESERVED, nbytes, token=secrets.token_bytes(8))
        with self._ledger.turn() as turn:
            since = turn.totals.written - written
            self._check(nbytes, turn.totals, free - since)
            index = self._take_index()
            try:
                turn.change(index, entry, used=nbytes, pending=nbytes)
            except BaseException:
                self._free.append(index)
                raise
        return index, entry

    def _take_index(self) -> int:
        try:
            return self._free.pop()
        except IndexError:  # only if hundreds of operations could not be ended
            raise OSError(errno.EAGAIN, "too many unfinished operations") from None

    def _check(self, nbytes: int, totals: Totals, free: int) -> None:
        if totals.used + nbytes > self.cap:
            raise CapacityError(
                f"nvme tier at {self._folder.root}: no room for {nbytes} bytes, {totals.used} of "
                f"{self.cap} are in use; raise option max_bytes"
            )
        if self.floor and free - totals.pending - nbytes < self.floor:
            raise CapacityError(
                f"nvme tier at {self._folder.root}: {nbytes} bytes more would leave less than "
                f"{self.floor} free on the file system ({free} are); see option min_free_bytes"
            )

    def _end(self, index: int, entry: Entry) -> bool:
        """Settle an operation of this store and give its entry back."""
        is_settled = self._try_settle(index, entry)
        if is_settled:
            self._unsettled.pop(index, None)
            self._free.append(index)
            self._close_if_idle()
        else:
            self._unsettled[index] = entry
        return is_settled

    def _try_settle(self, index: int, entry: Entry) -> bool:
        try:
            self._settle(index, entry)
        except OSError as error:  # its bytes stay counted until it works
            _log.warning("%s: %s is left for now: %s", self._folder.root, entry, error)
            return False
        return True

    def _settle(self, index: int, entry: Entry) -> None:
        if entry.state is State.FREE:  # its first step was never written down
            return
        temporary = self._temporary(entry)
        size = _size(temporary)
        used = pending = 0
        if entry.state is State.RESERVED:
            used = pending = entry.nbytes
        elif size is not None:  # not moved into place, or what was replaced or removed
            used = size
            if entry.state is not State.TRASH:
                self._ledger.change(index, replace(entry, state=State.TRASH, nbytes=size))
        elif entry.state is State.TRASH:  # removed already
            used = entry.nbytes
        elif entry.state is State.REPLACING:
            used = entry.replaced
        if size is not None:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
        self._ledger.change(index, FREE, used=-used, pending=-pending)

    def _temporary(self, entry: Entry) -> Path:
        return self._folder.temporary / entry.token.hex()

    def _close_if_idle(self) -> None:
        if self._leaving and len(self._free) + len(self._unsettled) == ENTRIES:
            self._ledger.close()


def _size(path: Path) -> int | None:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return None
