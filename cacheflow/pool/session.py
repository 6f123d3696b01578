"""One client's connection: frames in, operations on the directory, frames out.

Whatever arrives, the store goes on: a frame that is not understood ends its connection and nothing
else. Requests of one connection run side by side, so many at a time; more are not read.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from cacheflow.errors import CacheFlowError, IntegrityError
from cacheflow.kv import encode_header, parse_name
from cacheflow.pool import messages as m
from cacheflow.pool.frames import FEW_VALUES, FIRST_BODY, Kind, read_frame
from cacheflow.pool.sockets import end_sending, watch_stream
from cacheflow.types import ChunkKey

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cacheflow.pool.directory import Directory
    from cacheflow.pool.frames import Frame
    from cacheflow.pool.slots import Slot
    from cacheflow.pool.transport import Target
    from cacheflow.types import ChunkInfo, ObjectKey

__all__ = ["Refusal", "Session"]

_log = logging.getLogger(__name__)
_HELLO_SECONDS: Final = 3.0
_AT_ONCE: Final = 64
"""Requests of one connection that run at the same time."""
_SEND_SECONDS: Final = 10.0
"""A client that does not read its replies for so long is disconnected."""
_GONE_SECONDS: Final = 30.0
"""A client whose machine is silent for so long is gone."""
_REPLY_BYTES: Final = 4 << 20
"""Headers in one reply, about."""
_ENTRY_BYTES: Final = 96
"""What an entry counts for beside its header: replies are bounded in their values, too."""
_SCANS: Final = 4
"""Of one connection at once: what the oldest one listed is forgotten for a fifth."""
_PLACES: Final = 1 << 32
"""``after`` of a page is the number of its scan times this, and a place in what it listed."""


class Refusal(Exception):
    """The request is refused; ``code`` is one of those of :class:`messages.ErrorReply`."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Session:
    """``name`` is unique among all connections of this start of the store."""

    def __init__(
        self,
        name: str,
        directory: Directory,
        targets: Mapping[str, Target],
        token: bytes,
        instance: bytes,
        stat: Callable[[], m.StatReply],
    ) -> None:
        self.name = name
        self.client = ""
        self.transport = ""
        self._directory = directory
        self._targets = targets
        self._token = token
        self._instance = instance
        self._stat = stat
        self._scans: dict[int, list[tuple[ObjectKey, bytes | None]]] = {}
        self._scan_numbers = itertools.count(1)
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._writer: asyncio.StreamWriter | None = None
        self._is_cut = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the client goes, or has to."""
        self._writer = writer
        watch_stream(writer, _GONE_SECONDS)
        try:
            await self._hello(reader)
            async with asyncio.TaskGroup() as group:
                tasks: set[asyncio.Task[None]] = set()
                while (frame := await read_frame(reader)) is not None:
                    if self._is_cut:
                        continue  # until it goes
                    await self._turns.acquire()
                    task = group.create_task(self._answer(frame))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                for task in tasks:  # nobody hears the answers
                    task.cancel()
        except (CacheFlowError, OSError, TimeoutError, ExceptionGroup) as error:
            _log.warning("client %s: disconnected: %s", self.client or self.name, _reason(error))
        finally:
            await self._end()

    def cut(self, reason: str) -> None:
        """Disconnect the client.

        One that may still write by itself, what it was to fill or what is there by then, is asked
        to go and heard no more: its slots are its own until its connection is over.
        """
        if self._writer is None or self._writer.is_closing() or self._is_cut:
            return
        self._is_cut = True
        target = self._targets.get(self.transport)
        is_writing = target is not None and not target.shuts_out
        if is_writing and self._directory.grants.is_filling(self.name):
            _log.warning("client %s: %s: its slots are kept until it goes", self.client, reason)
            end_sending(self._writer)
        else:
            _log.warning("client %s: cut off: %s", self.client, reason)
            self._writer.transport.abort()

    def end(self) -> None:
        """The store stops, and nobody writes into it any more."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def _end(self) -> None:
        target = self._targets.get(self.transport)
        if target is not None:
            await target.dismiss(self.name)
        self._directory.dismiss(self.name)
        if self._writer is not None:
            self._writer.close()
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._writer.wait_closed()

    # -- frames --------------------------------------------------------------------------------

    async def _hello(self, reader: asyncio.StreamReader) -> None:
        async with asyncio.timeout(_HELLO_SECONDS):
            frame = await read_frame(reader, FIRST_BODY)
        if frame is None:
            raise IntegrityError("it said nothing")
        if frame.kind is not Kind.HELLO or frame.is_reply:
            raise IntegrityError(f"its first frame is {frame.kind.name}, not HELLO")
        hello = m.Hello.parse(frame.body, FEW_VALUES)
        try:
            reply = await self._greet(hello)
        except Refusal as refusal:
            await self._refuse(frame.number, refusal)
            raise IntegrityError(str(refusal)) from None
        await self._send(reply.frame(Kind.HELLO, frame.number, is_reply=True))
        _log.info("client %s: connected, transport %s", self.client, self.transport)

    async def _greet(self, hello: m.Hello) -> m.HelloReply:
        if not hmac.compare_digest(hello.token, self._token):
            raise Refusal("token", "the token is not that of this store")
        if self._directory.is_draining:
            raise Refusal("draining", "the store is about to stop")
        self.client = hello.client
        for name, offer in hello.offers:
            if name in self._targets:
                self.transport = name
                answer = await self._targets[name].admit(self.name, offer)
                return m.HelloReply(
                    instance=self._instance,
                    arena_bytes=self._directory.arena.memory.nbytes,
                    lease_ms=int(1000 * self._directory.terms.lease),
                    transport=name,
                    answer=answer,
                )
        offered = ", ".join(name for name, _ in hello.offers) or "none"
        there = ", ".join(self._targets)
        raise Refusal("transport", f"transports offered: {offered}; of this store: {there}")

    async def _answer(self, frame: Frame) -> None:
        try:
            reply = await self._reply(frame)
        except IntegrityError as error:
            await self._refuse(frame.number, Refusal("protocol", str(error)))
            self.cut(f"{frame.kind.name}: {error}")
        except Refusal as refusal:
            await self._refuse(frame.number, refusal)
        except CacheFlowError as error:
            _log.warning("client %s: %s failed: %s", self.client, frame.kind.name, error)
            await self._refuse(frame.number, Refusal("failed", str(error)))
        else:
            await self._send(reply.frame(frame.kind, frame.number, is_reply=True))
        finally:
            self._turns.release()

    async def _refuse(self, number: int, refusal: Refusal) -> None:
        reply = m.ErrorReply(code=refusal.code, text=str(refusal)[:1024])
        await self._send(reply.frame(Kind.ERROR, number, is_reply=True))

    async def _send(self, frame: bytes) -> None:
        assert self._writer is not None
        if self._writer.is_closing() or self._is_cut:
            return
        self._writer.write(frame)
        try:
            async with asyncio.timeout(_SEND_SECONDS):
                await self._writer.drain()
        except (OSError, TimeoutError) as error:
            self.cut(f"it does not take its replies ({_reason(error)})")

    # -- operations ----------------------------------------------------------------------------

    async def _reply(self, frame: Frame) -> m.Message:
        if frame.is_reply or frame.kind not in m.REQUESTS:
            raise IntegrityError("it is no request")
        request = m.REQUESTS[frame.kind].parse(frame.body, FEW_VALUES)
        directory = self._directory
        match request:
            case m.Lookup():
                return await self._lookup(request)
            case m.Lease():
                slots = await directory.lease(self.name, _keys(request.names))
                return m.LeaseReply(slots=tuple(map(_place, slots)))
            case m.Release():
                generations = request.generations
                directory.release(self.name, generations, looked_up=request.looked_up)
                return m.Nothing()
            case m.Alloc():
                opened = await directory.alloc(self.name, request.headers)
                return m.AllocReply(slots=tuple(map(_opened, opened)))
            case m.Commit():
                refused = await directory.commit(self.name, request.slots)
                return m.CommitReply(refused=tuple(refused))
            case m.Abort():
                directory.abort(self.name, request.generations)
                return m.Nothing()
            case m.Delete():
                deleted = await directory.delete(_keys(request.names))
                return m.DeleteReply(deleted=tuple(deleted))
            case m.Scan():
                return await self._scan(request.after)
            case m.Stat():
                return self._stat()
            case _:
                raise IntegrityError("a connection says HELLO once")

    async def _lookup(self, request: m.Lookup) -> m.LookupReply:
        known = set(request.known)
        chunks = [ChunkKey(digest) for digest in request.chunks]
        found = await self._directory.lookup(chunks, self.name if request.lease else None)
        answer: list[tuple[tuple[int, bytes, int], ...]] = []
        left = _REPLY_BYTES
        for objects in found:
            entries, nbytes = _described(objects, known)
            left -= nbytes
            if left < 0 and answer:
                break
            answer.append(entries)
        return m.LookupReply(found=tuple(answer))

    async def _scan(self, after: int) -> m.ScanReply:
        number, at = divmod(after, _PLACES)
        if after == 0:
            number, listed = next(self._scan_numbers), await self._directory.headers()
            self._scans[number] = listed
            while len(self._scans) > _SCANS:
                del self._scans[next(iter(self._scans))]
        elif (known := self._scans.get(number)) is not None:
            listed = known
        else:
            raise Refusal("failed", "this scan is over, or too many came after it: begin another")
        page: list[bytes] = []
        left = _REPLY_BYTES
        while at < len(listed) and left > 0:
            key, header = listed[at]
            if header is None and (slot := self._directory.arena.find(key)) is not None:
                header = slot.header
            if header is not None:
                page.append(header)
                left -= len(header)
            at += 1
        if at >= len(listed):
            self._scans.pop(number, None)
            return m.ScanReply(headers=tuple(page), after=0)
        return m.ScanReply(headers=tuple(page), after=number * _PLACES + at)


