"""The shared ledger of a folder: bytes in use, and what every process is doing, in one small file.

::

    page 0   two copies of the head (totals, phase, the last change): the newer valid one counts
    then     for each of 64 places (a process takes one) its entries, one an operation in flight

A change alters the totals and one entry together: the head that is written carries the entry too,
and whoever has the next turn writes that entry again, so a writer killed between the two writes
leaves nothing half done. A place is locked as long as its process lives. The turn is a lock held
for a few reads and writes of this file and nothing else, and waiting for it is bounded. Nothing is
forced to the disk: after a crash of the machine nobody is alive, and the bytes are counted anew.

Knows no other file of the store and no limits. Blocking calls: run them on I/O threads.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import zlib
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from cacheflow.errors import ConfigError
from cacheflow.storage_backends.nvme.locks import is_locked, try_lock, unlock
from cacheflow.storage_backends.nvme.records import (
    ENTRIES,
    ENTRY_BYTES,
    FREE,
    PLACES,
    Entry,
    Head,
    Joined,
    Totals,
    parse_entries,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Ledger", "Turn"]

_COPY: Final = 512
_PAGE: Final = 4096
_TURN: Final = 0
"""The byte that is locked for a turn; byte ``1 + place`` stands for a living process."""
_FIRST_STRIPE: Final = 1 + PLACES
_STRIPES: Final = 64
_PATIENCE: Final = 5.0
_FIRST_PAUSE: Final = 20e-6
_LONGEST_PAUSE: Final = 2e-3


class Turn:
    """The ledger to oneself, inside :meth:`Ledger.turn`."""

    def __init__(self, descriptor: int, head: Head) -> None:
        self._descriptor = descriptor
        self.head = head

    @property
    def totals(self) -> Totals:
        """As they are now."""
        return self.head.totals

    def change(
        self, index: int, entry: Entry, *, used: int = 0, pending: int = 0, written: int = 0
    ) -> None:
        """Write one entry and add to the totals, both or neither."""
        totals = self.head.totals.plus(used, pending, written)
        self.write(replace(self.head, totals=totals, index=index, entry=entry))

    def write(self, head: Head) -> None:
        """Put ``head`` in the place of the older copy, then do what it says."""
        self.head = replace(head, sequence=self.head.sequence + 1)
        os.pwrite(self._descriptor, self.head.pack(), self.head.sequence % 2 * _COPY)
        self.redo()

    def redo(self) -> None:
        """Write the entry of the last change (again)."""
        os.pwrite(self._descriptor, self.head.entry.pack(), _offset(self.head.index))


class Ledger:
    """The file as one store sees it; :meth:`join` opens it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._closed = False
        self._lock = threading.Lock()
        """One thread of this store at a time: the lock of the turn is the open file's."""
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]
        self.place = -1

    def join(self) -> Joined:
        """Take a place, the first time, and say how things stand.

        After READY the ledger can be used; after COUNT, once :meth:`counted` was called; after
        WAIT, ask again.

        Raises:
            ConfigError: no place is free, or those who are here use another version's ledger.
            OSError: as the system says, e.g. that there are no locks.
        """
        self._open()
        with self._alone():
            others = [place for place in range(PLACES) if self._is_elsewhere(place)]
            self._take_place()
            head = self._read()
            if others and head is None:
                raise ConfigError(f"{self._path}: another version of CacheFlow has the store open")
            if others and head is not None and head.phase is Joined.READY:
                turn = Turn(self._descriptor, head)
                turn.redo()
                turn.write(replace(head, taken=head.taken | 1 << self.place))
                return Joined.READY
            if head is not None and head.phase is Joined.COUNT and head.counter in others:
                return Joined.WAIT
            self._begin_anew(head.sequence if head is not None else 0)
            return Joined.COUNT

    def counted(self, used: int) -> None:
        """The files have ``used`` bytes: everybody may go on."""
        with self.turn() as turn:
            turn.write(replace(turn.head, phase=Joined.READY, totals=Totals(used)))

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """The ledger to oneself, for as long as it takes to read and write it.

        Raises:
            OSError: TimeoutError if others do not end their turns, or what the file system says.
        """
        with self._alone():
            turn = Turn(self._descriptor, self._head())
            turn.redo()
            yield turn

    def change(
        self, index: int, entry: Entry, *, used: int = 0, pending: int = 0, written: int = 0
    ) -> None:
        """:meth:`Turn.change` in a turn of its own."""
        with self.turn() as turn:
            turn.change(index, entry, used=used, pending=pending, written=written)

    def totals(self) -> Totals:
        """As they were a moment ago; waits for nobody."""
        return self._head().totals

    def name(self, name: str) -> AbstractContextManager[None]:
        """Nobody else moves a file of this name while in the context (or of a few others)."""
        stripe = zlib.crc32(name.encode()) % _STRIPES
        return self._locked(self._stripes[stripe], _FIRST_STRIPE + stripe)

    def is_gone(self) -> bool:
        """Whether the file is there no more, or another one: the folder that was opened was
        removed, or moved, and who opens a store in its place knows nothing of this one."""
        try:
            there = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        return not os.path.samestat(there, os.fstat(self._descriptor))

    def left_here(self) -> list[tuple[int, Entry]]:
        """Entries in use at this store's own place: right after joining, a dead predecessor's."""
        with self.turn():
            return self._entries(self.place)

    def abandoned(self) -> Iterator[list[tuple[int, Entry]]]:
        """Entries in use, with their indexes, of each process that is gone. One thread at a time.

        While the caller has them no other process does; afterwards the place counts as empty if
        they were all freed.
        """
        taken = self._head().taken & ~(1 << self.place)
        for place in (each for each in range(PLACES) if taken >> each & 1):
            if not try_lock(self._descriptor, 1 + place):
                continue
            try:
                with self.turn():  # so that the last change is in its entry
                    found = self._entries(place)
                yield found
                with self.turn() as turn:
                    if not self._entries(place):
                        turn.write(replace(turn.head, taken=turn.head.taken & ~(1 << place)))
            finally:
                unlock(self._descriptor, 1 + place)

    def close(self) -> None:
        """Leave: the place goes with the descriptor. Idempotent."""
        with self._lock:
            self._closed = True
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _open(self) -> None:
        with self._lock:
            if self._descriptor < 0 and not self._closed:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags, 0o600)

    # -- inside a turn -------------------------------------------------------------------------

    def _alone(self) -> AbstractContextManager[None]:
        return self._locked(self._lock, _TURN)

    @contextmanager
    def _locked(self, lock: threading.Lock, byte: int) -> Iterator[None]:
        """One thread of this store, and one store, at a time."""
        deadline = time.monotonic() + _PATIENCE
        if not lock.acquire(timeout=_PATIENCE):
            raise self._busy()
        try:
            pause = _FIRST_PAUSE
            while not try_lock(self._descriptor, byte):
                if time.monotonic() > deadline:
                    raise self._busy()
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                yield
            finally:
                unlock(self._descriptor, byte)
        finally:
            lock.release()

    def _busy(self) -> TimeoutError:
        return TimeoutError(
            errno.ETIMEDOUT, f"{self._path} is held by another process (is it suspended?)"
        )

    def _head(self) -> Head:
        head = self._read()
        if head is None:
            raise OSError(errno.EIO, f"{self._path} was damaged while it was in use")
        return head

    def _read(self) -> Head | None:
        data = os.pread(self._descriptor, 2 * _COPY, 0)
        copies = (Head.parse(data[at : at + _COPY]) for at in (0, _COPY))
        valid = [head for head in copies if head is not None]
        return max(valid, key=lambda head: head.sequence, default=None)

    def _is_elsewhere(self, place: int) -> bool:
        return place != self.place and is_locked(self._descriptor, 1 + place)

    def _take_place(self) -> None:
        if self.place < 0:
            free = (place for place in range(PLACES) if try_lock(self._descriptor, 1 + place))
            self.place = next(free, -1)
        if self.place < 0:
            raise ConfigError(f"{self._path}: {PLACES} processes have the store open already")

    def _begin_anew(self, sequence: int) -> None:
        """Nobody has an operation in flight: entries that are left belong to the dead."""
        os.ftruncate(self._descriptor, _PAGE)
        os.ftruncate(self._descriptor, _offset(PLACES * ENTRIES))
        head = Head(sequence, Joined.COUNT, self.place, 1 << self.place, Totals(), 0, FREE)
        Turn(self._descriptor, head).write(head)

    def _entries(self, place: int) -> list[tuple[int, Entry]]:
        first = place * ENTRIES
        data = os.pread(self._descriptor, ENTRIES * ENTRY_BYTES, _offset(first))
        return parse_entries(data, first)


def _offset(index: int) -> int:
    return _PAGE + index * ENTRY_BYTES
