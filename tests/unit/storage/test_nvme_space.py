"""Cap, floor and ledger of an nvme folder: exact to the byte, for one process and for several."""

from __future__ import annotations

import errno
import os
import random
import threading
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from cacheflow.errors import CapacityError, ConfigError
from cacheflow.storage_backends.nvme import ledger as ledger_module
from cacheflow.storage_backends.nvme.folder import StoreFolder
from cacheflow.storage_backends.nvme.ledger import Ledger
from cacheflow.storage_backends.nvme.records import (
    PLACES,
    Joined,
    Totals,
)

if TYPE_CHECKING:
    from pathlib import Path

from tests.unit.storage.dying import Process, bytes_of, exchange, marks_of, sizes, unfinished

__all__ = ["exchange"]  # a fixture


# -- one process -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("exchange")
def test_accounts_are_the_files(tmp_path: Path) -> None:
    """After every store, replacement by another size and removal, used bytes are the files'."""
    one, chance = Process(tmp_path), random.Random(1)
    for _ in range(300):
        name = f"{chance.randrange(20):02}"
        if chance.random() < 0.3:
            was_there = name in sizes(tmp_path)
            assert one.remove(name) is was_there
        else:
            one.put(name, chance.randrange(4000))
        assert one.space.used() == bytes_of(tmp_path)
        assert unfinished(tmp_path) == []
    one.leave()


def test_over_the_cap(tmp_path: Path) -> None:
    """The cap is inclusive; what would exceed it is refused with the option's name, and nothing
    changes. A replacement needs room beside what it replaces until that is gone."""
    one = Process(tmp_path, cap=1000)
    one.put("aa", 600)
    with pytest.raises(CapacityError, match=r"401 bytes, 600 of 1000.*max_bytes"):
        one.put("bb", 401)
    with pytest.raises(CapacityError, match="max_bytes"):
        one.put("aa", 600)
    assert (sizes(tmp_path), one.space.used()) == ({"aa": 600}, 600)
    one.put("bb", 400)
    assert one.space.used() == 1000
    assert one.remove("aa")
    one.put("cc", 600)
    one.leave()


def test_under_the_floor(tmp_path: Path) -> None:
    """What would leave less free than the floor is refused with the option's name; what others are
    about to write counts as written."""
    one, two = Process(tmp_path, floor=10_000), Process(tmp_path, floor=10_000)
    with mock.patch.object(StoreFolder, "free_bytes", return_value=15_000):
        with pytest.raises(CapacityError, match=r"5001 bytes more.*min_free_bytes"):
            one.put("aa", 5_001)

        def fill(temporary: Path) -> None:
            with pytest.raises(CapacityError, match="min_free_bytes"):
                two.put("bb", 2_001)
            temporary.write_bytes(bytes(3_000))

        one.space.put(one.place("aa"), 3_000, fill)
        two.put("bb", 5_000)
    for each in (one, two):
        each.leave()


def test_free_bytes_that_are_old_are_corrected(tmp_path: Path) -> None:
    """What others write between asking the file system and taking the turn is taken off."""
    one, two = Process(tmp_path, floor=10_000), Process(tmp_path)

    def free(_: StoreFolder) -> int:
        two.put("bb", 3_000)
        return 15_000  # as it was before

    with (
        mock.patch.object(StoreFolder, "free_bytes", free),
        pytest.raises(CapacityError, match="min_free_bytes"),
    ):
        one.put("aa", 2_001)
    for each in (one, two):
        each.leave()


def test_a_failed_fill_leaves_nothing(tmp_path: Path) -> None:
    """A disk that fails half-way costs neither bytes nor files; the old object stays."""
    one = Process(tmp_path)
    one.put("aa", 100)

    def fill(temporary: Path) -> None:
        temporary.write_bytes(bytes(50))
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for _ in range(400):  # more often than there are entries
        with pytest.raises(OSError, match="Input/output"):
            one.space.put(one.path("aa"), 200, fill)
    assert (bytes_of(tmp_path), one.space.used()) == (100, 100)
    one.leave()