def _keys(names: Sequence[str]) -> list[ObjectKey]:
    try:
        return [parse_name(name) for name in names]
    except ValueError as error:
        raise IntegrityError(str(error)) from None


def _place(slot: Slot | None) -> tuple[int, int, int] | None:
    return None if slot is None else (slot.offset, slot.info.nbytes, slot.generation)


def _opened(slot: Slot | str) -> tuple[int, int, str]:
    return (0, 0, slot) if isinstance(slot, str) else (slot.offset, slot.generation, "")


def _described(
    objects: Sequence[tuple[Slot | None, ChunkInfo]], known: set[int]
) -> tuple[tuple[tuple[int, bytes, int], ...], int]:
    """Entries of one chunk and their bytes: no more of them than fit a reply."""
    entries: list[tuple[int, bytes, int]] = []
    nbytes = 0
    for slot, info in objects:
        if slot is None:
            entry = (0, encode_header(info), 0)
        else:
            header = b"" if slot.generation in known else slot.header
            entry = (slot.generation, header, slot.offset)
        nbytes += len(entry[1]) + _ENTRY_BYTES
        if nbytes > 2 * _REPLY_BYTES:
            break
        entries.append(entry)
    return tuple(entries), nbytes


def _reason(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(_reason, error.exceptions))
    return str(error) or type(error).__name__
