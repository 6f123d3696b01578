"""What left a tier is remembered by its key and reason, within bounds, and never on the loop."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from cacheflow.settings import TierSettings
from cacheflow.tiers.departures import Departures, departures_path, read_departures
from cacheflow.tiers.explaining import ABSENT, absent
from cacheflow.types import ChunkKey, Evicted, TierUsage

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "big")[::-1])


def left(reason: str, *numbers: int, channel: str = "disk") -> Evicted:
    chunks = tuple(key(number).digest for number in numbers)
    return Evicted(channel, reason, len(chunks), 10, 0.0, chunks)


def keep(path: Path, *events: Evicted | TierUsage, records: int = 8) -> None:
    departures = Departures(path, "disk", records)
    for event in events:
        departures(event)
    departures.close()
    departures.close()


def test_the_last_reason_counts(tmp_path: Path) -> None:
    """Also of those that an earlier process kept; other tiers and events do not matter."""
    path = tmp_path / "new" / "ring"
    keep(path, left("capacity", 1, 2), left("ttl", 3), left("quota", 9, channel="net"))
    keep(path, left("corrupt", 2), TierUsage("disk", 1, 2, 3, 0.0))
    found = read_departures(path)
    reasons = [found.reason(key(number)) for number in (1, 2, 3, 9)]
    assert reasons == ["capacity", "corrupt", "ttl", ""]
    assert found.all_known
    assert path.stat().st_mode & 0o077 == 0


def test_the_file_is_bounded(tmp_path: Path) -> None:
    """The oldest are overwritten, and it is known then that not all are known."""
    path = tmp_path / "ring"
    keep(path, left("capacity", *range(8)))
    size = path.stat().st_size
    assert read_departures(path).all_known
    keep(path, left("ttl", *range(8, 11)))
    found = read_departures(path)
    assert path.stat().st_size == size
    assert not found.all_known
    reasons = [found.reason(key(number)) for number in range(11)]
    assert reasons == [""] * 3 + ["capacity"] * 5 + ["ttl"] * 3


def test_nothing_is_begun_before_something_leaves(tmp_path: Path) -> None:
    """No thread and no file for a tier that never evicts."""
    departures = Departures(tmp_path / "ring", "disk")
    departures(TierUsage("disk", 1, 2, 3, 0.0))
    assert not any(thread.name == "cacheflow-departures" for thread in threading.enumerate())
    departures.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_used_costs_nobody_anything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder in its place is a line in the log; what is no ring says nothing."""
    keep(tmp_path, left("ttl", 1))
    assert "what leaves tier disk is not kept" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
    (tmp_path / "other").write_bytes(b"something else" * 99)
    for path in (tmp_path, tmp_path / "none", tmp_path / "other"):
        found = read_departures(path)
        assert (found.reason(key(1)), found.all_known) == ("", False)


def test_a_tier_is_known_by_where_it_stores(tmp_path: Path) -> None:
    """Not by what it is called, so that `cacheflow explain --folder` finds what a server kept."""
    store = str(tmp_path / "kv")
    one = TierSettings(name="disk", backend="nvme", options={"path": store, "threads": 4})
    same = TierSettings(name="x", backend="nvme", options={"path": f"{store}/../kv"})
    other = TierSettings(name="disk", backend="nvme", options={"path": f"{store}2"})
    paths = [departures_path(tmp_path, each) for each in (one, same, other)]
    assert paths[0] == paths[1] != paths[2]


def test_words_for_what_is_not_there() -> None:
    """Evicted, expired, never written; and nothing is claimed where not everything is known."""
    assert absent("capacity", all_known=False).what == "evicted (capacity)"
    assert absent("ttl", all_known=True).what == "expired"
    assert absent("", all_known=True).what.startswith("never written")
    assert absent("", all_known=False) is ABSENT
    assert not any(absent(r, all_known=True).usable for r in ("", "ttl", "full", "new"))
