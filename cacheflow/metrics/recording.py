"""Events kept in a file, one JSON object a line, for a look at a request afterwards.

A thread writes; the event loop only queues. What is read back is data, never code: names of events
and their fields are checked against the records in :mod:`cacheflow.types`.
"""

from __future__ import annotations

import json
import math
import queue
import threading
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, Final, Self

from cacheflow.errors import ConfigError, IntegrityError
from cacheflow.types import (
    Admitted,
    FirstToken,
    LayersComputed,
    LoadEnded,
    LoadOutcome,
    LookedUp,
    Published,
    RestoreEnded,
    Span,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cacheflow.types import Event

__all__ = ["EventRecorder", "read_events"]

_KINDS: Final[dict[str, type[Any]]] = {
    kind.__name__: kind
    for kind in (
        *(LookedUp, Admitted, LayersComputed, LoadEnded, Published, RestoreEnded, FirstToken),
    )
}
"""Events of requests: what a timeline shows."""


class EventRecorder:
    """An observer that writes to ``path`` until ``max_bytes``; use it with ``with``.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path, max_bytes: int = 64 << 20) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"events cannot be written to {path}: {error.strerror}") from error
        self.dropped = 0
        """Events that found the file full."""
        self._room = max_bytes
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="cacheflow-recorder", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if type(event).__name__ in _KINDS:
            self._queue.put(event)

    def close(self) -> None:
        """Write what is queued and close the file. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _write(self) -> None:
        while (event := self._queue.get()) is not None:
            line = json.dumps({"event": type(event).__name__, **asdict(event)}) + "\n"
            if len(line) > self._room:
                self._room = 0  # not a shorter one either: what is there has no gaps
                self.dropped += 1
                continue
            self._room -= len(line)
            self._file.write(line)


def read_events(path: Path) -> Iterator[Event]:
    """The events in ``path``, in order.

    Raises:
        ConfigError: the file cannot be read.
        IntegrityError: a line is not an event; says which.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield _event(json.loads(line))
                except (ValueError, TypeError, KeyError) as error:
                    raise IntegrityError(
                        f"{path}, line {number} is not an event as recorded: {error}"
                    ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"events cannot be read from {path}: {error}") from error


def _is_a(kind: str, value: Any) -> bool:
    """Whether ``value``, as JSON has it, is of a field whose annotation is ``kind``."""
    if kind.endswith(" | None"):
        return value is None or _is_a(kind.removesuffix(" | None"), value)
    if kind.startswith("Mapping"):
        return isinstance(value, dict) and all(_is_a("float", each) for each in value.values())
    if kind.startswith("tuple"):
        return isinstance(value, list) and all(_is_a("float", each) for each in value)
    if kind == "Span":
        return isinstance(value, dict) and all(_is_a("int", each) for each in value.values())
    if kind == "float":
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, int if kind in ("int", "bool") else str)


def _event(read: Any) -> Event:
    if not isinstance(read, dict):
        raise TypeError("it is no JSON object")
    if (name := read.pop("event", None)) not in _KINDS:
        raise ValueError(f"it tells of {name!r}")
    kind = _KINDS[name]
    known = {field.name for field in fields(kind)}
    for field in fields(kind):
        if field.name in read and not _is_a(str(field.type), read[field.name]):
            raise TypeError(f"its {field.name} is {read[field.name]!r}")
    if not read.keys() <= known:
        raise ValueError(f"{kind.__name__} has no {', '.join(sorted(read.keys() - known))}")
    if "layers" in read:
        read["layers"] = Span(**read["layers"])
    if "starts" in read:
        read["starts"] = tuple(read["starts"])
    if kind is LoadEnded:
        read["outcome"] = LoadOutcome(read["outcome"])
    event: Event = kind(**read)
    return event
