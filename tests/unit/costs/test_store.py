"""Learned costs on disk: a head start when all is well, a cold start and a log line otherwise."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheflow.costs import (
    ChannelModel,
    ChannelProfile,
    ComputeModel,
    ComputeProfile,
    CostStore,
    KeptCosts,
    channel_key,
    compute_key,
)
from cacheflow.types import Tile

if TYPE_CHECKING:
    from pathlib import Path

COMPUTE = ComputeProfile(1e-4, 2e-12, 3e-12, 4e-3)
CHANNEL = ChannelProfile(5e-3, 1e-8, 1e6)
DAY = 86400.0


def saved(path: Path, now: float = 1e9) -> CostStore:
    store = CostStore(path, now=lambda: now)
    assert store.save({"model": COMPUTE}, {"disk": CHANNEL})
    return store


def cold(store: CostStore) -> bool:
    return store.compute("model") is None and store.channel("disk") is None


def test_what_is_saved_is_read_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By this and by another process, without a word in the log, and nothing else is left there."""
    path = tmp_path / "new" / "costs.json"
    for store in (saved(path), CostStore(path, now=lambda: 1e9)):
        assert store.compute("model") == COMPUTE
        assert store.channel("disk") == CHANNEL
        assert store.compute("disk") is None
        assert store.channel("model") is None
    assert [each.name for each in path.parent.iterdir()] == ["costs.json"]
    assert not caplog.records


def test_others_entries_are_kept(tmp_path: Path) -> None:
    """Two processes with different models share the file; the same one is replaced."""
    path = tmp_path / "costs.json"
    saved(path)
    other = CostStore(path, now=lambda: 1e9)
    newer = ChannelProfile(1e-3, 1e-9, 1e6)
    assert other.save({"other": COMPUTE}, {"disk": newer})
    store = CostStore(path, now=lambda: 1e9)
    assert store.compute("model") == store.compute("other") == COMPUTE
    assert store.channel("disk") == newer


def test_the_file_does_not_grow_for_ever(tmp_path: Path) -> None:
    """The oldest entries go."""
    path = tmp_path / "costs.json"
    for number in range(3):
        store = CostStore(path, now=lambda n=number: 1e9 + n)  # type: ignore[misc]
        assert store.save({}, {f"{number}-{i}": CHANNEL for i in range(300)})
    assert store.channel("0-0") is None
    assert store.channel("2-0") == CHANNEL


def test_a_missing_file_is_a_cold_start_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first start ever is nothing to warn of."""
    assert cold(CostStore(tmp_path / "costs.json"))
    assert not caplog.records


def _truncated(text: str) -> str:
    return text[: len(text) // 2]


def _other_format(text: str) -> str:
    return text.replace('"format": 1', '"format": 2')


def _altered(text: str) -> str:
    return text.replace("0.0001", "0.0002")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_truncated, "cannot use learned costs"),
        (_other_format, "format 2, this version reads 1"),
        (_altered, "checksum is wrong"),
        (lambda text: "[]", "not a profile"),
        (lambda text: "", "cannot use learned costs"),
        (lambda text: "[" * 100_000, "cannot use learned costs"),
        (lambda text: " " * (2 << 20) + text, "larger than"),
        (lambda text: "\x00\xff", "cannot use learned costs"),
    ],
)
def test_a_damaged_file_is_a_cold_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any, said: str
) -> None:
    """Truncated, altered, of another version or no profile at all: one line in the log, however
    often it is asked, and the next save replaces it."""
    path = tmp_path / "costs.json"
    saved(path)
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="latin-1")
    store = CostStore(path, now=lambda: 1e9)
    assert cold(store)
    assert cold(store)
    assert len(caplog.records) == 1
    assert said in caplog.text
    assert store.save({"model": COMPUTE}, {})
    assert store.compute("model") == COMPUTE


@pytest.mark.parametrize("days", [31, -2])
def test_a_stale_profile_is_a_cold_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, days: int
) -> None:
    """A month old, or saved under a clock that was wrong."""
    path = tmp_path / "costs.json"
    saved(path)
    assert cold(CostStore(path, now=lambda: 1e9 + days * DAY))
    assert "stale" in caplog.text
    assert not cold(CostStore(path, now=lambda: 1e9 + 29 * DAY))


@given(
    value=st.none() | st.booleans() | st.text() | st.floats() | st.sampled_from([[], {}, 10**400])
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_numbers_that_make_no_sense_are_not_used(tmp_path: Path, value: Any) -> None:
    """Whatever a well-formed file says: a profile that a machine may have, or none."""
    path = tmp_path / "costs.json"
    store = saved(path)
    entries = store._read()
    for name in ("launch", "linear", "typical", "saved"):
        from cacheflow.costs import store as module

        changed = {**entries, "compute:model": {**entries["compute:model"], name: value}}
        changed["channel:disk"] = value
        document = {"format": 1, "checksum": module._digest(changed), "entries": changed}
        path.write_text(json.dumps(document), encoding="utf-8")
        found = store.compute("model")
        assert found is None or isinstance(found, ComputeProfile)
        assert store.channel("disk") is None


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is kept, nothing raised: here the cache directory is a file."""
    (tmp_path / "cache").write_text("a file")
    store = CostStore(tmp_path / "cache" / "costs.json")
    for _ in range(3):
        assert not store.save({"model": COMPUTE}, {})
    assert cold(store)
    assert sum("cannot be kept" in each.getMessage() for each in caplog.records) == 1


