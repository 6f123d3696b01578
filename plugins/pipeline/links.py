"""Messages between neighbouring ranks over torch.distributed, with nobody ever waited for in vain.

A link has one thread that sends and one that receives; messages are a JSON body and perhaps a
tensor, in order. A tensor goes the carrier's way, behind its message, on the same threads. A rank
with nothing to say pings, so a neighbour that is silent for ``deadline`` seconds is as dead as one
whose connection broke. One that says goodbye is not: all it had to say has come by then. It is
answered with a goodbye, and nothing that it does afterwards is an error. Knows nothing of what is
said.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import distributed

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.plugins.pipeline.carrier import Carrier

__all__ = ["Link", "Message"]

_HEADER: Final = 3
"""int64s: format, bytes of the body, bytes of the tensor."""
_FORMAT: Final = 0x0CAC4E02
_PING: Final = "ping"
_BYE: Final = "bye"
_PINGS: Final = 4
"""In a deadline."""
_CLOSE_SECONDS: Final = 5.0
_MOST_BODY: Final = 1 << 20
_MOST_TENSOR: Final = 1 << 34


@dataclass(frozen=True, slots=True)
class Message:
    """``tensor`` is on the stage's device, computed, and not changed any more."""

    kind: str
    body: dict[str, Any] = field(default_factory=dict)
    tensor: torch.Tensor | None = None


class Link:
    """This rank's line to ``peer``, in a group over gloo; tensors are sent or received, one of the
    two, by ``carrier``. On the event loop it calls ``heard``; ``left``, if the peer said goodbye
    first, after all that was heard; or ``broken``."""

    def __init__(
        self,
        peer: int,
        group: distributed.ProcessGroup,
        carrier: Carrier,
        deadline: float,
        heard: Callable[[Link, Message], None],
        left: Callable[[Link], None],
        broken: Callable[[Link, BaseException], None],
    ) -> None:
        self.peer = peer
        self._group = group
        self._carrier = carrier
        self._deadline = deadline
        self._heard = heard
        self._left = left
        self._broken = broken
        self._loop = asyncio.get_running_loop()
        self._outgoing: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._closing = self._parted = False
        self._threads = [
            threading.Thread(target=run, name=f"cacheflow-{name}-{peer}", daemon=True)
            for name, run in (("send", self._send_all), ("receive", self._receive_all))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: Message) -> None:
        """Queue ``message``; it goes out in order, or the link breaks. After a goodbye: dropped."""
        self._outgoing.put(message)

    async def aclose(self) -> None:
        """Say goodbye and wait a little for the peer's."""
        self._closing = True
        self._outgoing.put(Message(_BYE))
        for thread in self._threads:
            await asyncio.to_thread(thread.join, _CLOSE_SECONDS)

    # -- threads -------------------------------------------------------------------------------

    def _send_all(self) -> None:
        try:
            if self._carrier.sends:
                self._carrier.connect()
            while True:
                try:
                    message = self._outgoing.get(timeout=self._deadline / _PINGS)
                except queue.Empty:
                    message = Message(_PING)
                self._send(message)
                if message.kind == _BYE:
                    return
        except Exception as error:  # whatever torch raises: the peer cannot be reached any more
            self._carrier.abort()
            if not self._parted:
                self._tell(self._broken, error)

    def _send(self, message: Message) -> None:
        tensor, body = message.tensor, dict(message.body)
        if tensor is not None:
            body |= {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        text = json.dumps([message.kind, body]).encode()
        nbytes = 0 if tensor is None else tensor.nbytes
        header = torch.tensor([_FORMAT, len(text), nbytes], dtype=torch.int64)
        distributed.send(header, self.peer, self._group)
        said = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        distributed.send(said, self.peer, self._group)
        if tensor is not None:
            self._carrier.send(tensor)

    def _receive_all(self) -> None:
        try:
            if not self._carrier.sends:
                self._carrier.connect()
            while True:
                message = self._receive()
                if message.kind == _BYE:
                    self._parted = True
                    if not self._closing:
                        self._tell(self._left)
                        self._outgoing.put(Message(_BYE))  # or it would wait for ours
                    return
                if message.kind != _PING:
                    self._tell(self._heard, message)
        except Exception as error:  # whatever torch raises: the peer is gone, or silent
            self._carrier.abort()
            self._tell(self._broken, error)

    def _receive(self) -> Message:
        header = torch.zeros(_HEADER, dtype=torch.int64)
        distributed.recv(header, self.peer, self._group)
        what, body_bytes, nbytes = header.tolist()
        if what != _FORMAT or not (0 < body_bytes <= _MOST_BODY and 0 <= nbytes <= _MOST_TENSOR):
            raise ConnectionError("it speaks another version")
        text = torch.zeros(body_bytes, dtype=torch.uint8)
        distributed.recv(text, self.peer, self._group)
        kind, body = json.loads(text.numpy().tobytes())
        if "dtype" not in body:
            return Message(kind, body)
        dtype: torch.dtype = getattr(torch, body.pop("dtype"))
        return Message(kind, body, self._carrier.receive(body.pop("shape"), dtype))

    def _tell(self, callback: Callable[..., None], *what: object) -> None:
        # The loop may be gone: then nobody wants to know.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, self, *what)
