"""The compute thread of one rank among several: it computes what all ranks agree to compute next.

Runs what is this rank's alone (copies of pages) as any lane does. Everything that needs all ranks
is either a *call*, which every rank makes of its own accord (a decode step), or *work*, which the
rank's scheduler has handed out. Between two of them the thread exchanges votes with the other
ranks' threads; :mod:`cacheflow.distributed` says what they mean. While a request is being restored
it does so every few milliseconds even if it has nothing to say, for others may; else it sleeps.
After an exchange that failed nothing more is computed: everybody who waits is told.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from cacheflow.distributed import (
    Act,
    Decision,
    Member,
    Outcome,
    agree,
    combine,
    decode_offering,
    decode_vote,
    encode_offering,
    encode_vote,
)
from cacheflow.errors import CacheFlowError, ClosedError, PeerError
from cacheflow.plugins.transformers.lanes import Lane, prepared

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.plugins.tensor_parallel.group import Group
    from cacheflow.scheduling import JointScheduler
    from cacheflow.types import ComputeDone, Offering, TileWork

__all__ = ["Conductor"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_LEAST_PAUSE: Final = 0.001
_MOST_PAUSE: Final = 0.005
"""Seconds between two exchanges without news, the first and the most."""


@dataclass(slots=True, eq=False)
class _Call:
    do: Callable[[], None]
    due: float
    """When the other ranks are given up, on the monotonic clock."""


class Conductor(Lane):
    """Loop-owned, except for what its thread does. Implements :class:`cacheflow.abc.Peers`.

    ``deadline``: seconds that a call waits for the other ranks.
    """

    def __init__(self, threads: int, group: Group, deadline: float) -> None:
        self._group = group
        self._deadline = deadline
        self._member = Member(_Nobody())
        self._state = threading.Condition()
        """Guards all below; the thread waits for it."""
        self._alone: deque[Callable[[], None]] = deque()
        self._calls: dict[int, _Call] = {}
        self._do_pending: Callable[[], None] | None = None
        self._layers = 0
        """Of the pending work, agreed upon."""
        self._numbered: dict[str, int] = {}
        """Of requests that are open here."""
        self._given_up: set[str] = set()
        """Requests that left before the ranks had met over them."""
        self._news = self._stopped = False
        self._failed: Exception | None = None
        """What broke off on the compute thread, where all ranks were at it."""
        self._error: CacheFlowError | None = None
        self._pause = _LEAST_PAUSE
        self._numbers = count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._kick: Callable[[], None] = lambda: None
        self._fail: Callable[[str, Exception], None] = lambda request_id, error: None
        super().__init__("cacheflow-compute", threads)

    # -- on the event loop -----------------------------------------------------------------------

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Queue ``work`` that needs no other rank."""
        future, job = prepared(work)
        with self._state:
            self._alone.append(job)
            self._state.notify()
        return future

    def call(self, name: str, work: Callable[[], T]) -> asyncio.Future[T]:
        """Do ``work`` once all ranks have called ``name``; each name is called once at a time."""
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")

        def checked() -> T:
            if self._error is not None:
                raise self._error
            if number in self._calls:  # nobody else came
                raise PeerError(
                    f"after {self._deadline:g} s not every rank has come to {name!r}: they have to "
                    "make the same calls"
                )
            return self._watched(work)

        future, job = prepared(checked)
        with self._state:
            if number in self._calls:
                raise ValueError(f"{name!r} is being called already")
            if self._error is not None:
                job()
                return future
            self._calls[number] = _Call(job, time.monotonic() + self._deadline)
            self._member.calls.append(number)
            self._tell()
        return future

    def propose(
        self, work: TileWork, compute: Callable[[int], ComputeDone]
    ) -> asyncio.Future[ComputeDone]:
        """``compute`` so many layers of ``work`` as the ranks agree upon; perhaps none."""

        def agreed() -> ComputeDone:
            if self._error is not None:
                raise self._error
            layers, self._layers = self._layers, 0
            return self._watched(lambda: compute(layers))

        future, job = prepared(agreed)
        with self._state:
            # Others may have been told that we left: then there is nothing to agree upon.
            if self._error is not None or not self._member.knows(work.request_id):
                self._layers = 0
                job()
                return future
            self._member.pending, self._do_pending = work, job
            self._tell()
        return future

    async def stop(self, seconds: float) -> None:
        """End the thread, waiting for it at most ``seconds``; who waits for it gets ClosedError."""
        with self._state:
            self._stopped = True
            self._state.notify()
        await asyncio.to_thread(self._thread.join, seconds)
        self.abandon(ClosedError("the engine is closed"))

    def abandon(self, error: CacheFlowError) -> None:
        """Nothing more is computed; whoever waits, and every request, gets ``error``."""
        with self._state:
            self._error = self._error or error
            waiting = [call.do for call in self._calls.values()]
            waiting += [] if self._do_pending is None else [self._do_pending]
            self._calls, self._do_pending = {}, None
            self._member.pending, self._member.calls = None, []
            requests = self._member.give_up()
        for do in waiting:
            do()
        for request_id in requests:
            self._on_loop(self._fail, request_id, self._error)

    # -- cacheflow.abc.Peers ---------------------------------------------------------------------

    def attach(
        self,
        scheduler: JointScheduler,
        kick: Callable[[], None],
        fail: Callable[[str, Exception], None],
    ) -> None:
        """See :meth:`cacheflow.abc.Peers.attach`."""
        with self._state:
            self._loop = asyncio.get_running_loop()
            self._member.scheduler = scheduler
            self._kick, self._fail = kick, fail

    async def meet(self, request_id: str, found: Offering) -> Offering:
        """See :meth:`cacheflow.abc.Peers.meet`."""
        data = encode_offering(found)

        def exchanged() -> Offering:
            offers = [decode_offering(each) for each in self._group.exchange_any(data)]
            number, agreed = next(self._numbers), combine(offers, self._group.rank)
            with self._state:
                self._numbered[request_id] = number
                self._member.join(number, request_id)
                if request_id in self._given_up:
                    self._given_up.discard(request_id)
                    self._member.leave(request_id, finished=False)
            return agreed

        session = request_id.rpartition("/")[0] or request_id
        meeting = self.call(f"meet over {session}: {found.subject}", exchanged)
        try:
            return await asyncio.shield(meeting)
        except asyncio.CancelledError:
            with self._state:
                if not meeting.done():
                    self._given_up.add(request_id)
            raise

    def leave(self, request_id: str, *, finished: bool) -> None:
        """See :meth:`cacheflow.abc.Peers.leave`."""
        with self._state:
            self._member.leave(request_id, finished=finished)
            self._tell()

    def name(self, request_id: str) -> str:
        """What all ranks call the request: the number under which they met over it last."""
        number = self._numbered.get(request_id)
        return request_id if number is None else f"request {number}"

    def forget(self, request_id: str) -> None:
        """The request is closed."""
        self._numbered.pop(request_id, None)

    def restores(self, work: TileWork) -> bool:
        """Whether this rank's scheduler still has the request; from any thread."""
        return self._member.scheduler.reach(work) != (0, 0)

    # -- on the compute thread -------------------------------------------------------------------

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            while self._wait():
                self._do_alone()
                if self._error is None and self._wants_exchange():
                    try:
                        self._exchange()
                    except Exception as error:  # whatever it is, the ranks are not in step any more
                        self._break(error)

    def _wait(self) -> bool:
        """Until there is something to do, or others may have; False: the end."""
        with self._state:
            while not (self._stopped or self._alone or self._news):
                asks = self._error is None and self._wants_exchange()
                if not self._state.wait(self._pause if asks else None) and asks:
                    break
            self._news = False
            return not self._stopped

    def _do_alone(self) -> None:
        while True:
            with self._state:
                job = self._alone.popleft() if self._alone else None
            if job is None:
                return
            job()

    def _wants_exchange(self) -> bool:
        member = self._member
        return bool(member.calls or member.pending or member.is_active) and not self._stopped

    def _exchange(self) -> None:
        with self._state:
            vote = encode_vote(self._member.vote())
        decision = agree([decode_vote(each) for each in self._group.exchange(vote)])
        with self._state:
            outcome = self._member.heed(decision)
            doing = self._taken(outcome)
            failed = [self._member.named(number) for number in decision.gone]
        for request_id in failed:
            if request_id is not None:
                gone = PeerError(f"another rank gave request {request_id!r} up")
                self._on_loop(self._fail, request_id, gone)
        if outcome.news:
            self._on_loop(self._kick)
        for do in doing:
            do()
            if self._failed is not None:
                raise self._failed
        self._rest(decision)

    def _taken(self, outcome: Outcome) -> list[Callable[[], None]]:
        """What is to be done now; holding the lock."""
        doing = [self._calls.pop(number).do for number in outcome.calls]
        if (outcome.run or outcome.give_back) and self._do_pending is not None:
            self._layers = outcome.run
            doing.append(self._do_pending)
            self._do_pending = self._member.pending = None
        return doing

    def _watched(self, work: Callable[[], T]) -> T:
        """``work``, which all ranks do. If it breaks off here, the others may be in the middle of
        it: nothing that is exchanged after that would mean the same to all."""
        try:
            made = work()
            self._group.check()
        except PeerError as error:
            if self._group.broken:  # else it is something that all ranks raise
                self._failed = error
            raise
        except Exception as error:  # whatever it is, the others may be in the middle of it
            self._failed = error
            raise
        return made

    def _rest(self, decision: Decision) -> None:
        """Go on at once where something was decided, else a little later each time."""
        with self._state:
            if decision.act is Act.NOTHING:
                self._pause = min(2 * self._pause, _MOST_PAUSE)
            else:
                self._pause = _LEAST_PAUSE
                self._news |= bool(self._member.pending or self._member.calls)
            now = time.monotonic()
            late = [number for number, call in self._calls.items() if call.due < now]
            for number in late:
                self._member.calls.remove(number)
            overdue = [self._calls[number].do for number in late]
        for do in overdue:
            do()
        with self._state:
            for number in late:
                del self._calls[number]

    def _break(self, error: Exception) -> None:
        told = error
        if not isinstance(told, CacheFlowError):
            what = f"{type(error).__name__}: {error}"
            told = PeerError(f"this rank broke off what all ranks were doing ({what}): start again")
        if not self._stopped:
            _log.error("rank %d computes nothing more: %s", self._group.rank, told)
        self.abandon(told)

    def _tell(self) -> None:
        self._news = True
        self._state.notify()

    def _on_loop(self, function: Callable[..., None], *args: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)


class _Nobody:
    """In the place of a scheduler until there is one."""

    def ask(self, request_id: str, start: int, layers: int, *, now: bool = False) -> None:
        return

    def set_aside(self, request_id: str, starts: frozenset[int]) -> bool:
        return False

    def reach(self, work: TileWork) -> tuple[int, int]:
        return 0, 0

    def needs(self, request_id: str) -> list[tuple[int, int]]:
        return []

    def blocked(self, request_id: str) -> list[int]:
        return []
