"""Storage that fails, lies, hangs or has no room: requests of a miniature vLLM end right anyway."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cacheflow.plugins.vllm.settings import VllmSettings
from cacheflow.testing import steered
from cacheflow.types import ObjectKey, Span
from tests.unit.vllm_plugin.minivllm import LAYOUT, MiniVllm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKENS = random.Random(2).choices(range(1000), k=400)


class Steered:
    """A miniature vLLM over a store that the test steers."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.control = folder / "control.json"
        steered.install(folder / "site")
        tier = {
            "name": "store",
            "backend": "steered",
            "options": {"control": str(self.control)},
        }
        usual = {"staging_bytes": 4 << 20, "lookup_patience": 2.0}  # for busy machines
        parsed = VllmSettings.parse({"tiers": [tier], **usual, **settings})
        self.mini = MiniVllm(parsed)
        self.mini.add("first", TOKENS)
        self.mini.run()
        self.mini.settle()

    def close(self) -> None:
        self.mini.depot.close()
        assert len(self.mini.pool.free) == self.mini.pool_blocks - 1, "blocks leaked"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Steered]:
    rig = Steered(tmp_path)
    yield rig
    rig.close()


@pytest.mark.parametrize("fault", ["error", "corrupt"])
@pytest.mark.parametrize("after", [0, 7])
@pytest.mark.parametrize("policy", ["load", "adaptive"])
def test_a_failed_load_is_computed(rig: Steered, fault: str, after: int, policy: str) -> None:
    """What failed, and what lies below it, is computed; what had arrived is used."""
    steered.steer(rig.control, fail_after=after, fault=fault)
    request = rig.mini.add("second", TOKENS, policy)
    rig.mini.run()
    assert request.computed >= 400 - 16 * (after + 2)
    assert request in rig.mini.done


def test_a_hung_store_holds_nobody_up(rig: Steered) -> None:
    """Loads that never end are overtaken by compute, and closing does not wait for them."""
    steered.steer(rig.control, fail_after=3, fault="hang")
    request = rig.mini.add("second", TOKENS)
    rig.mini.run(10.0)
    assert request in rig.mini.done


def test_a_store_that_does_not_answer_is_not_waited_for(rig: Steered) -> None:
    """After `lookup_patience` the request is computed as if nothing were stored."""
    steered.steer(rig.control, lookup=30.0)
    request = rig.mini.add("second", TOKENS)
    rig.mini.run(10.0)
    assert request.computed == 400


def test_more_than_staging_holds(tmp_path: Path) -> None:
    """Prefixes larger than the staging memory, several at once, are restored all the same."""
    rig = Steered(tmp_path, staging_bytes=1 << 20)  # 128 blocks, 89 of them before entering
    requests = [rig.mini.add(f"r{n}", TOKENS, "load") for n in range(8)]
    rig.mini.run()
    assert sum(request.computed for request in requests) <= 8 * 40
    rig.close()


def test_nothing_is_found_after_a_reset(rig: Steered) -> None:
    """New weights: what was stored before is not loaded."""
    rig.mini.desk.reset()
    request = rig.mini.add("second", TOKENS, "load")
    rig.mini.run()
    assert request.computed == 400


def test_holes_are_fine(rig: Steered) -> None:
    """Where blocks in the middle are gone, the longest run that is left is loaded."""
    request = rig.mini.add("key", TOKENS, "recompute")
    keys = rig.mini.desk.keyring.keys(request) or ()
    rig.mini.run()
    whole = Span(0, LAYOUT.num_layers), Span(0, LAYOUT.num_kv_heads)
    depot = rig.mini.depot
    deleting = depot._loader._means.tiers["store"].delete(
        [ObjectKey(key, *whole) for key in keys[4:6]]
    )
    asyncio.run_coroutine_threadsafe(deleting, depot._loop).result(5)
    second = rig.mini.add("second", TOKENS, "load")
    rig.mini.run()
    assert second.computed == 6 * 16 + 16


def test_requests_go_on_when_storage_dies(rig: Steered) -> None:
    """With the storage thread gone every request is computed, and no block stays pinned."""
    steered.steer(rig.control, seconds=0.01)
    requests = [
        rig.mini.add(f"r{n}", TOKENS, policy) for n, policy in enumerate(("load", "adaptive"))
    ]
    for _ in range(4):
        rig.mini.step()
    rig.mini.depot._loop.call_soon_threadsafe(rig.mini.depot._loop.stop)
    rig.mini.depot._thread.join(5)
    rig.mini.run(10.0)
    assert all(request in rig.mini.done for request in requests)


def test_loads_that_never_began_leave_the_channel_free(rig: Steered) -> None:
    """A restore that ends between the decision to load and the load's first step takes neither
    memory nor a place on the channel with it: the next one is loaded."""
    loader = rig.mini.depot._loader
    means = loader._means

    def close_all() -> None:
        for restore in list(loader.restores):
            loader.close(restore)

    loader._means = replace(means, changed=close_all)
    doomed = rig.mini.add("doomed", TOKENS, "load")
    rig.mini.run(10.0)
    assert doomed.computed == 400
    loader._means = means
    last = rig.mini.add("last", TOKENS, "load")
    rig.mini.run(10.0)
    assert last.computed == 16
