"""What the ledger of a folder holds, and its bytes. Pure: no files, no locks."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

__all__ = [
    "ENTRIES",
    "ENTRY_BYTES",
    "FREE",
    "HEAD_BYTES",
    "PLACES",
    "Entry",
    "Head",
    "Joined",
    "State",
    "Totals",
    "parse_entries",
]

PLACES: Final = 64
"""Processes that can have one folder open."""
ENTRIES: Final = 320
"""Operations that one process can have in flight: more than it can have threads."""
_MAGIC: Final = b"CFLWLG1\n"
_HEAD: Final = struct.Struct("<8sQIIQQQQI4x")
"""Magic, sequence, phase, place that counts, places taken, totals, index of the entry changed."""
_ENTRY: Final = struct.Struct("<I4xQQ8s")
_SUM: Final = struct.Struct("<I")
ENTRY_BYTES: Final = _ENTRY.size
HEAD_BYTES: Final = _HEAD.size + _ENTRY.size + _SUM.size


class State(IntEnum):
    """What an entry's process is about to do with its temporary file and the object."""

    FREE = 0
    RESERVED = 1
    """Writes up to ``nbytes`` to the temporary file."""
    PLACING = 2
    """The file is complete and being moved into place; what it replaces takes its name."""
    REPLACING = 3
    """The same where names cannot be exchanged: ``replaced`` bytes vanish with the move."""
    REMOVING = 4
    """An object is being moved to the temporary name, to be removed."""
    TRASH = 5
    """The temporary file, of ``nbytes``, is being removed."""


class Joined(IntEnum):
    """How things stand for a process that opens a folder."""

    READY = 0
    COUNT = 1
    """Nobody else is here: it has to count the bytes."""
    WAIT = 2
    """Another process is counting."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation in flight; ``token`` (8 bytes) names its temporary file."""

    state: State
    nbytes: int = 0
    replaced: int = 0
    token: bytes = bytes(8)

    def pack(self) -> bytes:
        return _ENTRY.pack(self.state, self.nbytes, self.replaced, self.token)

    @classmethod
    def parse(cls, data: bytes, at: int = 0) -> Entry:
        state, nbytes, replaced, token = _ENTRY.unpack_from(data, at)
        return cls(State(state), nbytes, replaced, token)


FREE: Final = Entry(State.FREE)


@dataclass(frozen=True, slots=True)
class Totals:
    """Bytes. ``used``: all files and what is reserved; ``pending``: reserved, not yet written
    whole; ``written``: ever written whole, which only grows."""

    used: int = 0
    pending: int = 0
    written: int = 0

    def plus(self, used: int, pending: int, written: int) -> Totals:
        """Changed, but never below zero: files may have been altered behind the store's back."""
        return Totals(
            max(0, self.used + used), max(0, self.pending + pending), self.written + written
        )


@dataclass(frozen=True, slots=True)
class Head:
    """The totals, and the last change of an entry, which is part of it."""

    sequence: int
    phase: Joined
    """READY, or COUNT while the process at place ``counter`` counts."""
    counter: int
    taken: int
    """Bit by place: a process was there since the place was last seen empty."""
    totals: Totals
    index: int
    entry: Entry

    def pack(self) -> bytes:
        totals = (self.totals.used, self.totals.pending, self.totals.written)
        fixed = (_MAGIC, self.sequence, self.phase, self.counter, self.taken, *totals, self.index)
        data = _HEAD.pack(*fixed) + self.entry.pack()
        return data + _SUM.pack(zlib.crc32(data))

    @classmethod
    def parse(cls, data: bytes) -> Head | None:
        """None if ``data`` does not begin with a whole head of this version."""
        size = HEAD_BYTES - _SUM.size
        if len(data) < HEAD_BYTES or not data.startswith(_MAGIC):
            return None
        if _SUM.unpack_from(data, size) != (zlib.crc32(data[:size]),):
            return None
        _, sequence, phase, counter, taken, *totals, index = _HEAD.unpack_from(data)
        entry = Entry.parse(data, _HEAD.size)
        return cls(sequence, Joined(phase), counter, taken, Totals(*totals), index, entry)


def parse_entries(data: bytes, first: int) -> list[tuple[int, Entry]]:
    """Those of a row of entries, from index ``first`` on, that are in use."""
    entries = (Entry.parse(data, at) for at in range(0, len(data), ENTRY_BYTES))
    return [(first + n, each) for n, each in enumerate(entries) if each.state is not State.FREE]
