"""A memory-pool store in a process of its own, to be used, stopped, killed and started again.

Blocking: use it from fixtures and threads. Needs msgpack.
"""

from __future__ import annotations

import os
import re
import select
import socket
import subprocess
import sys
import time
from signal import SIGCONT, SIGKILL, SIGTERM
from typing import TYPE_CHECKING, Final, Self

from cacheflow.testing.freezing import freeze, thaw

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from signal import Signals

__all__ = ["StoreProcess", "free_port"]

_READY: Final = re.compile(r"ready on \S+:(\d+)")
_SECONDS: Final = 30.0


class StoreProcess:
    """``cacheflow store serve`` with ``options`` as ``CACHEFLOW_STORE_*`` variables.

    Its ports stay the same when it is started again.
    """

    def __init__(self, log: Path, **options: object) -> None:
        self.port = free_port()
        self.prefix: Sequence[str] = ()
        """Before the command, which is to be what these words become (``exec``)."""
        self.options = {"port": self.port, "data_port": free_port(), **options}
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        """``host:port`` for clients."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Self:
        """Returns once it takes clients.

        Raises:
            RuntimeError: it does not.
        """
        variables = {f"CACHEFLOW_STORE_{name.upper()}": str(v) for name, v in self.options.items()}
        program = [sys.executable, "-c", "from cacheflow.cli import main; main()"]
        command = [*self.prefix, *program, "store", "serve"]
        with self._log.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._wait_until_ready()
        return self

    def freeze(self) -> None:
        """SIGSTOP: on return it stands still, its connections stay open."""
        freeze(self.pid)

    def thaw(self) -> None:
        """SIGCONT: it goes on."""
        thaw(self.pid)

    def kill(self) -> None:
        """``kill -9``, and wait for the end."""
        self._end(SIGKILL)

    def stop(self, seconds: float = _SECONDS) -> int:
        """SIGTERM, and wait for the end; the exit status."""
        return self._end(SIGTERM, seconds)

    def __enter__(self) -> Self:
        return self.start() if self._process is None else self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def _wait_until_ready(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            ready, _, _ = select.select([process.stdout], [], [], 1.0)
            line = process.stdout.readline() if ready else ""
            if _READY.search(line):
                return
            if ready and not line:
                break
        self.kill()
        raise RuntimeError(f"no store: {self._log.read_text(encoding='utf-8')[-2000:]}")

    def _end(self, number: Signals, seconds: float = _SECONDS) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        if number is not SIGKILL or process.poll() is None:
            process.send_signal(number)
        process.send_signal(SIGCONT)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            if process.stdout is not None:
                process.stdout.close()


def free_port() -> int:
    """A port that nobody uses at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port
