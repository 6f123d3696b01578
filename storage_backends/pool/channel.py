"""The side channel to one store: questions out, answers in, many at a time on one connection.

Belongs to one event loop. Nothing is tried again here: a connection that breaks is over, and
everybody who waits for an answer hears of it. Its end tells the store that nobody writes to slots
that it gave over it: it is not closed before that is true.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar

from cacheflow.errors import BackendError, IntegrityError
from cacheflow.pool import Kind, messages, read_frame

if TYPE_CHECKING:
    from collections.abc import Callable
    from ssl import SSLContext

    from cacheflow.pool import Frame
    from cacheflow.storage_backends.pool.settings import Address

__all__ = ["Channel", "Refused"]

R = TypeVar("R", bound="messages.Message")
_KINDS: Final = {message: kind for kind, message in messages.REQUESTS.items()}


class _Question(NamedTuple):
    """``late`` gets the answer if nobody waits for it any more when it comes."""

    answer: asyncio.Future[Any]
    late: Callable[[Any], None] | None


class Refused(BackendError):
    """The store answered, and said no; ``code`` says why."""

    def __init__(self, code: str, text: str, operation: str, context: str) -> None:
        super().__init__(f"refused ({code}): {text}", operation=operation, context=context)
        self.code = code


class Channel:
    """Made by :meth:`connect`; ``ended`` is done once the connection is over."""

    def __init__(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.name = name
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader = reader
        self._writer = writer
        self._numbers = count(1)
        self._waiting: dict[int, _Question] = {}
        self._holds = 0
        self._task = asyncio.create_task(self._listen())

    @classmethod
    async def connect(cls, name: str, address: Address, tls: SSLContext | None) -> Self:
        """Raises OSError if it cannot be reached."""
        reader, writer = await asyncio.open_connection(*address, ssl=tls)
        return cls(name, reader, writer)

    async def ask(
        self,
        request: messages.Message,
        reply: type[R],
        seconds: float,
        late: Callable[[R], None] | None = None,
    ) -> R:
        """The answer. ``late`` gets it if it comes when nobody waits for it any more.

        Raises:
            BackendError: there is none within ``seconds``, or the store refuses (:class:`Refused`).
        """
        kind = _KINDS[type(request)]
        number = self._send(kind, request)
        answer = asyncio.get_running_loop().create_future()
        self._waiting[number] = _Question(answer, late)
        try:
            async with asyncio.timeout(seconds):
                message = await answer
        except BaseException as error:
            # The answer may have come in the same moment.
            came = answer.done() and not answer.cancelled() and answer.exception() is None
            if came and late is not None:
                late(answer.result())
            if isinstance(error, TimeoutError):
                raise self._error(kind, f"no answer within {seconds:g} s") from None
            raise
        if not isinstance(message, reply):
            raise self._error(kind, f"the answer is {type(message).__name__}")
        return message

    def tell(self, request: messages.Message) -> None:
        """Say something whose answer is of no interest. Does not wait."""
        with suppress(BackendError):  # then the store knows: it has lost us
            self._send(_KINDS[type(request)], request)

    def hold(self) -> None:
        """Something may write to a slot of this connection: the store hears of its end when
        :meth:`let_go` was called as often."""
        self._holds += 1

    def let_go(self) -> None:
        """It does not any more."""
        self._holds -= 1
        if self._holds == 0 and self.ended.done():
            self._writer.transport.abort()

    def close(self) -> None:
        """End it. Idempotent."""
        self._task.cancel()
        self._end("the connection was closed")

    async def aclose(self) -> None:
        """End it and wait for it."""
        self.close()
        await asyncio.wait([self._task])

    def _send(self, kind: Kind, request: messages.Message) -> int:
        if self.ended.done() or self._writer.is_closing():  # uvloop's raises RuntimeError then
            raise self._error(kind, "the connection is over")
        number = next(self._numbers) & 0xFFFFFFFF
        self._writer.write(request.frame(kind, number))
        return number

    async def _listen(self) -> None:
        reason = "the store closed the connection"
        try:
            while (frame := await read_frame(self._reader)) is not None:
                self._hear(frame)
        except (OSError, IntegrityError) as error:
            reason = str(error) or type(error).__name__
        finally:
            self._end(reason)

    def _hear(self, frame: Frame) -> None:
        if not frame.is_reply:
            raise IntegrityError("the store asks instead of answering")
        question = self._waiting.pop(frame.number, None)
        if question is None:
            return  # of something that was only told
        message = messages.REPLIES[frame.kind].parse(frame.body)
        answer, late = question
        if answer.done():  # nobody waits any more
            if late is not None and not isinstance(message, messages.ErrorReply):
                late(message)
        elif isinstance(message, messages.ErrorReply):
            answer.set_exception(Refused(message.code, message.text, "ask", self.name))
        else:
            answer.set_result(message)

    def _end(self, reason: str) -> None:
        if self.ended.done():
            return
        self.ended.set_result(None)
        if self._holds == 0:
            self._writer.transport.abort()
        for answer, _ in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._error(Kind.ERROR, reason))
        self._waiting.clear()

    def _error(self, kind: Kind, reason: str) -> BackendError:
        operation = kind.name.lower()
        return BackendError(reason, operation=operation, context=self.name, is_temporary=True)
