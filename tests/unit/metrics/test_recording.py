"""Events come back from a file as they were, and a file that is none is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from cacheflow.cli import app
from cacheflow.errors import ConfigError, IntegrityError
from cacheflow.metrics import EventRecorder, read_events
from cacheflow.types import (
    Admitted,
    Evicted,
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
    from pathlib import Path

    from cacheflow.types import Event

EVENTS: list[Event] = [
    LookedUp("r", "disk", 4, 3, 10.0, 10.1),
    Admitted("r", "adaptive", 10.1, 10.1, 64, 0.7),
    LayersComputed("r", 0, 512, False, Span(0, 2), (10.1, 10.3), 10.6),
    LoadEnded("r", "disk", 1, Span(1, 2), 2, 1000, 10.1, 10.4, LoadOutcome.CORRUPT, "bad"),
    Published("r", 1, Span(1, 2), 1000, 10.39, 10.4),
    RestoreEnded("r", "adaptive", "restored", 10.0, 10.6, 10.9, 64, 16, 2, {"disk": 128}, 64),
    FirstToken("r", "adaptive", "hit", 10.0, 11.0, 80, 64, 2, {"disk": 128, "suffix": 32}),
    FirstToken("s", "adaptive", "miss", 12.0, 13.0, 80, 0, 2, {"suffix": 160}),
]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    with EventRecorder(path) as recorder:
        for event in (*EVENTS, Evicted("disk", "capacity", 1, 10, 0.0)):
            recorder(event)
    recorder.close()
    return path


def test_events_come_back(recorded: Path) -> None:
    """Those of requests; what tiers do among themselves is not of any."""
    assert list(read_events(recorded)) == EVENTS


def test_the_file_is_bounded(tmp_path: Path) -> None:
    """Over its size events are dropped and counted, and the file has no gap."""
    path = tmp_path / "events.jsonl"
    with EventRecorder(path, max_bytes=1000) as recorder:
        for _ in range(100):
            recorder(EVENTS[0])
    assert path.stat().st_size <= 1000
    kept = list(read_events(path))
    assert kept == [EVENTS[0]] * len(kept)
    assert len(kept) + recorder.dropped == 100


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[]",
        '{"event": "NoSuchThing"}',
        '{"event": "LookedUp"}',
        '{"event": "LookedUp", "surprise": 1}',
        '{"event": "__class__"}',
        "null",
        "1",
        '{"event": []}',
    ],
)
def test_other_files_are_refused(tmp_path: Path, line: str) -> None:
    """With the number of the line."""
    path = tmp_path / "events.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(IntegrityError, match="line 1 is not an event"):
        list(read_events(path))


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_fields_that_cannot_be_are_refused(event: Event, tmp_path: Path) -> None:
    """What is taken can be shown."""
    path, whole = tmp_path / "events.jsonl", {"event": type(event).__name__, **asdict(event)}
    ways: tuple[list[str], ...] = ([], ["--json"], ["--trace", str(tmp_path / "trace.json")])
    for number, name in enumerate(whole):
        for junk in (None, "x", -1, [], {}, 1e999, {"start": 5, "stop": 1}, [None]):
            path.write_text(json.dumps(whole | {name: junk}) + "\n")
            try:
                list(read_events(path))
            except IntegrityError:
                continue
            result = CliRunner().invoke(app, ["timeline", str(path), *ways[number % 3]])
            assert result.exit_code == 0, (name, junk, result.exception)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        list(read_events(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="cannot be written"):
        EventRecorder(tmp_path / "no" / "folder")


def test_the_command_lists_and_exports(recorded: Path, tmp_path: Path) -> None:
    """One request of the file as JSON, as a trace for Perfetto and as a picture."""
    trace, png = tmp_path / "trace.json", tmp_path / "both.png"
    arguments = ["timeline", str(recorded), "-r", "r", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--trace", str(trace), "--png", str(png)])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert row["request"] == "r"
    assert row["ttft_seconds"] == pytest.approx(1.0)
    assert row["tokens"] == {"disk": 64, "suffix": 16}
    assert any(e["name"] == "tile 0 layer 1" for e in json.loads(trace.read_text())["traceEvents"])
    assert png.read_bytes().startswith(b"\x89PNG")
    listed = CliRunner().invoke(app, ["timeline", str(recorded)])
    assert "1000.0 ms" in listed.output
    none = CliRunner().invoke(app, ["timeline", str(recorded), "-r", "x"])
    assert none.exit_code == 2
