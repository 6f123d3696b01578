"""The ledger of an nvme folder when processes die at any step, or its own bytes are damaged."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import pytest

from cacheflow.errors import CapacityError, ConfigError
from cacheflow.storage_backends.nvme.ledger import Ledger
from cacheflow.storage_backends.nvme.records import (
    FREE,
    Entry,
    Head,
    Joined,
    State,
    Totals,
)

if TYPE_CHECKING:
    from pathlib import Path

from tests.unit.storage.dying import Died, Killer, Process, bytes_of, exchange, sizes, unfinished

__all__ = ["exchange"]  # a fixture


@pytest.mark.usefixtures("exchange")
@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("what", ["new", "larger", "smaller", "removed"])
def test_death_at_every_step(tmp_path: Path, what: str, done: bool) -> None:
    """A process that stops at any system call, before or after it took place, leaves the object as
    it was or as it was to be; survivors get the bytes right and remove what was left, and so does
    the next process that takes its place."""
    steps = 0
    while True:
        steps += 1
        root = tmp_path / str(steps)
        survivor = Process(root)
        victim = Process(root)
        survivor.put("zz", 777)
        if what != "new":
            victim.put("aa", 1000)
        before = sizes(root)
        killer = Killer(steps, done=done)
        with killer:
            try:
                if what == "removed":
                    victim.remove("aa")
                else:
                    victim.put("aa", {"new": 500, "larger": 3000, "smaller": 200}[what])
            except Died:
                assert killer.died
        assert bytes_of(root) <= survivor.space.used()
        victim.ledger.close()  # as the kernel does it
        if steps % 2:
            heir = Process(root)
            heir.leave()
        survivor.space.reclaim()
        assert unfinished(root) == []
        assert survivor.space.used() == bytes_of(root)
        after = sizes(root)
        if not killer.died:
            break
        assert after in (before, expected(before, what))
        survivor.leave()
    assert after == expected(before, what)
    assert steps > 4
    survivor.leave()


def expected(before: dict[str, int], what: str) -> dict[str, int]:
    after = dict(before)
    if what == "removed":
        after.pop("aa", None)
    else:
        after["aa"] = {"new": 500, "larger": 3000, "smaller": 200}[what]
    return after


def test_the_dead_make_room(tmp_path: Path) -> None:
    """What the dead had reserved is given back before a store is refused."""
    survivor, victim = Process(tmp_path, cap=1000), Process(tmp_path, cap=1000)

    place = victim.place("aa")

    def die(temporary: Path) -> None:
        temporary.write_bytes(bytes(400))
        killer.died = True
        raise Died

    with Killer(1_000, done=True) as killer, pytest.raises(Died):
        victim.space.put(place, 900, die)
    with pytest.raises(CapacityError):
        survivor.put("bb", 800)  # it may still be writing
    victim.ledger.close()
    survivor.put("bb", 800)
    assert (survivor.space.used(), unfinished(tmp_path)) == (800, [])
    survivor.leave()


def test_a_hung_operation_keeps_its_place(tmp_path: Path) -> None:
    """A store that is left while one of its operations hangs in the disk is not taken for dead
    until that has ended: others would give away what it may still move into place."""
    one, two = Process(tmp_path, cap=1000), Process(tmp_path, cap=1000)
    go, hung = threading.Event(), threading.Event()

    def fill(temporary: Path) -> None:
        temporary.write_bytes(bytes(600))
        hung.set()
        go.wait(20)

    thread = threading.Thread(target=one.space.put, args=(one.place("aa"), 600, fill))
    thread.start()
    assert hung.wait(20)
    one.leave()
    with pytest.raises(CapacityError):
        two.put("bb", 500)
    go.set()
    thread.join()
    assert (sizes(tmp_path), two.space.used()) == ({"aa": 600}, 600)
    assert not two.space.reclaim()
    with pytest.raises(OSError, match="Bad file"):
        one.ledger.totals()
    two.leave()


# -- the bytes of the ledger -----------------------------------------------------------------------


def test_a_torn_head_is_not_believed() -> None:
    """A head with any byte changed is none; the other copy counts then."""
    head = Head(7, Joined.READY, 3, 9, Totals(1, 2, 3), 5, Entry(State.PLACING, 4, 0, b"12345678"))
    data = head.pack()
    assert Head.parse(data) == head
    for at in range(len(data)):
        torn = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        assert Head.parse(torn) is None
    assert Head.parse(data[:-1]) is None


def test_a_ledger_that_is_garbage_is_counted_anew(tmp_path: Path) -> None:
    """Whatever the file holds when nobody is there, the next process counts."""
    (tmp_path / "ledger").write_bytes(random.Random(1).randbytes(50_000))
    one = Process(tmp_path)
    one.put("aa", 10)
    assert one.space.used() == 10
    one.leave()


def test_another_versions_ledger_in_use(tmp_path: Path) -> None:
    """A process of another version that has the store open makes opening it a ConfigError."""
    one = Process(tmp_path)
    with one.folder.ledger.open("r+b") as file:
        file.write(b"\xff" * 4096)
    with pytest.raises(ConfigError, match="another version"):
        Ledger(one.folder.ledger).join()
    with pytest.raises(OSError, match="damaged"):
        one.put("aa", 10)
    one.leave()


def test_a_change_is_both_or_neither(tmp_path: Path) -> None:
    """A writer that dies between the head and its entry has made the change: the next turn
    completes it."""
    one, two = Process(tmp_path), Process(tmp_path)
    index, entry = one.ledger.place * 320, Entry(State.RESERVED, 5, 0, b"abcdefgh")
    with Killer(1, done=True), pytest.raises(Died), one.ledger.turn():
        pass  # the first write of a turn repeats the last entry
    with Killer(2, done=True), pytest.raises(Died):
        one.ledger.change(index, entry, used=5, pending=5)
    assert two.ledger.totals() == Totals(5, 5)
    one.ledger.close()
    assert list(two.ledger.abandoned()) == [[(index, entry)]]
    two.ledger.change(index, FREE, used=-5, pending=-5)
    assert two.ledger.totals() == Totals()
    two.leave()
