"""Which chunks left a tier lately, and why: what ``cacheflow explain`` tells a missing chunk by.

A ring of fixed records in a small file of the cache directory, one file a tier. Its observer only
queues; a thread, which the first departure starts, writes. For people and best effort: of a store
that several machines share it knows what this one has evicted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Final

from cacheflow.types import Evicted

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import BinaryIO

    from cacheflow.settings import TierSettings
    from cacheflow.types import ChunkKey, Event

__all__ = ["Departed", "Departures", "departures_path", "read_departures"]

_log = logging.getLogger(__name__)

_MAGIC: Final = b"cf-left1"
_HEAD: Final = Struct("<8sQ48x")
"""The magic, and how many records were ever written."""
_RECORD: Final = Struct("<16sd8s")
"""First half of the chunk's digest, Unix time, reason."""
_RECORDS: Final = 65536
_HALF: Final = 16


def departures_path(cache_dir: Path, tier: TierSettings) -> Path:
    """Where the departures of ``tier`` are kept: named by what it stores in, not by its own name,
    so that whoever opens the same folder finds them."""
    place = tier.options.get("path")
    where = str(Path(str(place)).resolve()) if place else json.dumps(tier.options, default=str)
    name = hashlib.blake2b(f"{tier.backend}\n{where}".encode(), digest_size=12).hexdigest()
    return cache_dir / "departures" / f"{name}.ring"


class Departures:
    """An observer that keeps what left ``channel`` in the file ``path``. ``records``: how many."""

    def __init__(self, path: Path, channel: str, records: int = _RECORDS) -> None:
        self._path = path
        self._channel = channel
        self._records = records
        self._queue: queue.SimpleQueue[tuple[float, Evicted] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Evicted) and event.channel == self._channel and event.chunks:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._write, name="cacheflow-departures", daemon=True
                )
                self._thread.start()
            self._queue.put((time.time(), event))

    def close(self) -> None:
        """Write what is queued. Blocks; idempotent."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _write(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch(mode=0o600)
            with self._path.open("r+b", buffering=0) as file:
                count = _count(file)
                while (each := self._queue.get()) is not None:
                    count = self._append(file, count, *each)
        except OSError as error:
            _log.warning("what leaves tier %s is not kept: %s", self._channel, error)

    def _append(self, file: BinaryIO, count: int, at: float, event: Evicted) -> int:
        for digest in event.chunks:
            file.seek(_HEAD.size + count % self._records * _RECORD.size)
            file.write(_RECORD.pack(digest[:_HALF], at, event.reason.encode()))
            count += 1
        file.seek(0)
        file.write(_HEAD.pack(_MAGIC, count))
        return count


@dataclass(frozen=True, slots=True)
class Departed:
    """What a ring says. ``all_known``: there is one, and nothing in it was overwritten yet."""

    reasons: Mapping[bytes, tuple[str, float]] = field(default_factory=dict)
    all_known: bool = False

    def reason(self, key: ChunkKey) -> str:
        """Why the chunk left, the last time; empty if it is not among those that did."""
        return self.reasons.get(key.digest[:_HALF], ("", 0.0))[0]


def read_departures(path: Path) -> Departed:
    """All that is kept in ``path``; nothing if there is no such file, or it is another. Blocks."""
    try:
        with path.open("rb") as file:
            count, body = _count(file), file.read()
    except OSError:
        return Departed()
    last: dict[bytes, tuple[str, float]] = {}
    whole = len(body) // _RECORD.size * _RECORD.size if count else 0
    for digest, at, reason in sorted(_RECORD.iter_unpack(body[:whole]), key=lambda each: each[1]):
        last[digest] = (reason.rstrip(b"\0").decode("ascii", "replace"), at)
    return Departed(last, 0 < count * _RECORD.size <= whole)


def _count(file: BinaryIO) -> int:
    """Records ever written; the file stands behind its head then."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return 0
    magic, count = _HEAD.unpack(head)
    return int(count) if magic == _MAGIC else 0
