"""kill -9 at random instants: what a store on disk loses, serves and keeps.

One or two processes store, replace, delete and load objects in one folder with a cap that forces
evictions, and are killed at random instants: while they open the store, while they work, one of two
or both. In between they are stopped and the bytes counted from outside. After every kill the store
is opened again and compared with its files and with what was acknowledged before the kill.

This shows what the death of a process does, not what a loss of power does.

    make bench-crash                        at least 300 kills
    make bench-crash ARGS="--kills 30"      what make test runs
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from crash_child import CONTESTED, NUMBERS, child, object_of, owner
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cacheflow.errors import IntegrityError
from cacheflow.kv import verify
from cacheflow.storage_backends.nvme import NvmeBackend
from cacheflow.testing.freezing import freeze, thaw
from cacheflow.testing.objects import load_one
from cacheflow.types import TransferStatus

CAP = 700_000
"""Bytes: a good third of what the objects would take together."""
PATIENCE = 30.0


@dataclass
class Figures:
    """What was done, and what was found wrong (all of ``lost`` and below must be 0)."""

    kills: int = 0
    killed_opening: int = 0
    killed_one_of_two: int = 0
    reopenings: int = 0
    stores: int = 0
    deletes: int = 0
    loads: int = 0
    interrupted: int = 0
    """Stores and deletes that were under way when their process was killed."""
    samples: int = 0
    """Times that all processes were stopped and the bytes counted."""
    leftovers: int = 0
    """Unfinished files found after kills, all removed by the next opening."""
    largest: int = 0
    """Most bytes ever seen, of the cap."""
    cap: int = CAP
    seconds: float = 0.0
    lost: int = 0
    over_cap: int = 0
    unverified: int = 0
    differing: int = 0
    """Reopenings after which the index, the accounts and the files were not the same."""
    unfinished: int = 0
    """Temporary files left after reopening."""
    wrong: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        bad = (self.lost, self.over_cap, self.unverified, self.differing, self.unfinished)
        return any(bad) or bool(self.wrong)


class Known:
    """What each number may be: the versions (None: absent) that would be right to find."""

    def __init__(self) -> None:
        self.settled: dict[int, int | None] = dict.fromkeys(range(CONTESTED, NUMBERS))
        self.begun: dict[int, int | None] = {}

    def may_be(self, number: int) -> set[int | None]:
        """One of several if an operation on it was under way."""
        allowed = {self.settled[number]}
        if number in self.begun:
            allowed.add(self.begun[number])
        return allowed


class Running:
    """One forked process and its pipe."""

    def __init__(self, which: int, folder: Path, options: dict[str, object], seed: int) -> None:
        self.which = which
        self.used: int | None = None
        self.words = 0
        self._rest = b""
        self.pipe, theirs = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            try:
                child(which, folder, options, seed, theirs)
            except BaseException as error:  # said to the parent, which counts it
                os.write(theirs, f"wrong {error!r}\n".replace("\n", " ").encode() + b"\n")
            os._exit(0)
        os.close(theirs)

    def hear(self, known: Known, figures: Figures, seconds: float) -> bool:
        """Take in what was said; False once the process has closed its pipe."""
        ready, _, _ = select.select([self.pipe], [], [], seconds)
        if not ready:
            return True
        data = os.read(self.pipe, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line.decode(), known, figures)
        return bool(data)

    def _take(self, line: str, known: Known, figures: Figures) -> None:
        word, _, rest = line.partition(" ")
        self.words += 1
        if word == "wrong":
            figures.wrong.append(rest)
            return
        numbers = [int(each) for each in rest.split()]
        if word == "used":
            self.used = numbers[0]
        figures.stores += word == "stored"
        figures.deletes += word == "deleted"
        figures.loads += word == "loaded"
        number = numbers[0]
        if word in ("used", "loaded") or owner(number) is None:
            return
        if word in ("store", "delete"):
            known.begun[number] = numbers[1] if word == "store" else None
        elif word in ("stored", "deleted"):
            known.settled[number] = numbers[1] if word == "stored" else None
            del known.begun[number]
        else:  # kept as it was
            del known.begun[number]

    def end(self, how: signal.Signals, known: Known, figures: Figures) -> None:
        """Send ``how``, hear the rest and wait for the end."""
        os.kill(self.pid, how)
        deadline = time.monotonic() + PATIENCE
        while self.hear(known, figures, 1.0):
            if time.monotonic() > deadline:
                figures.wrong.append(f"process {self.which} did not end")
                os.kill(self.pid, signal.SIGKILL)
                deadline += PATIENCE
        os.close(self.pipe)
        os.waitpid(self.pid, 0)


class Campaign:
    """Rounds of running, killing and looking, on one folder that is never emptied."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.figures = Figures()
        self.known = Known()

    def round(self) -> None:
        """One or two processes, one or two kills, one look."""
        fsync = self.chance.random() < 0.3
        options: dict[str, object] = {"max_bytes": CAP, "min_free_bytes": 0, "fsync": fsync}
        count = self.chance.choice((1, 2, 2))
        seed = self.chance.randrange(1 << 30)
        running = [Running(which, self.folder, options, seed) for which in range(count)]
        if self.chance.random() < 0.2:
            self._wait(running, seconds=self.chance.random() * 0.03)
            self.figures.killed_opening += count
        else:
            self._wait(running, words=self.chance.randrange(4, 120))
            self._sample(running)
            self._wait(running, seconds=self.chance.random() * 0.01)
        first, *others = self.chance.sample(running, count)
        self._kill(first)
        for other in others:
            self._let_survive(other)
        self.figures.interrupted += len(self.known.begun)
        self._count_bytes()
        asyncio.run(self._look())
        self.known.begun.clear()

    def _let_survive(self, other: Running) -> None:
        """Killed right away, or after it went on alone, or ended in good order."""
        fate = self.chance.random()
        if fate > 0.4:
            self.figures.killed_one_of_two += 1
            self._wait([other], words=other.words + 40)
            self._sample([other])
        if fate < 0.7:
            self._kill(other)
            return
        other.end(signal.SIGTERM, self.known, self.figures)
        if other.used != self._count_bytes():
            self.figures.differing += 1

    def _kill(self, process: Running) -> None:
        process.end(signal.SIGKILL, self.known, self.figures)
        self.figures.kills += 1

    def _wait(self, running: list[Running], words: int = 0, seconds: float = 0.0) -> None:
        """Until each has said so many words, or for so many seconds."""
        deadline = time.monotonic() + (seconds or PATIENCE)
        while time.monotonic() < deadline:
            if words and all(each.words >= words for each in running):
                return
            for each in running:
                each.hear(self.known, self.figures, 0.0005)

    def _sample(self, running: list[Running]) -> None:
        """Stop all of them: an instant that can be looked at from outside."""
        for each in running:
            freeze(each.pid)
        self.figures.samples += 1
        self._count_bytes()
        for each in running:
            thaw(each.pid)

    def _count_bytes(self) -> int:
        files = [p for part in ("objects", "tmp") for p in (self.folder / part).rglob("*")]
        total = sum(path.stat().st_size for path in files if path.is_file())
        self.figures.largest = max(self.figures.largest, total)
        self.figures.over_cap += total > CAP
        return total

    async def _look(self) -> None:
        """Open the store and compare everything with everything."""
        figures = self.figures
        if (self.folder / "tmp").is_dir():
            figures.leftovers += len(os.listdir(self.folder / "tmp"))  # noqa: PTH208
        backend = await NvmeBackend.open({"path": str(self.folder), "max_bytes": CAP})
        figures.reopenings += 1
        found: dict[int, int] = {}
        numbers = {object_of(number, 0).key: number for number in range(NUMBERS)}
        total = 0
        async for info in backend.scan():
            total += info.nbytes
            found[numbers[info.key]] = int(info.grid_id.rpartition(" ")[2])
            result, data = await load_one(backend, info.key, 0, info.nbytes)
            try:
                assert result.status is TransferStatus.OK, result
                verify(info, info.key.layers, memoryview(data)[info.payload_offset :])
            except (IntegrityError, AssertionError) as error:
                figures.unverified += 1
                figures.wrong.append(str(error))
        looked_up = await backend.lookup([key.chunk for key in numbers])
        names = [path.name for path in (self.folder / "objects").glob("*/*")]
        used = await backend.used_bytes()
        same = len(names) == len(found) == sum(map(len, looked_up))
        figures.differing += not (same and used == total == self._count_bytes())
        figures.unfinished += len(os.listdir(self.folder / "tmp"))  # noqa: PTH208
        await backend.aclose()
        for number in self.known.settled:
            if found.get(number) not in self.known.may_be(number):
                figures.lost += 1
                figures.wrong.append(f"{number} is {found.get(number)}")
            self.known.settled[number] = found.get(number)


def main() -> None:
    """Run the campaign and print what was found; exits with 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=400, help="how many at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to make the store (default: temporary)")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    options = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="crash-") as scratch:
        campaign = Campaign(Path(scratch) / "store", options.seed)
        start = time.monotonic()
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("kills", total=options.kills)
            while campaign.figures.kills < options.kills:
                campaign.round()
                bar.update(task, completed=campaign.figures.kills)
        campaign.figures.seconds = round(time.monotonic() - start, 1)
    show(campaign.figures, as_json=options.json)
    sys.exit(campaign.figures.failed)


def show(figures: Figures, *, as_json: bool) -> None:
    """As a table, or as JSON."""
    if as_json:
        print(json.dumps(asdict(figures), indent=2))
        return
    table = Table(show_header=False)
    for name, value in asdict(figures).items():
        table.add_row(name.replace("_", " "), str(value))
    Console().print(table)


if __name__ == "__main__":
    main()
