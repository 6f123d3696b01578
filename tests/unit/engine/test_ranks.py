"""How engines over several ranks find out which ranks there are, and which device is theirs."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cacheflow.errors import ConfigError, PeerError
from cacheflow.plugins.pipeline import PipelineEngine
from cacheflow.plugins.ranks import group_of, join_ranks, rank_device
from cacheflow.plugins.tensor_parallel import TensorParallelEngine
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.testing.processes import run_ranks
from cacheflow.testing.tiny_model import save_tiny_llama
from tests.cancelling import Held, cancelled_during

if TYPE_CHECKING:
    from pathlib import Path

    from cacheflow.testing.processes import Seat

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


def test_engines_are_opened_alike() -> None:
    """What opens one process opens a rank; ranks of either kind are named in the same way."""
    one, stage, shard = (
        dict(inspect.signature(kind.open_model).parameters)
        for kind in (TransformersEngine, PipelineEngine, TensorParallelEngine)
    )
    assert stage == shard
    assert list(stage)[: len(one)] == list(one)
    assert all(stage[name] == one[name] for name in one)
    assert list(stage)[len(one) :] == ["rank", "ranks", "init_method", "deadline"]


def test_what_is_not_said_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun and arguments the error names the variable and the way out; a rank that
    cannot be is one too."""
    with pytest.raises(ConfigError, match=r"RANK is '': start every rank with torchrun"):
        join_ranks(None, None, "env://", 1.0)
    with pytest.raises(ConfigError, match="WORLD_SIZE is ''"):
        join_ranks(0, None, "env://", 1.0)
    with pytest.raises(ConfigError, match="there is no rank 2 of 2"):
        join_ranks(2, 2, "env://", 1.0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set"):
        join_ranks(None, None, "env://", 1.0)
    with pytest.raises(ConfigError, match="init_method='carrier pigeon'"):
        join_ranks(0, 2, "carrier pigeon", 1.0)


def alone(seat: Seat, file: str) -> str:
    try:
        join_ranks(0, 2, f"file://{file}", 0.5)
    except PeerError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_come_are_missed(tmp_path: Path) -> None:
    """After the deadline, with an error that says how long was waited."""
    (said,) = run_ranks(1, alone, str(tmp_path / "meeting"))
    assert "did not come within 0.5 s" in said


def twice(seat: Seat) -> list[Any]:
    from torch import distributed

    first = join_ranks(seat.rank, seat.count, seat.init_method, 30.0)
    again = join_ranks(None, None, "env://", 30.0)
    same = join_ranks(seat.rank, seat.count, "env://", 30.0)
    told = []
    for rank, count in ((1 - seat.rank, None), (None, 3)):
        try:
            join_ranks(rank, count, "env://", 30.0)
        except ConfigError as error:
            told.append(str(error))
    distributed.barrier()
    return [(each.rank, each.count, each.owned) for each in (first, again, same)] + told


def test_ranks_that_the_program_has_joined_are_taken() -> None:
    """Whatever arguments say has to agree with it; who has made the group leaves it."""
    for rank, found in enumerate(run_ranks(2, twice)):
        assert found[:3] == [[rank, 2, True], [rank, 2, False], [rank, 2, False]]
        other = 1 - rank
        assert found[3] == f"RANK {other} was given, and torch.distributed says {rank}"
        assert found[4] == "WORLD_SIZE 3 was given, and torch.distributed says 2"


async def open_and_close(seat: Seat, folder: str, kind: str, joins: bool) -> list[Any]:
    """Twice: what torch.distributed has after each; then whether the program's ranks still talk."""
    from datetime import timedelta

    from torch import distributed

    if joins:
        distributed.init_process_group(
            "gloo",
            init_method=seat.init_method,
            rank=seat.rank,
            world_size=seat.count,
            timeout=timedelta(seconds=30),
        )
    engines: dict[str, Any] = {"pipeline": PipelineEngine, "tensor": TensorParallelEngine}
    found: list[Any] = []
    for attempt in ("first", "second"):
        engine = await engines[kind].open_model(
            folder,
            device="cpu",
            dtype="float32",
            kv_bytes=1 << 26,
            rank=seat.rank,
            ranks=seat.count,
            init_method=f"{seat.init_method}-{attempt}",
            deadline=30.0,
        )
        await engine.aclose()
        await engine.aclose()
        found.append(
            [distributed.is_initialized(), len(distributed.distributed_c10d._world.pg_map)]
        )
    if joins:
        total = torch.tensor(seat.rank + 1)
        distributed.all_reduce(total)
        found.append(int(total))
    return found


@pytest.mark.parametrize("kind", ["pipeline", "tensor"])
@pytest.mark.parametrize("joins", [False, True], ids=["engine-joins", "program-joins"])
def test_engines_close_what_they_opened(folder: Path, kind: str, joins: bool) -> None:
    """A closed engine leaves no process group behind, so that the next one can be opened; one that
    the program had made goes on."""
    for found in run_ranks(2, open_and_close, str(folder), kind, joins):
        assert found == ([[True, 1], [True, 1], 3] if joins else [[False, 0], [False, 0]])


async def with_two_models(seat: Seat, folders: list[str], kind: str) -> list[Any]:
    """What opening each its own says, and what torch.distributed has then."""
    from torch import distributed

    engines: dict[str, Any] = {"pipeline": PipelineEngine, "tensor": TensorParallelEngine}
    try:
        await engines[kind].open_model(
            folders[seat.rank],
            device="cpu",
            dtype="float32",
            kv_bytes=1 << 26,
            rank=seat.rank,
            ranks=seat.count,
            init_method=seat.init_method,
            deadline=30.0,
        )
    except ConfigError as error:
        return [str(error), distributed.is_initialized()]
    return ["opened", distributed.is_initialized()]


@pytest.mark.parametrize("kind", ["pipeline", "tensor"])
def test_ranks_with_different_models_are_refused(folder: Path, tmp_path: Path, kind: str) -> None:
    """Of the same shape, as a revision is: all say so, before a request could be answered."""
    folders = [str(folder), str(save_tiny_llama(tmp_path / "other", seed=1))]
    for rank, (said, joined) in enumerate(run_ranks(2, with_two_models, folders, kind)):
        assert said.startswith(f"this rank's model is not that of ranks {1 - rank}: ")
        assert not joined


async def cancelled_opens(seat: Seat, folder: str, joins: bool) -> list[list[Any]]:
    """What torch.distributed has after engines were cancelled at each step of joining it."""
    from torch import distributed

    from cacheflow.plugins.pipeline import engine as pipeline
    from cacheflow.plugins.pipeline.meeting import Meeting
    from cacheflow.plugins.tensor_parallel import engine as tensor
    from cacheflow.plugins.tensor_parallel.group import Group

    if joins:
        distributed.init_process_group("gloo", init_method=seat.init_method, rank=0, world_size=1)
    steps: list[tuple[Any, Any, str]] = [
        (PipelineEngine, pipeline, "join_ranks"),
        (PipelineEngine, Meeting, "open"),
        (TensorParallelEngine, Group, "open"),
        (TensorParallelEngine, tensor, "_cut"),
    ]
    found: list[list[Any]] = []
    for engine, where, name in steps:
        before = getattr(where, name)
        held = Held(before)
        setattr(where, name, held)
        opening = engine.open_model(
            folder,
            device="cpu",
            dtype="float32",
            kv_bytes=1 << 26,
            rank=0,
            ranks=1,
            init_method=f"{seat.init_method}-{name}",
            deadline=30.0,
        )
        await cancelled_during(opening, held)
        setattr(where, name, before)
        groups = len(distributed.distributed_c10d._world.pg_map)
        found.append([distributed.is_initialized(), groups])
    return found


@pytest.mark.parametrize("joins", [False, True], ids=["engine-joins", "program-joins"])
def test_engines_whose_opening_is_cancelled_leave_no_group(folder: Path, joins: bool) -> None:
    """Wherever they were: the thread that joins, or makes a group, is not stopped by it."""
    (found,) = run_ranks(1, cancelled_opens, str(folder), joins)
    assert found == [[joins, int(joins)]] * 4


async def too_little_memory(seat: Seat, folder: str) -> list[Any]:
    """What torch.distributed has after engines were refused when the ranks had met."""
    from torch import distributed

    where: dict[str, Any] = {"rank": seat.rank, "world_size": seat.count}
    distributed.init_process_group("gloo", init_method=seat.init_method, **where)
    said = []
    for engine in (PipelineEngine, TensorParallelEngine):
        try:
            await engine.open_model(folder, device="cpu", dtype="float32", kv_bytes=1)
        except ConfigError as error:
            said.append(str(error))
    return [*said, len(distributed.distributed_c10d._world.pg_map)]


def test_engines_that_are_refused_late_leave_no_group(folder: Path) -> None:
    """Ranks that have met, and then have no room for a page, part again."""
    for *said, groups in run_ranks(2, too_little_memory, str(folder)):
        assert len(said) == 2
        assert all("kv_bytes 1 is less than the shortest prompt takes" in each for each in said)
        assert groups == 1


def test_each_rank_has_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with several, that of its place there; the CPU where there is none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank_device("auto") == torch.device("cuda:1")
    assert rank_device("cuda:0") == torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rank_device("auto") == torch.device("cpu")


@pytest.mark.parametrize("before", [None, "0"])
def test_groups_have_no_watchdog(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    """torch reads the variable when a group is made; what the program has set is put back, also if
    none could be made."""
    name, found = "TORCH_NCCL_BLOCKING_WAIT", []
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)

    def new_group(*_: object, **named: object) -> None:
        found.append((os.environ.get(name), named["backend"]))
        raise RuntimeError("nobody is there")

    monkeypatch.setattr("torch.distributed.new_group", new_group)
    with pytest.raises(PeerError, match="nobody is there"):
        group_of([0, 1], 1.0, "nccl")
    assert found == [("1", "nccl")]
    assert os.environ.get(name) == before
