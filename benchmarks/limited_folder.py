"""A folder that can only be read at a given bandwidth, by whatever program: Linux does it.

Control groups limit what processes read from a disk, past the page cache, buffered or direct. Needs
root and a real disk below the folder.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["forget", "limited_reads", "why_not"]

_V1: Final = Path("/sys/fs/cgroup/blkio")
_V2: Final = Path("/sys/fs/cgroup")
_NAME: Final = "cacheflow-bench"
_PATIENCE: Final = 30.0


def forget(folder: Path) -> None:
    """Drop all files in ``folder`` from the page cache: the next read comes from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


def why_not(folder: Path) -> str:
    """Why reads from ``folder`` cannot be limited here; empty if they can."""
    try:
        with limited_reads(folder, 1e9):
            return ""
    except OSError as error:
        return f"reads cannot be limited here ({error}): it takes root and control groups for disks"


@contextmanager
def limited_reads(folder: Path, bandwidth: float) -> Iterator[None]:
    """This process, and those it starts meanwhile, together read at most ``bandwidth`` bytes a
    second from the disk that ``folder`` is on.

    Raises:
        OSError: that cannot be had here.
    """
    root, group = _groups()
    device = _disk_of(folder)
    group.mkdir(exist_ok=True)
    try:
        if root == _V1:
            (group / "blkio.throttle.read_bps_device").write_text(f"{device} {int(bandwidth)}")
        else:
            (group / "io.max").write_text(f"{device} rbps={int(bandwidth)}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        _leave(root, group)


def _leave(root: Path, group: Path) -> None:
    """Move everybody out: helpers of this process, like multiprocessing's, may still be there; and
    who is just ending keeps the group for a moment longer."""
    end = time.monotonic() + _PATIENCE
    while True:
        for process in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                (root / "cgroup.procs").write_text(process)
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _groups() -> tuple[Path, Path]:
    """The group that everything is in, and ours in it."""
    if _V1.is_dir():
        return _V1, _V1 / _NAME
    controllers = (_V2 / "cgroup.controllers").read_text().split()
    if "io" not in controllers:
        raise OSError("there is no io controller")
    (_V2 / "cgroup.subtree_control").write_text("+io")
    return _V2, _V2 / _NAME


def _disk_of(folder: Path) -> str:
    """``major:minor`` of the whole disk."""
    number = folder.stat().st_dev
    known = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not known.exists():
        raise OSError(f"{folder} is on no disk")
    disk = known.resolve()
    return ((disk.parent if (disk / "partition").exists() else disk) / "dev").read_text().strip()
