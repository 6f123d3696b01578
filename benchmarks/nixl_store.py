"""A process whose memory is read and written over NIXL: no directory, no leases, no keys.

``running_store`` starts one, for tests of the transport alone. Orders go in as lines
on standard input, answers come as lines on standard output; its end closes the process.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self

from cacheflow.testing.freezing import freeze, thaw

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

__all__ = ["BareStore", "content"]


def content(nbytes: int) -> bytes:
    """What lies in a fresh store's arena: bytes that say where they are."""
    block = hashlib.shake_256(b"arena").digest(1 << 16)
    return b"".join(
        number.to_bytes(8, "little") + block[8:] for number in range(-(-nbytes // len(block)))
    )[:nbytes]


class BareStore:
    """A running store; ``answer`` is its hello for :meth:`NixlTransport.connect`."""

    def __init__(self, process: asyncio.subprocess.Process, answer: bytes) -> None:
        self.process = process
        self.answer = answer

    @classmethod
    async def start(cls, nbytes: int, env: Mapping[str, str] | None = None) -> Self:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            str(nbytes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )
        store = cls(process, b"")
        store.answer = bytes.fromhex(await store._line("hello"))
        return store

    @property
    def pid(self) -> int:
        return self.process.pid

    async def order(self, *words: object) -> str:
        """Have it do something; the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write((" ".join(map(str, words)) + "\n").encode())
        return await self._line(str(words[0]))

    async def _line(self, first: str) -> str:
        assert self.process.stdout is not None
        while line := (await self.process.stdout.readline()).decode():
            word, _, rest = line.strip().partition(" ")
            if word == first:  # UCX and NIXL may write there, too
                return rest
        raise RuntimeError(f"the store died before it said {first}")

    async def freeze(self) -> None:
        """SIGSTOP: it stands still on return."""
        await asyncio.to_thread(freeze, self.pid)

    def thaw(self) -> None:
        thaw(self.pid)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def close(self) -> None:
        assert self.process.stdin is not None
        if self.process.returncode is None:
            self.process.stdin.close()
        async with asyncio.timeout(20):
            await self.process.wait()


@asynccontextmanager
async def running_store(
    nbytes: int, env: Mapping[str, str] | None = None
) -> AsyncIterator[BareStore]:
    """One that is gone afterwards, however it was left."""
    store = await BareStore.start(nbytes, env)
    try:
        yield store
    finally:
        await store.kill()


async def serve(nbytes: int) -> None:
    from cacheflow.memory import buffer_from
    from cacheflow.storage_backends.nixl import NixlTarget

    memory = mmap.mmap(-1, nbytes)
    memory[:] = content(nbytes)
    target = await NixlTarget.open(buffer_from(memory))
    say("hello", (await target.admit("", b"")).hex())
    target.busy(1)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        word, *rest = line.split()
        say(word, obey(memory, word, [int(each) for each in rest]))
    await target.aclose()


def obey(memory: mmap.mmap, word: str, numbers: list[int]) -> object:
    match word, numbers:
        case "digest", [first, size]:
            return hashlib.sha256(memory[first : first + size]).hexdigest()
    raise ValueError(f"{word} {numbers}")


def say(*words: object) -> None:
    print(*words, flush=True)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
