"""The bare machine that storage backends are measured against: fio, and memcpy on threads."""

from __future__ import annotations

import ctypes
import json
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.memory import StagingPool

__all__ = ["fio", "memcpy"]


def fio(files: Sequence[Path], size: int, jobs: int) -> float:
    """Bytes a second of fio over the payloads of ``files``, shared out among ``jobs``."""
    lines = ["[global]", "ioengine=psync", "direct=1", "rw=read", f"bs={size}", "thread=1"]
    lines += ["group_reporting=1", "offset=4096", "file_service_type=sequential"]
    with tempfile.TemporaryDirectory(dir=files[0].parents[2]) as folder:
        for number, path in enumerate(files):  # fio takes only so many characters of file names
            Path(folder, str(number)).hardlink_to(path)
        for job in range(jobs):
            mine = range(job, len(files), jobs)
            lines += [f"[job{job}]", f"nrfiles={len(mine)}", f"size={size * len(mine)}"]
            lines += ["filename=" + ":".join(map(str, mine))]
        Path(folder, "script").write_text("\n".join(lines), encoding="utf-8")
        done = subprocess.run(
            ["fio", "--readonly", "--output-format=json", "script"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"fio failed: {done.stderr or done.stdout}")
    report = json.loads(done.stdout[done.stdout.index("{") :])
    read = report["jobs"][0]["read"]
    assert read["io_bytes"] == size * len(files), (read["io_bytes"], size * len(files))
    return float(read["bw_bytes"])


def memcpy(source: StagingPool, target: StagingPool, size: int, count: int, threads: int) -> float:
    """Bytes a second of copying ``count`` times ``size`` bytes out of ``source`` on ``threads``,
    over and over into as much memory as the loads that it is compared with have."""
    slots = target.capacity // size
    todo = iter(range(count))

    def copy() -> None:
        for number in todo:
            to = target.address + number % slots * size
            ctypes.memmove(to, source.address + number * size, size)

    workers = [threading.Thread(target=copy) for _ in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return count * size / (time.perf_counter() - start)
