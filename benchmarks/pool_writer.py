"""A client of a store that writes what it was told, when it was told: a process to be stopped.

It gets a slot, says where, and waits; however late it is told to, it writes that slot over NIXL,
as a client does that was stopped between the two. ``Writer`` starts one. Orders go in as lines on
standard input, answers come as lines on standard output; its end closes the process.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Self

from cacheflow.errors import BackendError
from cacheflow.memory import buffer_from
from cacheflow.pool import Piece, messages
from cacheflow.testing.freezing import freeze, thaw
from cacheflow.testing.objects import make_object

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Writer"]


class Writer:
    """A running one, with a slot of its own. Blocking."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._order()  # it has its slot

    @classmethod
    def start(cls, port: int, number: int, env: Mapping[str, str]) -> Self:
        """To write object ``number``, or rather something else in its place, at the store."""
        command = [sys.executable, __file__, str(port), str(number)]
        pipe = subprocess.PIPE
        variables = {**os.environ, **env}
        return cls(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=variables))

    def freeze(self) -> None:
        """SIGSTOP: it stands still on return."""
        freeze(self._process.pid)

    def thaw_and_write(self) -> bool:
        """It goes on and writes; whether it could."""
        assert self._process.stdin is not None
        self._process.stdin.write("write\n")
        self._process.stdin.flush()
        thaw(self._process.pid)
        return self._order() == "wrote"

    def kill(self) -> None:
        """Idempotent."""
        self._process.kill()
        self._process.communicate()

    def _order(self) -> str:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("writer: "):  # UCX and NIXL may write there, too
                return line.removeprefix("writer: ").strip()
        raise RuntimeError("the writer died")


async def serve(port: int, number: int) -> None:
    """Get a slot, and write it when told so."""
    from cacheflow.storage_backends.nixl import NixlTransport
    from cacheflow.storage_backends.pool.channel import Channel

    transport = await NixlTransport.open()
    channel = await Channel.connect("writer", ("127.0.0.1", port), None)
    hello = messages.Hello(client=f"writer-{os.getpid()}", token=b"", offers=(("nixl", b""),))
    greeting = await channel.ask(hello, messages.HelloReply, 5.0)
    link = await transport.connect("store", "127.0.0.1", greeting.answer)
    stored = make_object(number)
    request = messages.Alloc(headers=(stored.header,))
    [(offset, generation, refusal)] = (await channel.ask(request, messages.AllocReply, 5.0)).slots
    if refusal:
        raise SystemExit(refusal)
    print("writer: ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    rubbish = Piece(offset, generation, buffer_from(bytearray(b"\xaa" * len(stored.data))))
    try:
        await link.write([rubbish], deadline=5.0)
    except BackendError as error:
        print(f"writer: {error}", flush=True)
    else:
        print("writer: wrote", flush=True)
    await asyncio.to_thread(sys.stdin.readline)  # its connection lasts as long as it does


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2])))
