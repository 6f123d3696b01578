"""A server that gives every request the same answer, or none: what a store in trouble looks like.

Real sockets and real HTTP; nothing of S3 but the shape of its errors.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["Answers", "answering"]

_ERROR = (
    "<?xml version='1.0'?><Error><Code>{code}</Code><AWSAccessKeyId>{key}</AWSAccessKeyId></Error>"
)


class Answers:
    """``status`` 0: never answers. Counts the requests it has read."""

    def __init__(self, status: int, code: str, key: str) -> None:
        body = _ERROR.format(code=code, key=key).encode()
        head = f"HTTP/1.1 {status} No\r\nContent-Length: {len(body)}\r\n\r\n"
        self._answer = head.encode() + body if status else b""
        self.endpoint = ""
        self.requests = 0
        self.asked = asyncio.Event()
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task: Any = asyncio.current_task()
        self._connections[task] = writer
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = [line for line in head.lower().split(b"\r\n") if b"content-length" in line]
                if length:
                    await reader.readexactly(int(length[0].partition(b":")[2]))
                self.requests += 1
                self.asked.set()
                writer.write(self._answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client is gone, or we are
        finally:
            writer.close()

    async def hang_up(self) -> None:
        """Close every connection."""
        for writer in self._connections.values():
            writer.close()
        await asyncio.gather(*self._connections, return_exceptions=True)


@asynccontextmanager
async def answering(status: int, code: str = "Trouble", key: str = "") -> AsyncIterator[Answers]:
    """The server, listening on a free port; an error body names ``key``, as S3's do."""
    answers = Answers(status, code, key)
    server = await asyncio.start_server(answers.serve, "127.0.0.1", 0)
    answers.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield answers
    finally:
        server.close()
        await answers.hang_up()
