"""Cap, floor and ledger of an nvme folder: exact to the byte, whoever dies at whatever step."""

from __future__ import annotations

import errno
import os
import random
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from cacheflow.errors import CapacityError, ConfigError
from cacheflow.storage_backends.nvme import ledger as ledger_module
from cacheflow.storage_backends.nvme import moving
from cacheflow.storage_backends.nvme.folder import StoreFolder
from cacheflow.storage_backends.nvme.ledger import Ledger
from cacheflow.storage_backends.nvme.records import (
    FREE,
    PLACES,
    Entry,
    Head,
    Joined,
    State,
    Totals,
)
from cacheflow.storage_backends.nvme.space import Space

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CAP = 100_000


class Died(BaseException):
    """The process was killed: nothing of it runs any more."""


class Killer:
    """Lets ``steps`` system calls through (the last one may or may not take place), then none."""

    def __init__(self, steps: int, *, done: bool) -> None:
        self.left = steps
        self.done = done
        self.died = False

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if self.died:
                raise Died
            self.left -= 1
            if self.left:
                return call(*arguments, **named)
            self.died = True
            if self.done:
                call(*arguments, **named)
            raise Died

        return wrapped

    def __enter__(self) -> Killer:
        self._stack = ExitStack()
        for owner, name in (
            (os, "pwrite"),
            (os, "unlink"),
            (os, "open"),
            (os, "replace"),
            (moving, "_renameat2"),
            (os, "rename"),
        ):
            wrapped = self.around(getattr(owner, name))
            self._stack.enter_context(mock.patch.object(owner, name, wrapped))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()


class Process:
    """A store's share in a folder, as one process has it."""

    def __init__(self, root: Path, cap: int = CAP, floor: int = 0) -> None:
        self.folder = StoreFolder(root)
        self.folder.make()
        self.ledger = Ledger(self.folder.ledger)
        if self.ledger.join() is Joined.COUNT:
            self.folder.clear_temporary()
            self.ledger.counted(sum(file.nbytes for file in self.folder.files()))
        self.space = Space(self.folder, self.ledger, cap, floor)

    def path(self, name: str) -> Path:
        return self.folder.objects / name[:2] / name

    def place(self, name: str) -> Path:
        """Where the object lies, in a folder that is there."""
        self.path(name).parent.mkdir(exist_ok=True)
        return self.path(name)

    def put(self, name: str, nbytes: int) -> None:
        def fill(temporary: Path) -> None:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(descriptor, bytes(nbytes // 2))
                os.write(descriptor, bytes(nbytes - nbytes // 2))
            finally:
                os.close(descriptor)

        self.space.put(self.place(name), nbytes, fill)

    def remove(self, name: str) -> bool:
        return self.space.remove(self.path(name))

    def leave(self) -> None:
        self.space.leave()


def sizes(root: Path) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in (root / "objects").rglob("*") if p.is_file()}


def bytes_of(root: Path) -> int:
    unfinished = sum(path.stat().st_size for path in (root / "tmp").iterdir())
    return sum(sizes(root).values()) + unfinished


def unfinished(root: Path) -> list[str]:
    return [path.name for path in (root / "tmp").iterdir()]


def marks_of(root: Path) -> dict[tuple[str, int, int], int]:
    """Bytes of each file, by name, inode and time of the last change of either."""
    found = {}
    for path in root.glob("*/**/*"):
        with suppress(FileNotFoundError):
            stat = path.lstat()
            if path.is_file():
                found[str(path), stat.st_ino, stat.st_ctime_ns] = stat.st_size
    return found


@pytest.fixture(params=["exchange", "no exchange"])
def exchange(request: pytest.FixtureRequest) -> Iterator[None]:
    """File systems with an atomic exchange of names, and those without."""
    if request.param == "exchange":
        yield
        return
    refusal = moving.CannotExchange(errno.EINVAL, "no exchange here")
    with mock.patch.object(moving, "_renameat2", side_effect=refusal):
        yield


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


# -- the dead --------------------------------------------------------------------------------------


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
