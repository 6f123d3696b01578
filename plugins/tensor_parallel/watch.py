"""Sees to it that sums over NCCL end: a rank that died over NVLink never says so to the others.

A thread looks at the newest sum now and then; they end in order. torch's own watchdog would end the
process. Knows nothing of what is added up.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Work

__all__ = ["Watch"]

_LOOKS: Final = 20
"""In a deadline."""
_LONGEST: Final = 0.25


class Watch:
    """``overdue`` is called on the thread, once, with what is wrong: a sum failed, or was not done
    in ``deadline`` seconds."""

    def __init__(self, deadline: float, overdue: Callable[[Exception], None]) -> None:
        self._deadline = deadline
        self._overdue = overdue
        self._lock = threading.Lock()
        self._newest: tuple[Work, float] | None = None
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="cacheflow-sums", daemon=True).start()

    def follow(self, work: Work) -> None:
        """The device has ``work`` before it, behind what was followed before."""
        with self._lock:
            self._newest = work, time.monotonic()

    def stop(self) -> None:
        """Nothing is on its way any more."""
        self._stopped.set()

    def _run(self) -> None:
        pause = min(self._deadline / _LOOKS, _LONGEST)
        while not self._stopped.wait(pause):
            newest = self._newest
            if newest is None:
                continue
            try:
                done = self._look(*newest)
            except Exception as error:  # whatever torch raises
                self._overdue(error)
                return
            with self._lock:
                if done and self._newest is newest:
                    self._newest = None

    def _look(self, work: Work, since: float) -> bool:
        """Whether it is done."""
        if work.is_completed():
            work.wait()  # at once: it raises what NCCL has found
            return True
        if time.monotonic() > since + self._deadline:
            raise TimeoutError(f"a sum was not done in {self._deadline:g} s")
        return False
