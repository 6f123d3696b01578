"""A block that is not stored, or is stored no longer, is stored when it is there again."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.plugins.vllm.settings import VllmSettings
from cacheflow.testing import steered
from tests.unit.vllm_plugin.minivllm import LAYOUT, MiniVllm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.unit.vllm_plugin.minivllm import MiniRequest

TOKENS = random.Random(4).choices(range(1000), k=400)
WHOLE = 384
"""Tokens of a request's blocks that can be loaded: one token has to be computed."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., MiniVllm]]:
    """Miniature engines over the given tiers, closed and proved to have leaked nothing."""
    steered.install(tmp_path / "site")
    made: list[MiniVllm] = []

    def start(*tiers: tuple[str, dict[str, object]]) -> MiniVllm:
        listed = [
            {"name": f"{backend}{number}", "backend": backend, "options": options}
            for number, (backend, options) in enumerate(tiers)
        ]
        settings = {"tiers": listed, "staging_bytes": 4 << 20, "lookup_patience": 5.0}
        made.append(MiniVllm(VllmSettings.parse(settings)))
        return made[-1]

    yield start
    for mini in made:
        mini.depot.close()
        assert len(mini.pool.free) == mini.pool_blocks - 1, "blocks leaked"


def ask(mini: MiniVllm, policy: str = "load") -> MiniRequest:
    """Answer the prompt, and let its blocks be stored."""
    request = mini.add(f"request-{len(mini.done)}", TOKENS, policy)
    mini.run()
    mini.settle()
    return request


def told(mini: MiniVllm, counter: str) -> dict[str, float]:
    """Sums of the worker's counter since they were last taken, by its labels."""
    name = f"vllm:cacheflow_{counter}\t"
    sums = mini.depot.counts.take()
    return {key.removeprefix(name): n for key, n in sums.items() if key.startswith(name)}


def loaded(mini: MiniVllm, seconds: float = 20.0) -> bool:
    """Whether the prompt can be had whole, if it is asked for often enough: a tier that was set
    aside as sick comes back within a second or so."""
    end = time.monotonic() + seconds
    while ask(mini).computed != len(TOKENS) - WHOLE:
        if time.monotonic() > end:
            return False
    return True


def stored_in_time(mini: MiniVllm, seconds: float = 20.0) -> bool:
    """Whether every block is stored by requests that look nothing up: then only how the stores
    ended says that they have to be tried again."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ask(mini, "recompute")
        if not any("store" in counter for counter in mini.depot.counts.take()):
            return True  # nothing was stored any more, nor dropped
    return False


@pytest.mark.parametrize("status", ["failed", "full"])
def test_what_no_tier_took_is_stored_when_it_is_computed_again(
    start: Callable[..., MiniVllm], tmp_path: Path, status: str
) -> None:
    """Each block that a tier does not take is counted, and stored by a later request."""
    control = tmp_path / "control.json"
    mini = start(("steered", {"control": str(control)}))
    steered.steer(control, stores=status)
    assert ask(mini).computed == 400
    assert sum(told(mini, "store_dropped").values()) == 25
    steered.steer(control)
    assert stored_in_time(mini)
    assert ask(mini).computed == 400 - WHOLE


def test_what_was_refused_while_loads_failed_is_stored_later(
    start: Callable[..., MiniVllm], tmp_path: Path
) -> None:
    """A tier that is set aside for its reads takes no stores either: they are made up for."""
    control = tmp_path / "control.json"
    mini = start(("steered", {"control": str(control)}))
    ask(mini)
    steered.steer(control, fail_after=0, fault="error")
    for _ in range(4):
        ask(mini)
    steered.steer(control, clear=1)
    assert loaded(mini)


def test_a_full_tier_is_not_asked_again_for_what_another_has(
    start: Callable[..., MiniVllm], tmp_path: Path
) -> None:
    """Where one tier took a block and the other has no room for it, that is as good as it gets."""
    control = tmp_path / "control.json"
    disk = ("nvme", {"path": str(tmp_path / "store")})
    mini = start(disk, ("steered", {"control": str(control)}))
    steered.steer(control, stores="full")
    ask(mini)
    assert sum(told(mini, "store_dropped").values()) == 25
    assert ask(mini, "recompute").computed == 400
    assert not told(mini, "store_dropped")


def test_what_was_evicted_is_stored_again(start: Callable[..., MiniVllm], tmp_path: Path) -> None:
    """Blocks this engine has stored once, and that are gone, are stored by the next request."""
    control = tmp_path / "control.json"
    mini = start(("steered", {"control": str(control)}))
    assert ask(mini).computed == 400
    steered.steer(control, clear=1)
    assert ask(mini).computed == 400
    assert ask(mini).computed == 400 - WHOLE


def test_a_corrupt_block_is_replaced(start: Callable[..., MiniVllm], tmp_path: Path) -> None:
    """Bytes that are not what was stored are computed once, and the object is written anew."""
    folder = tmp_path / "store"
    mini = start(("nvme", {"path": str(folder)}))
    ask(mini)
    files = [path for path in (folder / "objects").rglob("*") if path.is_file()]
    assert len(files) == 25
    for path in files:
        data = bytearray(path.read_bytes())
        data[-LAYOUT.layer_stride() // 2] ^= 1
        path.write_bytes(data)
    assert ask(mini).computed > 16
    assert loaded(mini)


def test_memory_is_lent(start: Callable[..., MiniVllm]) -> None:
    """Blocks of a tier in the worker's own memory go from there into vLLM's cache: loads take no
    staging memory, whether they come before the request enters or while it runs."""
    mini = start(("dram", {"capacity_bytes": 64 << 20}))
    ask(mini)
    pool = mini.depot._loader._means.pool
    leased: list[str] = []
    lease = pool.try_lease

    def noted(nbytes: int, owner: str) -> Any:
        leased.append(owner)
        return lease(nbytes, owner)

    pool.try_lease = noted  # type: ignore[method-assign,assignment]
    assert ask(mini).computed == 400 - WHOLE
    ask(mini, "adaptive")
    assert not leased


def test_lent_memory_is_given_back(start: Callable[..., MiniVllm]) -> None:
    """Requests that end while blocks are lent to them leave the tier able to give everything up."""
    mini = start(("dram", {"capacity_bytes": 64 << 20}))
    ask(mini)
    for steps in range(1, 6):
        request = mini.add(f"gone-{steps}", TOKENS, "load")
        for _ in range(steps):
            mini.step()
        if request not in mini.done:
            mini.finish(request)
    mini.run()
    tier = mini.depot._loader._means.tiers["dram0"]

    async def empty() -> int:
        await tier.delete([info.key async for info in tier.scan()])
        return await tier.used_bytes()

    assert asyncio.run_coroutine_threadsafe(empty(), mini.depot._loop).result(10) == 0
