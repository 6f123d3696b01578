"""Learned costs from one process to the next: one JSON file in the cache directory.

Keyed by what decides them: model, device and threads for compute; name, backend and options for a
channel. A profile is only ever a head start, so nothing here may cost more than that: a file that
is missing, stale, damaged, of another version or not writable means a cold start and a line in the
log, never an exception. Blocking I/O: call it off the event loop.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TypeVar

from cacheflow.costs.profile import ChannelProfile, ComputeProfile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

__all__ = ["COSTS_FILE", "CostStore", "channel_key", "compute_key"]

_log = logging.getLogger(__name__)

COSTS_FILE: Final = "costs.json"
"""In the cache directory."""
FORMAT: Final = 1
_STALE_SECONDS: Final = 30 * 86400.0
_AHEAD_SECONDS: Final = 86400.0
"""A profile from further in the future than this was saved under a wrong clock."""
_MAX_BYTES: Final = 1 << 20
_MAX_ENTRIES: Final = 512

P = TypeVar("P", ComputeProfile, ChannelProfile)


def compute_key(identity: Mapping[str, str | int], grid_id: str) -> str:
    """Names what decides compute costs: the model, and what ``grid_id`` says of the machine."""
    return _digest({"identity": dict(identity), "grid": grid_id})


def channel_key(name: str, backend: str, options: Mapping[str, object]) -> str:
    """Names a channel; options go in as a digest, for they may hold secrets."""
    return f"{name}/{backend}/{_digest(dict(options))[:16]}"


class CostStore:
    """Profiles in the file ``path``. ``now`` is the time of day in seconds since the epoch.

    Several processes may share the file: each replaces it whole and keeps the entries of others.
    """

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        self._path = path
        self._now = now
        self._complained: set[str] = set()

    def compute(self, key: str) -> ComputeProfile | None:
        """What is known of a model on a device, or None."""
        return self._entry("compute", key, ComputeProfile)

    def channel(self, key: str) -> ChannelProfile | None:
        """What is known of a channel, or None."""
        return self._entry("channel", key, ChannelProfile)

    def save(
        self, compute: Mapping[str, ComputeProfile], channels: Mapping[str, ChannelProfile]
    ) -> bool:
        """Put these profiles beside those of others; whether that worked."""
        if not compute and not channels:
            return True
        entries = {**self._read(), **self._stamped("compute", compute)}
        entries |= self._stamped("channel", channels)
        newest = sorted(entries.items(), key=lambda item: _saved(item[1]), reverse=True)
        body = dict(newest[:_MAX_ENTRIES])
        document = {"format": FORMAT, "checksum": _digest(body), "entries": body}
        try:
            self._replace(json.dumps(document, indent=1, allow_nan=False))
        except (OSError, ValueError) as error:
            self._complain(f"learned costs cannot be kept: {error}; the next start is a cold one")
            return False
        return True

    def _stamped(self, kind: str, profiles: Mapping[str, P]) -> dict[str, Any]:
        now = self._now()
        return {f"{kind}:{key}": {"saved": now, **asdict(p)} for key, p in profiles.items()}

    def _replace(self, text: str) -> None:
        """Atomically; another process sees the old file or the new one."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=".costs-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, self._path)
        except BaseException:  # interrupted as well: leave no file behind
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _entry(self, kind: str, key: str, record: type[P]) -> P | None:
        entry = self._read().get(f"{kind}:{key}")
        if entry is None:
            return None
        try:
            age = self._now() - _saved(entry)
            if not -_AHEAD_SECONDS <= age <= _STALE_SECONDS:
                self._complain(f"{self._path}: learned {kind} costs are stale; starting cold")
                return None
            return record(**{name: value for name, value in entry.items() if name != "saved"})
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            self._complain(f"{self._path}: learned {kind} costs make no sense ({error})")
            return None

    def _read(self) -> dict[str, Any]:
        """All entries; none when the file is missing or cannot be used."""
        try:
            with self._path.open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
            return _entries(data)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self._complain(f"{self._path}: cannot use learned costs ({error}); starting cold")
            return {}

    def _complain(self, message: str) -> None:
        """Say each thing once."""
        if message not in self._complained:
            self._complained.add(message)
            _log.warning("%s", message)


def _entries(data: bytes) -> dict[str, Any]:
    """Raises ValueError unless ``data`` is a whole file of this format."""
    if len(data) > _MAX_BYTES:
        raise ValueError(f"larger than {_MAX_BYTES} bytes")
    document = json.loads(data)
    if not isinstance(document, dict):
        raise ValueError("not a profile")
    if document.get("format") != FORMAT:
        raise ValueError(f"format {document.get('format')!r}, this version reads {FORMAT}")
    entries = document.get("entries")
    if not isinstance(entries, dict) or document.get("checksum") != _digest(entries):
        raise ValueError("its checksum is wrong")
    return entries


def _saved(entry: Any) -> float:
    saved = entry.get("saved") if isinstance(entry, dict) else None
    try:
        return float(saved) if isinstance(saved, (int, float)) else 0.0
    except OverflowError:  # an integer of any length is JSON
        return 0.0


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
