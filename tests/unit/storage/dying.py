"""Processes of one nvme folder, any of which can die at any step; what is on disk then."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from cacheflow.storage_backends.nvme import moving
from cacheflow.storage_backends.nvme.folder import StoreFolder
from cacheflow.storage_backends.nvme.ledger import Ledger
from cacheflow.storage_backends.nvme.records import (
    Joined,
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
