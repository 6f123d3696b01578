"""The ranks of one model, over torch.distributed: gloo on CPUs, NCCL beside gloo on GPUs.

What ranks tell each other about decisions always goes over gloo, from host memory; only partial
sums of a layer go between GPUs. Every call is made by all ranks, in the same order, from one
thread each. A rank that died, or does not come in time, is an error here on every other rank.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self

import torch
import torch.distributed as dist

from cacheflow.errors import PeerError
from cacheflow.plugins.ranks import (
    Joined,
    abort_group,
    check_alike,
    join_ranks,
    leave_ranks,
    whole_group,
)
from cacheflow.plugins.tensor_parallel.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Group"]

_ABORT_SECONDS: Final = 5.0


class Group:
    """Use :meth:`open`. ``deadline``: seconds that a rank waits for the others."""

    def __init__(self, device: torch.device, deadline: float, joined: Joined) -> None:
        self.rank, self.size = joined.rank, joined.count
        self._deadline = deadline
        self._joined = joined
        self.broken = False
        """Whether an exchange has failed: the ranks are not in step any more."""
        self._is_closed = False
        self._overdue: Exception | None = None
        self._words = self._sums = whole_group(deadline)
        self._watch: Watch | None = None
        if device.type == "cuda":
            self._sums = whole_group(deadline, "nccl")
            self._watch = Watch(deadline, self._give_up)

    @classmethod
    def open(
        cls,
        device: torch.device,
        deadline: float,
        rank: int | None = None,
        ranks: int | None = None,
        init_method: str = "env://",
    ) -> Self:
        """See :func:`cacheflow.plugins.ranks.join_ranks`, which says what is raised. Blocking."""
        joined = join_ranks(rank, ranks, init_method, deadline)
        try:
            return cls(device, deadline, joined)
        except BaseException:
            leave_ranks(joined)
            raise

    def check_alike(self, identity: Mapping[str, str | int]) -> None:
        """See :func:`cacheflow.plugins.ranks.check_alike`."""
        check_alike(self._words, identity, self._deadline)

    def exchange(self, data: bytes) -> list[bytes]:
        """What every rank gave, by rank; all give as much."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = torch.empty(self.size * len(data), dtype=torch.uint8)
        with self._noted("between two decisions"):
            _gather(everyone, mine, self._words)
        whole = everyone.numpy().tobytes()
        return [whole[at : at + len(data)] for at in range(0, len(whole), len(data))]

    def exchange_any(self, data: bytes) -> list[bytes]:
        """The same for any length."""
        lengths = [
            int.from_bytes(each, "little")
            for each in self.exchange(len(data).to_bytes(8, "little"))
        ]
        padded = self.exchange(data.ljust(max(*lengths, 1), b"\0"))
        return [each[:length] for each, length in zip(padded, lengths, strict=True)]

    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        """``partial`` becomes the sum over all ranks, the same bits on each. On a GPU: once the
        current stream has come there; see :meth:`check`."""
        with self._noted("in the middle of a layer"):
            work = dist.all_reduce(partial, group=self._sums, async_op=True)
            assert work is not None, "this rank is in the group"
            if self._watch is None:
                work.wait()
            else:
                work.synchronize()
                self._watch.follow(work)
        return partial

    def check(self) -> None:
        """Whether what the device has passed by now was added up: raise PeerError if not."""
        if self._overdue is not None:
            with self._noted("in the middle of a layer"):
                raise RuntimeError(str(self._overdue)) from self._overdue

    def _give_up(self, error: Exception) -> None:
        self.broken, self._overdue = True, error
        abort_group(self._sums)  # kernels end then, and leave anything in memory

    @contextmanager
    def _noted(self, when: str) -> Iterator[None]:
        try:
            with _told(when, self._deadline):
                yield
        except PeerError:
            self.broken = True
            raise

    def close(self) -> None:
        """Leave torch.distributed as it was found."""
        if not self._is_closed:
            self._is_closed = True
            if self._watch is not None:
                self._watch.stop()
                if self.broken:
                    abort_group(self._sums).join(_ABORT_SECONDS)
            leave_ranks(self._joined, list(dict.fromkeys((self._words, self._sums))))


def _gather(into: torch.Tensor, mine: torch.Tensor, group: Any) -> None:
    # Renamed in torch 2.13, where the old name warns.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(into, mine, group=group)


@contextmanager
def _told(when: str, deadline: float) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # all of torch.distributed's are
        first = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise PeerError(
            f"another rank is gone, or did not answer within {deadline:g} s, {when}: start all "
            f"ranks again (torch says: {first})"
        ) from error
