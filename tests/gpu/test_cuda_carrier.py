"""Hidden states between two processes: over NCCL from GPU to GPU, over gloo on CPUs."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cacheflow.testing.processes import Ranks, run_ranks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cacheflow.testing.processes import Seat

SHAPES = [[3, 5], [0, 8], [1 << 22], [1], [2, 3, 4]]
BIG = 64 << 20
"""Floats: more than sockets hold on their own."""
DEADLINE = 20.0


class Line:
    """One end of a link, and what it says on the event loop."""

    def __init__(self, seat: Seat, deadline: float, device: str) -> None:
        from cacheflow.plugins.pipeline.links import Link
        from cacheflow.plugins.pipeline.meeting import Meeting
        from cacheflow.plugins.ranks import join_ranks
        from cacheflow.plugins.transformers.opening import streams_of

        self.device = torch.device("cpu" if device == "cpu" else f"cuda:{seat.rank}")
        joined = join_ranks(seat.rank, seat.count, seat.init_method, deadline)
        streams = streams_of(self.device)
        self.meeting = Meeting.open(joined, {"model": "m"}, self.device, streams, deadline)
        carriers = self.meeting.carriers
        carrier = carriers.before or carriers.behind
        assert carrier is not None, "there are two"
        assert carrier.backend == ("gloo" if device == "cpu" else "nccl")
        self.carrier = carrier
        self.heard: list[Any] = []
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.link = Link(
            1 - seat.rank,
            self.meeting.group,
            carrier,
            deadline,
            lambda _link, message: self.heard.append(message),
            lambda _link: self._end("goodbye"),
            lambda _link, error: self._end(f"{type(error).__name__}: {error}"),
        )

    def _end(self, how: str) -> None:
        if not self.ended.done():
            self.ended.set_result(how)


@asynccontextmanager
async def line_of(seat: Seat, device: str, deadline: float = DEADLINE) -> AsyncIterator[Line]:
    line = Line(seat, deadline, device)
    try:
        yield line
    finally:
        await line.link.aclose()
        await asyncio.to_thread(line.meeting.close)


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(4)
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


async def say_and_hear(seat: Seat, device: str) -> list[list[Any]]:
    """The front end sends tensors of all kinds among words; the other compares what it heard."""
    from cacheflow.plugins.pipeline.links import Message

    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    sent = [each for dtype in dtypes for each in tensors(dtype)]
    async with line_of(seat, device) as line:
        if seat.rank == 0:
            for number, tensor in enumerate(sent):
                line.link.send(Message("word", {"number": number}))
                line.link.send(Message("tensor", {"number": number}, tensor.to(line.device)))
            return []
        assert await line.ended == "goodbye"
    numbers = [[message.kind, message.body["number"]] for message in line.heard]
    assert numbers == [[kind, n] for n in range(len(sent)) for kind in ("word", "tensor")]
    for message, tensor in zip(line.heard[1::2], sent, strict=True):
        assert message.tensor.device == line.device
        assert message.tensor.dtype == tensor.dtype
        assert torch.equal(message.tensor.cpu(), tensor), message
    return numbers


DEVICES = ["cpu", "cuda"]


def two_devices(device: str) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("CUDA: two devices are needed, NCCL takes no two ranks on one")


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_come_in_order_and_whole(device: str) -> None:
    """Small, big and empty ones, of every dtype, each behind the word said before it."""
    two_devices(device)
    _, heard = run_ranks(2, say_and_hear, device, deadline=100.0)
    assert len(heard) == 2 * 3 * len(SHAPES)


async def stop_in_the_middle(
    seat: Seat, device: str, victim: int, deadline: float
) -> dict[str, Any]:
    """The victim stands still when a tensor is to be sent or taken; what the other end says."""
    from cacheflow.plugins.pipeline.links import Message

    async with line_of(seat, device, deadline) as line:
        if seat.rank == victim:

            def stand(*_: object) -> None:
                seat.say("in the middle")
                time.sleep(3600.0)

            line.carrier.send = line.carrier.receive = stand  # type: ignore[assignment]
        if seat.rank == 0:
            big = torch.zeros(BIG, device=line.device)
            if device != "cpu":
                torch.cuda.synchronize()
            line.link.send(Message("tensor", {}, big))
        seat.say("ready")
        await asyncio.to_thread(seat.hear)
        start = time.monotonic()
        how = await line.ended
        took = time.monotonic() - start
        start = time.monotonic()
    return {"how": how, "took": took, "close": time.monotonic() - start}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("victim", "frozen"), [(0, False), (1, False), (1, True)])
def test_a_peer_that_is_gone_in_the_middle_is_an_error(
    device: str, victim: int, *, frozen: bool
) -> None:
    """Killed with half a tensor sent or taken: the other end is told at once; one that stands
    still: within the deadline. Closing does not hang, and the process lives."""
    two_devices(device)
    deadline = 4.0 if frozen else DEADLINE
    with Ranks(2, stop_in_the_middle, device, victim, deadline, deadline=90.0) as ranks:
        ranks.wait_for(victim, "in the middle")
        ranks.wait_for(1 - victim, "ready")
        (ranks.freeze if frozen else ranks.kill)(victim)
        ranks.tell(1 - victim, "it is gone")
        found = ranks.result(1 - victim)
    assert "Error" in found["how"], found
    assert found["took"] < 2 * deadline, found
    assert found["close"] < 20.0, found


async def copies_while_sending(seat: Seat, device: str) -> list[str]:
    """Names of the copies to or from the host that the device made meanwhile."""
    from torch.profiler import ProfilerActivity, profile

    from cacheflow.plugins.pipeline.links import Message

    async with line_of(seat, device) as line:
        tensor = torch.ones(1 << 22, device=line.device)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            if seat.rank == 0:
                for _ in range(4):
                    line.link.send(Message("tensor", {}, tensor))
                await line.link.aclose()
            else:
                assert await line.ended == "goodbye"
                assert len(line.heard) == 4
            torch.cuda.synchronize()
    return [event.name for event in seen.events() if "HtoD" in event.name or "DtoH" in event.name]


def test_nothing_goes_through_the_host_over_nccl() -> None:
    """The profiler sees no copy to or from the host on either side."""
    two_devices("cuda")
    assert run_ranks(2, copies_while_sending, "cuda", deadline=100.0) == [[], []]
