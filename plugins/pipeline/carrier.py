"""Hidden states from one stage to the one behind it: between two GPUs over NCCL, without the host.

Each pair of neighbours has a group of its own and uses it in one direction only, so that nothing
ever waits in it for something behind it. What comes next, and how large it is, is said on the gloo
link (:mod:`cacheflow.plugins.pipeline.links`), whose threads call this. Knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import distributed

from cacheflow.plugins.ranks import abort_group, everyones, group_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.plugins.transformers.lanes import Streams

__all__ = ["Carrier", "Carriers", "backend_between", "device_name", "open_carriers"]

_NAME_BYTES: Final = 64
_ABORT_SECONDS: Final = 5.0
_SHORT_PAUSE: Final = 2e-5
_LONG_PAUSE: Final = 1e-3


class Carrier:
    """One end of the way from a stage to the next; ``sends``: the front one. Used by one thread.

    A transfer that is not done after ``deadline`` seconds is a TimeoutError; whatever else torch
    raises means that the other end is gone.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup,
        backend: str,
        device: torch.device,
        streams: Streams,
        deadline: float,
        *,
        sends: bool,
    ) -> None:
        self.backend = backend
        self.sends = sends
        self._group = group
        self._device = device
        self._wire = device if backend == "nccl" else torch.device("cpu")
        self._streams = streams
        self._side = streams.side()
        self._deadline = deadline
        self._given_up = threading.Event()

    def connect(self) -> None:
        """Meet the other end, before anything depends on it: NCCL connects at its first use."""
        if self.sends:
            self.send(torch.zeros(1, dtype=torch.uint8, device=self._device))
        else:
            self.receive([1], torch.uint8)

    def send(self, tensor: torch.Tensor) -> None:
        """Returns once ``tensor`` has left, which is on this stage's device, and computed."""
        if not tensor.numel():
            return
        with self._side():
            flat = tensor.to(self._wire).contiguous().view(torch.uint8).flatten()
            self._finish(distributed.isend(flat, group=self._group, group_dst=1))

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns once it has come, on this stage's device, for the compute stream to use."""
        with self._side():
            made = torch.empty(shape, dtype=dtype, device=self._wire)
            if made.numel():
                flat = made.view(torch.uint8).flatten()
                self._finish(distributed.irecv(flat, group=self._group, group_src=0))
            placed = made.to(self._device)
            self._streams.hand_to_compute(placed)
            self._streams.mark().synchronize()
        return placed

    def abort(self) -> None:
        """End the transfer that is on its way, if any, on this side: the other end is gone. From
        any thread; returns at once, and nothing is carried afterwards."""
        if not self._given_up.is_set():
            self._given_up.set()
            abort_group(self._group)

    def close(self) -> None:
        """Leave the group. Blocking, but not for long, whatever the other end does."""
        self._given_up.set()
        # NCCL's orderly way would wait for the other end, which has no more to say than this one.
        abort_group(self._group).join(_ABORT_SECONDS)
        with contextlib.suppress(RuntimeError, ValueError):  # or the program has ended it
            distributed.destroy_process_group(self._group)

    def _finish(self, work: distributed.Work | None) -> None:
        assert work is not None, "this rank is in the group"
        if self.backend == "nccl":
            self._watch(work)
        # Over gloo it takes as long as the transfer, and no longer than the group's deadline.
        work.wait()
        if self._given_up.is_set():
            raise ConnectionError("the transfer was given up")

    def _watch(self, work: distributed.Work) -> None:
        """Wait until the device has passed ``work``: a peer that died over NVLink never says so."""
        until, pause = time.monotonic() + self._deadline, _SHORT_PAUSE
        while not work.is_completed():
            if self._given_up.is_set():
                raise ConnectionError("the transfer was given up")
            if time.monotonic() > until:
                raise TimeoutError(f"a hidden state was not transferred in {self._deadline:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONG_PAUSE)


@dataclass(frozen=True, slots=True)
class Carriers:
    """Of one stage: from the stage ``before`` and to the one ``behind``, whichever there are."""

    before: Carrier | None
    behind: Carrier | None

    def close(self) -> None:
        """See :meth:`Carrier.close`."""
        for each in (self.before, self.behind):
            if each is not None:
                each.close()


def open_carriers(
    rank: int,
    group: distributed.ProcessGroup,
    device: torch.device,
    streams: Streams,
    deadline: float,
) -> Carriers:
    """Those of ``rank``. All stages call it at the same time. ``group``: all of them, over gloo.
    Blocking.

    Raises:
        PeerError: another rank is gone.
    """
    mine = device_name(device).encode().ljust(_NAME_BYTES, b"\0")
    names = [each.rstrip(b"\0").decode() for each in everyones(group, mine, deadline)]
    ends: dict[bool, Carrier] = {}
    try:
        for first in range(len(names) - 1):
            backend = backend_between(names[first], names[first + 1])
            pair = group_of([first, first + 1], deadline, backend)
            if pair is not None:
                sends = rank == first
                ends[sends] = Carrier(pair, backend, device, streams, deadline, sends=sends)
    except BaseException:
        Carriers(ends.get(False), ends.get(True)).close()
        raise
    return Carriers(ends.get(False), ends.get(True))


def device_name(device: torch.device) -> str:
    """Which GPU it is, among all there are; empty where NCCL cannot be used."""
    if device.type != "cuda" or not distributed.is_nccl_available():
        return ""
    properties: Any = torch.cuda.get_device_properties(device)
    return str(properties.uuid)


def backend_between(one: str, other: str) -> str:
    """What carries between two devices, by :func:`device_name`: NCCL refuses two ranks on one."""
    return "nccl" if one and other and one != other else "gloo"
