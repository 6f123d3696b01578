"""Which ranks there are, and which device is this one's: alike for every engine over several.

Either the program has initialised torch.distributed, or it is joined here, as torchrun's variables
or the caller's arguments say. Over gloo: an engine that wants NCCL beside it makes a group of that.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch
from torch import distributed

from cacheflow.errors import ConfigError, PeerError
from cacheflow.plugins.transformers.device import pick_device

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "Joined",
    "check_alike",
    "gloo_group",
    "join_ranks",
    "leave_ranks",
    "rank_device",
    "refuse_fast",
]

_MEETING: Final = "env://"
_PLACE: Final = ("MASTER_ADDR", "MASTER_PORT")


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


def gloo_group(deadline: float) -> distributed.ProcessGroup:
    """All ranks in a group of their own over gloo, whatever the program uses. Blocking.

    Raises:
        PeerError: not all of them came.
    """
    try:
        group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=deadline))
    except RuntimeError as error:
        raise _absent(error, deadline) from error
    assert isinstance(group, distributed.ProcessGroup), "all ranks are in it"
    return group


def check_alike(
    group: distributed.ProcessGroup, identity: Mapping[str, str | int], deadline: float
) -> None:
    """Compare the ``identity`` of this rank's model with all others'. Blocking.

    Raises:
        ConfigError: they have not loaded the same one; says which ranks have.
        PeerError: another rank is gone.
    """
    text = json.dumps(identity, sort_keys=True).encode()
    mine = torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.uint8)
    said = [torch.empty_like(mine) for _ in range(distributed.get_world_size(group))]
    try:
        distributed.all_gather(said, mine, group=group)
    except RuntimeError as error:
        raise _absent(error, deadline) from error
    others = [rank for rank, theirs in enumerate(said) if not torch.equal(theirs, mine)]
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
