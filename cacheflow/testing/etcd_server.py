"""A real etcd server for tests, on free ports of this machine (Debian: etcd-server). Blocking."""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final
from urllib.error import URLError
from urllib.request import urlopen

from cacheflow.testing.store_process import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["find_etcd", "running_etcd"]

_PATIENCE: Final = 30.0


def find_etcd() -> str | None:
    """The program, if there is one on the path."""
    return shutil.which("etcd")


@contextmanager
def running_etcd(folder: Path) -> Iterator[str]:
    """Its address for clients. It keeps its data in ``folder`` and is killed afterwards.

    Raises:
        TimeoutError: it does not answer.
    """
    program = find_etcd()
    if program is None:
        raise FileNotFoundError("no etcd here: apt-get install etcd-server")
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    command = [program, "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"]
    command += ["--listen-client-urls", client, "--advertise-client-urls", client]
    command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    command += ["--initial-cluster", f"default={peer}", "--log-level", "error"]
    with (folder / "etcd.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait(client, process)
        yield client
    finally:
        process.kill()
        process.wait()


def _wait(client: str, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + _PATIENCE
    while True:
        try:
            with urlopen(f"{client}/health", timeout=1.0):
                return
        except (URLError, OSError):
            if process.poll() is not None or time.monotonic() > give_up:
                raise TimeoutError("etcd does not answer") from None
            time.sleep(0.05)
