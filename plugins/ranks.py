"""Which ranks there are, and which device is this one's: alike for every engine over several.

Either the program has initialised torch.distributed, or it is joined here, as torchrun's variables
or the caller's arguments say. Over gloo: an engine that wants NCCL beside it makes a group of that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch
from torch import distributed

from cacheflow.errors import ConfigError, PeerError
from cacheflow.plugins.transformers.device import pick_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = [
    "Joined",
    "abort_group",
    "check_alike",
    "everyones",
    "group_of",
    "join_ranks",
    "leave_ranks",
    "rank_device",
    "refuse_fast",
    "whole_group",
]

_MEETING: Final = "env://"
_PLACE: Final = ("MASTER_ADDR", "MASTER_PORT")
_BLOCKING_WAIT: Final = "TORCH_NCCL_BLOCKING_WAIT"


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank among ``count``. ``owned``: the process group was made here."""

    rank: int
    count: int
    owned: bool


def join_ranks(rank: int | None, ranks: int | None, init_method: str, deadline: float) -> Joined:
    """Meet all other ranks, if the program has not done so. Blocking.

    ``rank`` of ``ranks``: default to what torch.distributed knows, else to what torchrun sets.
    ``deadline``: seconds to wait for the others.

    Raises:
        ConfigError: nothing says which ranks there are, or things that contradict each other do.
        PeerError: not all of them came.
    """
    known = distributed.is_initialized()
    mine = _number("RANK", rank, known and distributed.get_rank)
    count = _number("WORLD_SIZE", ranks, known and distributed.get_world_size)
    if not 0 <= mine < count:
        raise ConfigError(f"there is no rank {mine} of {count}: they are counted from 0")
    if not known:
        _meet(mine, count, init_method, deadline)
    return Joined(mine, count, owned=not known)


def leave_ranks(joined: Joined, groups: Sequence[distributed.ProcessGroup] = ()) -> None:
    """Leave torch.distributed as it was found: without ``groups``, which were made over it, and
    without anything if the ranks were joined here. Call it once."""
    if not distributed.is_initialized():
        return  # the program has ended it meanwhile
    if joined.owned:
        distributed.destroy_process_group()
        return
    for group in groups:
        distributed.destroy_process_group(group)


def whole_group(deadline: float, backend: str = "gloo") -> distributed.ProcessGroup:
    """All ranks in a group of their own, as :func:`group_of`."""
    group = group_of(None, deadline, backend)
    assert group is not None, "all ranks are in it"
    return group


def group_of(
    ranks: Sequence[int] | None, deadline: float, backend: str
) -> distributed.ProcessGroup | None:
    """Some ranks (None: all) in a group of their own, whatever the program uses; None on those
    that are not among them. All ranks call it, in the same order. Blocking.

    torch does not watch over it if it is over NCCL: it would end the process when a rank is gone or
    late. Whoever waits for what it does has to, and calls :func:`abort_group`.

    Raises:
        PeerError: not all of them came.
    """
    members, timeout = None if ranks is None else list(ranks), timedelta(seconds=deadline)
    try:
        with _unwatched():
            group = distributed.new_group(members, backend=backend, timeout=timeout)
    except RuntimeError as error:
        raise _absent(error, deadline) from error
    return group if isinstance(group, distributed.ProcessGroup) else None


def abort_group(group: distributed.ProcessGroup) -> threading.Thread:
    """End what is on its way in a group over NCCL, on this side, so that the device is free; gloo
    ends by itself. Returns at once: the thread that is at it may be waited for."""

    def abort() -> None:
        with contextlib.suppress(RuntimeError):  # it has been already
            group.abort()

    thread = threading.Thread(target=abort, name="cacheflow-abort", daemon=True)
    thread.start()
    return thread


def everyones(group: distributed.ProcessGroup, mine: bytes, deadline: float) -> list[bytes]:
    """What every rank gave, by rank; all give as much. Over gloo, blocking.

    Raises:
        PeerError: another rank is gone.
    """
    given = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    said = [torch.empty_like(given) for _ in range(distributed.get_world_size(group))]
    try:
        distributed.all_gather(said, given, group=group)
    except RuntimeError as error:
        raise _absent(error, deadline) from error
    return [each.numpy().tobytes() for each in said]


def check_alike(
    group: distributed.ProcessGroup, identity: Mapping[str, str | int], deadline: float
) -> None:
    """Compare the ``identity`` of this rank's model with all others'. Blocking.

    Raises:
        ConfigError: they have not loaded the same one; says which ranks have.
        PeerError: another rank is gone.
    """
    text = json.dumps(identity, sort_keys=True).encode()
    mine = hashlib.sha256(text).digest()
    said = everyones(group, mine, deadline)
    others = [rank for rank, theirs in enumerate(said) if theirs != mine]
    if others:
        raise ConfigError(
            f"this rank's model is not that of ranks {', '.join(map(str, others))}: give all ranks "
            "the same files, dtype and chunk_tokens"
        )


def rank_device(name: str) -> torch.device:
    """As :func:`pick_device`; ``auto`` is the CUDA device of ``LOCAL_RANK`` where there are any."""
    if name == "auto" and torch.cuda.is_available():
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return pick_device(name)


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """torch starts no watchdog for groups that are made inside: it reads this when it makes one."""
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_BLOCKING_WAIT]
        else:
            os.environ[_BLOCKING_WAIT] = before


def _number(name: str, given: int | None, known: Callable[[], int] | bool) -> int:
    if callable(known):
        if given not in (None, known()):
            raise ConfigError(f"{name} {given} was given, and torch.distributed says {known()}")
        return known()
    if given is not None:
        return given
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise ConfigError(
            f"{name} is {value!r}: start every rank with torchrun, say which one it is "
            "(rank=, ranks=, init_method=), or call torch.distributed.init_process_group before"
        )
    return int(value)


def _meet(rank: int, count: int, init_method: str, deadline: float) -> None:
    missing = [name for name in _PLACE if name not in os.environ]
    if init_method == _MEETING and missing:
        raise ConfigError(
            f"{missing[0]} is not set, so the ranks cannot find each other: start every rank with "
            "torchrun, or give init_method="
        )
    try:
        distributed.init_process_group(
            "gloo",
            init_method=init_method,
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=deadline),
        )
    except ValueError as error:
        raise ConfigError(f"init_method={init_method!r}: {error}") from error
    except RuntimeError as error:  # all of torch.distributed's are
        if "rendezvous handler" in str(error):
            raise ConfigError(f"init_method={init_method!r}: {error}") from error
        raise _absent(error, deadline) from error


def _absent(error: RuntimeError, deadline: float) -> PeerError:
    first = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return PeerError(
        f"another rank is gone, or did not come within {deadline:g} s, while they were gathering: "
        f"start all ranks again (torch says: {first})"
    )


def refuse_fast(fast: bool, kind: str) -> None:
    """Raise ConfigError if fast mode is asked for: ranks would have to agree on every pass."""
    if fast:
        raise ConfigError(f"fast=True: a {kind} engine has exact mode only; open it without")