def test_what_cannot_be_removed_stays_counted(tmp_path: Path) -> None:
    """A file that the disk does not remove stays counted until it does."""
    one = Process(tmp_path, cap=1000)
    one.put("aa", 600)
    broken = mock.patch.object(os, "unlink", side_effect=OSError(errno.EIO, "broken"))
    with broken:
        assert one.remove("aa")
    assert one.space.used() == bytes_of(tmp_path) == 600
    with broken, pytest.raises(CapacityError):
        one.put("bb", 600)
    one.put("bb", 600)
    assert (one.space.used(), unfinished(tmp_path)) == (600, [])
    one.leave()


def test_a_folder_under_an_objects_name(tmp_path: Path) -> None:
    """It is neither replaced nor removed."""
    one = Process(tmp_path)
    one.path("aa").mkdir(parents=True)
    for step in (lambda: one.put("aa", 10), lambda: one.remove("aa")):
        with pytest.raises(IsADirectoryError):
            step()
    assert one.path("aa").is_dir()
    assert (one.space.used(), unfinished(tmp_path)) == (0, [])
    one.leave()


# -- several ---------------------------------------------------------------------------------------


def test_two_share_one_cap(tmp_path: Path) -> None:
    """What one stores the other has no room for; what one removes the other may use."""
    one, two = Process(tmp_path, cap=1000), Process(tmp_path, cap=1000)
    one.put("aa", 700)
    with pytest.raises(CapacityError):
        two.put("bb", 301)
    assert two.remove("aa")
    one.put("bb", 1000)
    assert one.space.used() == two.space.used() == bytes_of(tmp_path)
    for each in (one, two):
        each.leave()


@pytest.mark.usefixtures("exchange")
def test_threads_of_several_stores(tmp_path: Path) -> None:
    """Stores that put and remove the same names all at once keep the cap at every instant, seen
    from outside, and end with exact accounts."""
    processes = [Process(tmp_path, cap=20_000) for _ in range(3)]
    over: list[int] = []
    stop = threading.Event()

    def work(each: Process, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(150):
            name = f"{chance.randrange(12):02}"
            try:
                each.put(name, chance.randrange(4000))
            except CapacityError:
                each.remove(name)

    def watch() -> None:
        """Files that are the same in two looks were there together between them."""
        last = marks_of(tmp_path)
        while not stop.is_set():
            now = marks_of(tmp_path)
            if (both := sum(now[mark] for mark in now.keys() & last.keys())) > 20_000:
                over.append(both)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    threads = [
        threading.Thread(target=work, args=(each, 10 * n + seed))
        for n, each in enumerate(processes)
        for seed in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    watcher.join()
    assert processes[0].space.used() == bytes_of(tmp_path) <= 20_000
    assert unfinished(tmp_path) == []
    assert over == []
    for each in processes:
        each.leave()


def test_later_ones_wait_for_the_count(tmp_path: Path) -> None:
    """Who opens while another counts is told to wait; if that one dies, it counts itself."""
    folder = StoreFolder(tmp_path)
    folder.make()
    first, second, third = (Ledger(folder.ledger) for _ in range(3))
    assert first.join() is Joined.COUNT
    assert second.join() is Joined.WAIT
    first.close()  # as the kernel does it for the dead
    assert second.join() is Joined.COUNT
    assert third.join() is Joined.WAIT
    second.counted(7)
    assert third.join() is Joined.READY
    assert third.totals() == Totals(7)
    second.close()
    third.close()


def test_too_many_processes(tmp_path: Path) -> None:
    """There are as many places as there are; one that leaves makes room."""
    ledgers = [Ledger(tmp_path / "ledger") for _ in range(PLACES + 1)]
    ledgers[0].join()
    ledgers[0].counted(0)
    for each in ledgers[1:PLACES]:
        assert each.join() is Joined.READY
    with pytest.raises(ConfigError, match="64 processes"):
        ledgers[PLACES].join()
    ledgers[5].close()
    assert ledgers[PLACES].join() is Joined.READY
    for each in ledgers:
        each.close()


def test_a_suspended_process_holds_up_nobody_for_long(tmp_path: Path) -> None:
    """Waiting for the turn is bounded; it ends with an error that says what may be the matter."""
    one, two = Process(tmp_path), Process(tmp_path)
    with (
        mock.patch.object(ledger_module, "_PATIENCE", 0.05),
        one.ledger.turn(),
        pytest.raises(TimeoutError, match="suspended"),
    ):
        two.put("aa", 10)
    two.put("aa", 10)
    assert two.space.used() == 10
    for each in (one, two):
        each.leave()
