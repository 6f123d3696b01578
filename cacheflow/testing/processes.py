"""Ranks as real processes, started from a test or a benchmark: run, talk to, kill, collect.

Each rank runs one function of the caller's own file in a process forked from a server that has
torch loaded already, so that a rank costs milliseconds and not seconds. They find each other as
under torchrun (``RANK``, ``WORLD_SIZE``, ... are set), or through ``seat.init_method``. What is
said and returned is JSON. Knows nothing of CacheFlow, and nothing of what the ranks do.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from cacheflow.testing.freezing import freeze

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

__all__ = ["RankError", "Ranks", "Seat", "run_ranks"]

_PRELOAD: Final = (
    *("torch", "torch.distributed", "transformers", "transformers.models.llama.modeling_llama"),
    *("safetensors.torch", "uvloop", "cacheflow.session", "cacheflow.plugins.pipeline"),
)
_LOOPBACK: Final = "127.0.0.1"


class RankError(Exception):
    """A rank raised, died or did not answer in time; says which one, and its traceback."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's view: who it is, and its line to whoever started it."""

    rank: int
    count: int
    init_method: str
    """For ``torch.distributed.init_process_group``: a file that only these ranks know."""
    line: Connection

    def say(self, word: str, value: object = None) -> None:
        """Tell the starter ``word`` (see :meth:`Ranks.wait_for`)."""
        self.line.send_bytes(json.dumps(["said", word, value]).encode())

    def hear(self) -> str:
        """Block until the starter says something: what it says."""
        return str(json.loads(self.line.recv_bytes()))


@dataclass(slots=True)
class _Member:
    process: ForkServerProcess
    line: Connection
    said: deque[tuple[str, Any]] = field(default_factory=deque)
    ended: bool = False
    result: Any = None
    error: str = ""


class Ranks:
    """``count`` processes that run ``target(seat, *args)``, which may be a coroutine function.

    ``target`` is a top-level function of any Python file; ``args`` are JSON. Leaving the context
    kills whoever still runs. ``deadline``: seconds for all of it, however often is waited.
    """

    def __init__(
        self, count: int, target: Callable[..., Any], *args: object, deadline: float = 60.0
    ) -> None:
        self._count = count
        self._folder = tempfile.TemporaryDirectory(prefix="cacheflow-ranks-")
        file, name = inspect.getfile(target), target.__name__
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOAD))
        init_method = f"file://{self._folder.name}/rendezvous"
        port = _free_port()
        self._members: list[_Member] = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            what = (file, name, json.dumps(args), rank, count, init_method, port, theirs)
            process = context.Process(target=_main, args=what, daemon=True)
            process.start()
            theirs.close()
            self._members.append(_Member(process, ours))
        # From here on: the first rank of a test run waits until their server has loaded torch.
        self._deadline = time.monotonic() + deadline

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for member in self._members:
            member.process.kill()
        for member in self._members:
            member.process.join()
            member.process.close()
            member.line.close()
        self._folder.cleanup()

    def tell(self, rank: int, word: str) -> None:
        """What :meth:`Seat.hear` of that rank returns next."""
        self._members[rank].line.send_bytes(json.dumps(word).encode())

    def kill(self, rank: int) -> None:
        """SIGKILL: the process ends without a word."""
        self._members[rank].process.kill()

    def freeze(self, rank: int) -> None:
        """SIGSTOP: on return the process stands still, its connections stay open."""
        pid = self._members[rank].process.pid
        assert pid is not None, "it was started"
        freeze(pid)

    def wait_for(self, rank: int, word: str) -> Any:
        """Block until ``rank`` says ``word``: the value it gave. What it said before is dropped.

        Raises:
            RankError: it ended without saying so, or the deadline passed.
        """
        member = self._members[rank]
        while True:
            while member.said:
                said, value = member.said.popleft()
                if said == word:
                    return value
            if member.ended:
                raise RankError(f"rank {rank} never said {word!r}: {member.error or 'it is done'}")
            self._read(rank)

    def result(self, rank: int, within: float | None = None) -> Any:
        """Block until ``rank`` is done: what its function returned. ``within``: seconds from now.

        Raises:
            RankError: it raised or died, with its traceback; or the deadline passed.
        """
        member = self._members[rank]
        if within is not None:
            self._deadline = min(self._deadline, time.monotonic() + within)
        while not member.ended:
            self._read(rank)
        if member.error:
            raise RankError(f"rank {rank}: {member.error}")
        return member.result

    def results(self) -> list[Any]:
        """:meth:`result` of every rank; the first error names all ranks that failed."""
        errors, results = [], []
        for rank in range(self._count):
            try:
                results.append(self.result(rank))
            except RankError as error:
                errors.append(str(error))
        if errors:
            raise RankError("\n".join(errors))
        return results

    def _read(self, rank: int) -> None:
        member = self._members[rank]
        if not member.line.poll(max(0.0, self._deadline - time.monotonic())):
            raise RankError(f"rank {rank} does not answer and the deadline is over")
        try:
            kind, *rest = json.loads(member.line.recv_bytes())
        except (EOFError, ConnectionResetError):
            member.process.join()
            member.ended = True
            member.error = f"died with exit code {member.process.exitcode}"
            return
        if kind == "said":
            member.said.append((rest[0], rest[1]))
            return
        member.ended = True
        member.result, member.error = rest


def run_ranks(
    count: int, target: Callable[..., Any], *args: object, deadline: float = 60.0
) -> list[Any]:
    """What ``target(seat, *args)`` returned in each of ``count`` processes. See :class:`Ranks`."""
    with Ranks(count, target, *args, deadline=deadline) as ranks:
        return ranks.results()


def _main(
    file: str,
    name: str,
    args: str,
    rank: int,
    count: int,
    init_method: str,
    port: int,
    line: Connection,
) -> None:
    """A rank's life; runs in its process."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",  # whatever the host's name resolves to
    }
    seat = Seat(rank, count, init_method, line)
    try:
        made = _function(file, name)(seat, *json.loads(args))
        if inspect.iscoroutine(made):
            import uvloop

            made = uvloop.run(made)
        answer = json.dumps(["done", made, ""])
    except BaseException:  # whatever ends a rank is for whoever started it
        answer = json.dumps(["done", None, traceback.format_exc()])
    line.send_bytes(answer.encode())
    line.close()
    sys.stdout.flush()
    os._exit(0)  # threads inside a hung collective must not keep the process


def _function(file: str, name: str) -> Callable[..., Any]:
    """The function, from its file: a test's module cannot be imported by name."""
    spec = importlib.util.spec_from_file_location(f"ranks_{Path(file).stem}", file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    sys.path.insert(0, str(Path(file).parent))
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


def _free_port() -> int:
    with socket.create_server((_LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])