def test_a_write_that_fails_half_way_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: what was there stays, and no temporary file does."""
    path = tmp_path / "costs.json"
    store = saved(path)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert not store.save({"model": ComputeProfile(1, 1, 1, 1)}, {})
    assert store.compute("model") == COMPUTE
    assert [each.name for each in tmp_path.iterdir()] == ["costs.json"]


def test_keys_say_what_decides_the_costs() -> None:
    """Another model, device, thread count, backend or option is another key; secrets stay out."""
    identity: dict[str, str | int] = {"weights": "abc", "layers": 3}
    keys = [
        compute_key(identity, "threads=1"),
        compute_key(identity, "threads=2"),
        compute_key({**identity, "weights": "abd"}, "threads=1"),
    ]
    assert len(set(keys)) == 3
    assert keys[0] == compute_key({"layers": 3, "weights": "abc"}, "threads=1")
    options = {"path": "/x", "token": "secret"}
    links = [
        channel_key("disk", "nvme", options),
        channel_key("disk2", "nvme", options),
        channel_key("disk", "dram", options),
        channel_key("disk", "nvme", {**options, "path": "/y"}),
    ]
    assert len(set(links)) == 4
    assert not any("secret" in key for key in links)


def kept(path: Path) -> tuple[KeptCosts, ComputeModel, dict[str, ChannelModel]]:
    compute, channels = ComputeModel(1.0, 1e-3), {"disk": ChannelModel()}
    store = CostStore(path, now=lambda: 1e9)
    return (
        KeptCosts(store, compute, "model", {"disk": "disk"}, channels.__getitem__),
        compute,
        channels,
    )


def test_what_one_process_learns_the_next_begins_with(tmp_path: Path) -> None:
    """Compute and channels; nothing is written while nothing was learned."""
    costs, compute, channels = kept(tmp_path / "costs.json")
    costs.prime(*costs.read())
    assert not compute.known
    assert costs.to_save() is None
    compute.observe(Tile(0, 0, 32), 0.5)
    channels["disk"].started(1, 1000, 0.0)
    channels["disk"].ended(1, 2.0, delivered=True)
    save = costs.to_save()
    assert save is not None
    assert save()
    assert costs.to_save() is None
    again, primed, links = kept(tmp_path / "costs.json")
    again.prime(*again.read())
    assert primed.layer_seconds(Tile(0, 0, 32)) == pytest.approx(0.5)
    assert links["disk"].left(1000, 0.0) == pytest.approx(2.0)
    assert again.to_save() is None


def test_a_head_start_does_not_replace_what_is_known(tmp_path: Path) -> None:
    """Models that have learned meanwhile keep what they know."""
    path = tmp_path / "costs.json"
    saved(path)
    costs, compute, _ = kept(path)
    compute.observe(Tile(0, 0, 32), 0.5)
    costs.prime(*costs.read())
    assert compute.layer_seconds(Tile(0, 0, 32)) == pytest.approx(0.5)
