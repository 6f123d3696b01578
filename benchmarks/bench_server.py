"""A real server under load: conversations over HTTP whose clients go away in the middle of answers.

Sixty-four clients stream answers of a small random model (float32) from ``cacheflow serve``, which
has memory for some of their conversations and a folder for the rest. Every text, of answers left
half way too, is compared with a cold run of its prompt in an engine of its own. At the end nothing
is left in the server, and it ends with 0 when it is told to.

    make bench-server ARGS="--seconds 600"
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import httpx2
from rigs import fair, load_options, show, start
from server_load import ANSWER, MODEL, Client, Record

from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.testing.chat_model import save_chat_model

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Sequence

    from server_load import Said

SESSIONS: Final = 64
CONTEXT: Final = 2048
RSS_SLACK: Final = 48 << 20
"""What torch and the allocator may still take in the second half."""
FILES_SLACK: Final = 4
_IDLE: Final = (
    "cacheflow_server_running",
    "cacheflow_server_waiting",
    "cacheflow_active_restores",
)
"""Series that are 0 when nobody asks for anything."""


class Server:
    """``cacheflow serve`` as a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url
        self._proc = Path("/proc") / str(process.pid)

    @property
    def rss(self) -> int:
        """Bytes of memory."""
        return int((self._proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    @property
    def files(self) -> int:
        """Open files and sockets."""
        return len(list((self._proc / "fd").iterdir()))


@asynccontextmanager
async def serving(model: Path, store: Path) -> AsyncIterator[Server]:
    """A server of ``model``; whoever leaves it running kills it."""
    options = ("--model", model, "--store", store, "--name", MODEL, "--port", "0")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", "from cacheflow.cli import main; main()", "serve", *map(str, options)),
        *("--dtype", "float32", "--device", "cpu", "--kv-bytes", "32MiB"),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    reading = asyncio.create_task(_say_all(process.stderr))
    try:
        yield Server(process, await reading)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _say_all(log: asyncio.StreamReader) -> str:
    said = ""
    async for line in log:
        said += line.decode()
        if found := re.search(r"running on (http://\S+)", said):
            return found[1]
    raise SystemExit(f"error: the server did not start:\n{said}")


async def load(server: Server, options: argparse.Namespace, record: Record) -> list[int]:
    """All clients until the time is over; the server's memory, twice a second."""
    end = time.monotonic() + options.seconds
    memory: list[int] = []
    limits = httpx2.Limits(max_connections=2 * options.sessions)
    async with (
        httpx2.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http,
        asyncio.TaskGroup() as group,
    ):
        for number in range(options.sessions):
            group.create_task(Client(number, options.seed, http, record).run(end))
        while time.monotonic() < end:
            memory.append(server.rss)
            await asyncio.sleep(0.5)
    return memory


async def left_in(server: Server) -> list[str]:
    """Series that are not 0 although nobody asks for anything any more; for 10 seconds at most."""
    async with httpx2.AsyncClient(base_url=server.url, timeout=30) as http:
        for _ in range(100):
            samples = (await http.get("/metrics")).text.splitlines()
            left = [s for s in samples if s.startswith(_IDLE) and float(s.split()[-1])]
            if not left:
                break
            await asyncio.sleep(0.1)
    return left


async def check(said: Sequence[Said], model: Path) -> list[str]:
    """Answers that no cold run of their prompt gives."""
    engine = await TransformersEngine.open_model(model, dtype="float32")
    chat, wrong = engine.chat, []
    assert chat is not None
    try:
        for number, one in enumerate(said):
            name, made = f"cold {number}", list[int]()
            await engine.open(name, chat.render(one.messages))
            await engine.prefill(name)
            made.append(await engine.first_token(name))
            while len(made) < ANSWER and made[-1] not in chat.stop_tokens:
                made += await engine.decode([name], made[-1:])
            await engine.close(name)
            text = chat.decode(made)
            if one.text != (text if one.whole else text[: len(one.text)]):
                wrong.append(f"{one.text!r} instead of {text!r}")
    finally:
        await engine.aclose()
    return wrong


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Load, look at what is left, end the server, compare."""
    record, wrong = Record(), list[str]()
    with TemporaryDirectory() as scratch:
        model = await asyncio.to_thread(save_chat_model, Path(scratch) / "model", CONTEXT)
        async with serving(model, Path(scratch) / "kv") as server:
            files = server.files
            memory = await load(server, options, record)
            wrong += [f"left: {sample}" for sample in await left_in(server)]
            if server.files > files + FILES_SLACK:
                wrong.append(f"{server.files - files} files left open")
            server.process.send_signal(signal.SIGTERM)
            if status := await server.process.wait():
                wrong.append(f"the server ended with {status}")
        wrong += await check(record.said, model)
    grown = memory[-1] - memory[len(memory) // 2]
    if grown > RSS_SLACK:
        wrong.append(f"memory grew by {grown} bytes in the second half")
    return {
        "seconds": options.seconds,
        "sessions": options.sessions,
        "turns": dict(record.turns),
        "texts_compared": len(record.said),
        **fairness(record),
        "cached_share": record.cached_tokens / max(record.prompt_tokens, 1),
        "grown_bytes": grown,
        "wrong": wrong,
    }


def fairness(record: Record) -> dict[str, float]:
    """Of all turns, and of the clients' means."""
    ttft = sorted(second for each in record.ttft.values() for second in each)
    means = [statistics.mean(each) for each in record.ttft.values()]
    middle = statistics.median(ttft)
    return {
        "ttft_median": middle,
        "ttft_p99": ttft[int(0.99 * len(ttft))],
        "ttft_max": ttft[-1],
        "max_over_median": ttft[-1] / middle,
        "worst_client_over_median_client": max(means) / statistics.median(means),
    }


def tell(found: dict[str, Any]) -> None:
    """What was done, and whether it held."""
    ttft = "{ttft_median:.3f} median, {ttft_p99:.3f} p99, {ttft_max:.3f} max".format(**found)
    rows = [
        ("turns", ", ".join(f"{n:,} {how}" for how, n in sorted(found["turns"].items()))),
        ("texts compared with cold runs", f"{found['texts_compared']:,}"),
        ("seconds to the first piece", ttft),
        ("max / median", fair(found["max_over_median"])),
        ("worst client / median client", f"{found['worst_client_over_median_client']:.2f}"),
        ("cached prompt tokens", f"{found['cached_share']:.0%}"),
        ("memory grown in the second half", f"{found['grown_bytes'] >> 20} MiB"),
        ("wrong", "; ".join(found["wrong"][:3]) or "nothing"),
    ]
    title = f"{found['sessions']} clients, {found['seconds']:.0f} s"
    show("A server and clients that go away", ("what", "figure"), rows, title)


if __name__ == "__main__":
    sys.exit(start(load_options(__doc__, SESSIONS), measure, tell))
