"""What carries hidden states between stages, where it does not take two processes to see it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from cacheflow.plugins.pipeline.carrier import (
    Carrier,
    backend_between,
    device_name,
)
from cacheflow.plugins.transformers.lanes import CpuStreams


@pytest.mark.parametrize(
    ("one", "other", "backend"),
    [
        ("GPU-1", "GPU-2", "nccl"),
        ("GPU-1", "GPU-1", "gloo"),
        ("GPU-1", "", "gloo"),
        ("", "GPU-1", "gloo"),
        ("", "", "gloo"),
    ],
)
def test_nccl_carries_between_two_gpus_only(one: str, other: str, backend: str) -> None:
    """Not between ranks that share one, which NCCL refuses, nor where either has none."""
    assert backend_between(one, other) == backend


def test_a_cpu_has_no_name() -> None:
    """So whoever is its neighbour talks to it over gloo."""
    assert device_name(torch.device("cpu")) == ""


class Group:
    """A group whose abort lets a transfer's kernels end, as NCCL's does."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()


class Transfer:
    """One that the device passes when it ``ends``; the other end never comes otherwise."""

    def __init__(self, ends: threading.Event) -> None:
        self.ends = ends
        self.asked = threading.Event()
        self.waited = False

    def is_completed(self) -> bool:
        self.asked.set()
        return self.ends.is_set()

    def wait(self) -> bool:
        self.waited = True
        return True


def nccl(group: Group, deadline: float) -> Carrier:
    device: Any = torch.device("cpu")
    streams, some_group = CpuStreams(), group
    return Carrier(some_group, "nccl", device, streams, deadline, sends=True)  # type: ignore[arg-type]


def test_a_transfer_whose_other_end_is_gone_is_given_up() -> None:
    """From another thread, at once; the group is aborted, so that the device is freed."""
    group, never = Group(), threading.Event()
    carrier, transfer = nccl(group, 60.0), Transfer(never)

    def give_up() -> None:
        assert transfer.asked.wait(20.0)
        carrier.abort()

    other = threading.Thread(target=give_up)
    other.start()
    with pytest.raises(ConnectionError, match="given up"):
        carrier._finish(transfer)  # type: ignore[arg-type]
    other.join()
    assert group.aborted.wait(20.0)
    assert not transfer.waited


def test_what_an_abort_ended_is_not_taken_for_a_hidden_state() -> None:
    """Aborted kernels end without an error and leave whatever was in memory."""
    group = Group()
    carrier = nccl(group, 60.0)
    carrier.abort()
    assert group.aborted.wait(20.0)
    with pytest.raises(ConnectionError, match="given up"):
        carrier._finish(Transfer(group.aborted))  # type: ignore[arg-type]


def test_a_transfer_takes_no_longer_than_the_deadline() -> None:
    """A peer that stands still says nothing at all."""
    with pytest.raises(TimeoutError, match=r"not transferred in 0\.05 s"):
        nccl(Group(), 0.05)._finish(Transfer(threading.Event()))  # type: ignore[arg-type]


def test_a_transfer_that_ends_is_waited_for_by_torch() -> None:
    """Which raises what NCCL has found, and has the stream wait."""
    ended = threading.Event()
    ended.set()
    transfer = Transfer(ended)
    nccl(Group(), 60.0)._finish(transfer)  # type: ignore[arg-type]
    assert transfer.waited
