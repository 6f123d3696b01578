"""What neighbouring stages say to each other, and who waits for what of it.

Every message about a request names it; a request that was given up anywhere is given up everywhere,
and a rank that is gone ends all of them. One that has said goodbye ends only what still needs it,
here: others may be about to get what it said before, and hear of it from whoever waits in vain.
Loop-owned. Knows no tensors but to carry them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from cacheflow.errors import PeerError
from cacheflow.plugins.pipeline.links import Link, Message

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.plugins.pipeline.meeting import Meeting

__all__ = ["Talk"]

_GIVE_UP: Final = "give up"
_BROKEN: Final = "broken"
_REMEMBERED: Final = 1024
_FROM_BEHIND: Final = frozenset({"agree", "tokens"})
"""Kinds that are waited for and come from the stage behind; the others from the one before."""


class Talk:
    """Links to the stages before and behind, whichever there are.

    ``told`` gets, on the event loop, every message nobody waits for by :meth:`receive`. ``failed``:
    a request (or None: all of them) ended elsewhere. ``left``: the stage behind (or before) has
    said goodbye.
    """

    def __init__(
        self,
        meeting: Meeting,
        told: Callable[[Message], bool],
        failed: Callable[[str | None, PeerError], None],
        left: Callable[[PeerError, bool], None],
    ) -> None:
        self.rank = rank = meeting.joined.rank
        self.broken: PeerError | None = None
        self._told = told
        self._failed = failed
        self._left = left
        self._waiting: dict[tuple[str, str], asyncio.Future[Message]] = {}
        self._early: dict[tuple[str, str], Message] = {}
        self._given_up: OrderedDict[str, PeerError] = OrderedDict()
        self._parted: dict[bool, PeerError] = {}
        """Of the stage behind (True) and the one before (False), if it has said goodbye."""
        group, carriers = meeting.group, meeting.carriers
        common = (meeting.deadline, self._heard, self._said_goodbye, self._lost)
        before, behind = carriers.before, carriers.behind
        self._before = None if before is None else Link(rank - 1, group, before, *common)
        self._behind = None if behind is None else Link(rank + 1, group, behind, *common)

    def forward(self, message: Message) -> None:
        """To the stage behind, if there is one."""
        if self._behind is not None:
            self._behind.send(message)

    def back(self, message: Message) -> None:
        """To the stage before, if there is one."""
        if self._before is not None:
            self._before.send(message)

    async def receive(self, kind: str, request_id: str, key: str) -> Message:
        """The message ``kind`` about ``key`` of a request, whether it has come already or not.

        Raises:
            PeerError: the request was given up by another stage, or a rank is gone; or the one it
                should come from has left, and then the request is given up.
        """
        self.check(request_id)
        early = self._early.pop((kind, key), None)
        if early is not None:
            return early
        if (parted := self._parted.get(kind in _FROM_BEHIND)) is not None:
            self.give_up(request_id, str(parted))
            raise parted
        future = self._waiting[kind, key] = asyncio.get_running_loop().create_future()
        try:
            message: Message = await future
        except PeerError as error:
            if error in self._parted.values():
                self.give_up(request_id, str(error))
            raise
        finally:
            self._waiting.pop((kind, key), None)
        return message

    def check(self, request_id: str) -> None:
        """Raise PeerError if there is no use in waiting for others."""
        if self.broken is not None:
            raise PeerError(str(self.broken)) from self.broken
        if request_id in self._given_up:
            raise self._given_up[request_id]

    def give_up(self, request_id: str, reason: str) -> None:
        """Tell all stages that a request ended here."""
        if self.broken is None and request_id not in self._given_up:
            body = {"request": request_id, "reason": reason, "stage": self.rank}
            self._remember(request_id, body)
            self.forward(Message(_GIVE_UP, body))
            self.back(Message(_GIVE_UP, body))

    def forget(self, request_id: str) -> None:
        """Nothing more is wanted of what has come for a request."""
        for kind, key in [each for each in self._early if each[1].startswith(f"{request_id}\0")]:
            del self._early[kind, key]

    async def aclose(self) -> None:
        """Say goodbye."""
        links = [link for link in (self._before, self._behind) if link is not None]
        await asyncio.gather(*(link.aclose() for link in links))

    # -- on the event loop, from the links -------------------------------------------------------

    def _heard(self, link: Link, message: Message) -> None:
        onward = self.back if link is self._behind else self.forward
        if message.kind == _GIVE_UP:
            onward(message)
            request_id = message.body["request"]
            error = self._remember(request_id, message.body)
            self._end_waiting(error, request_id)
            self._failed(request_id, error)
        elif message.kind == _BROKEN:
            self._break(message.body["reason"], link)
        elif not self._told(message):
            place = (message.kind, message.body["key"])
            if (future := self._waiting.get(place)) is not None and not future.done():
                future.set_result(message)
            else:
                self._early[place] = message

    def _said_goodbye(self, link: Link) -> None:
        """``link``'s peer has said goodbye."""
        behind = link is self._behind
        why = f"rank {link.peer} has left while rank {self.rank} still needed it: was it closed?"
        error = self._parted[behind] = PeerError(why)
        for (kind, _), future in list(self._waiting.items()):
            if (kind in _FROM_BEHIND) is behind and not future.done():
                future.set_exception(error)
        self._left(error, behind)

    def _lost(self, link: Link, error: BaseException) -> None:
        # torch says where in its sources, then what, then gives advice.
        said = str(error).rpartition("] ")[2] or str(error)
        why = said.partition(". ")[0].strip()[:200] or type(error).__name__
        self._break(f"rank {link.peer} is gone, says rank {self.rank}: {why}", link)

    def _break(self, reason: str, link: Link) -> None:
        if self.broken is not None:
            return
        self.broken = PeerError(reason)
        message = Message(_BROKEN, {"reason": reason})
        (self.back if link is self._behind else self.forward)(message)
        self._end_waiting(self.broken)
        self._failed(None, self.broken)

    def _end_waiting(self, error: PeerError, request_id: str | None = None) -> None:
        for (_, key), future in list(self._waiting.items()):
            concerned = request_id is None or f"\0{request_id}\0" in f"\0{key}"
            if concerned and not future.done():
                future.set_exception(error)

    def _remember(self, request_id: str, body: dict[str, Any]) -> PeerError:
        error = PeerError(f"stage {body['stage']} gave up {request_id!r}: {body['reason']}")
        self._given_up[request_id] = error
        if len(self._given_up) > _REMEMBERED:
            self._given_up.popitem(last=False)
        return error
