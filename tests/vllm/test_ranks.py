"""Two tensor-parallel workers say what plain vLLM says, and share a store with one by itself."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.prompts import BLOCK, EDGES, FORKS, LONG, OTHER, OTHER_TAILED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.vllm.serving import Serving

Expected = dict[tuple[int, ...], list[int]]
WHOLE = len(OTHER) // BLOCK * BLOCK


def over(folder: Path) -> dict[str, Any]:
    """Engines with this keep what they store in one folder."""
    options = {"control": str(folder / "control.json"), "path": str(folder / "ranks")}
    return {"tier": {"options": options}}


@pytest.fixture(scope="module")
def alone(model: Path, folder: Path, expected: Expected) -> Iterator[Serving]:
    """One worker, which has stored a prompt before the two of the others start."""
    from tests.vllm.serving import Serving

    with Serving.serve(model, folder, **over(folder)) as alone:
        assert alone.generate([LONG]) == [expected[tuple(LONG)]]
        assert alone.stored(LONG)
        yield alone


@pytest.fixture(scope="module")
def serving(model: Path, folder: Path, alone: Serving) -> Iterator[Serving]:
    """Two workers."""
    from tests.vllm.serving import Serving

    with Serving.serve(model, folder, tensor_parallel_size=2, **over(folder)) as serving:
        yield serving


@pytest.fixture(scope="module", autouse=True)
def _stored(serving: Serving, expected: Expected) -> None:
    """The two have stored a prompt that they shared nothing of with the one before."""
    assert serving.generate([OTHER]) == [expected[tuple(OTHER)]]
    assert serving.found == [0]
    assert serving.stored(OTHER)


def test_reports_of_all_workers_arrive() -> None:
    """As vLLM puts their outputs together; one that has nothing to say is not waited for."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    from cacheflow.plugins.vllm.messages import StepReport
    from cacheflow.plugins.vllm.records import Report

    def output(rank: int, *ended: int, invalid: int = 0) -> ModelRunnerOutput:
        said = StepReport({rank: Report(ended=[*ended])}) if ended else None
        told = KVConnectorOutput(kv_connector_worker_meta=said, invalid_block_ids={invalid})
        return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=told)

    aggregator = KVOutputAggregator(3)
    both = aggregator.aggregate([output(0, 1), output(1, invalid=4), output(2, 1, 3, invalid=5)])
    assert both.kv_connector_output.invalid_block_ids == {0, 4, 5}
    reports = both.kv_connector_output.kv_connector_worker_meta.reports
    assert {rank: report.ended for rank, report in reports.items()} == {0: [1], 2: [1, 3]}


def test_what_one_worker_stored_is_restored_by_two(serving: Serving, expected: Expected) -> None:
    """It was stored before they started: each reads its heads out of whole blocks."""
    assert serving.generate([LONG], "load") == [expected[tuple(LONG)]]
    assert serving.found == [len(LONG) // BLOCK * BLOCK]


@pytest.mark.parametrize("policy", ["recompute", "load", "adaptive"])
@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_same_tokens_at_any_speed(
    serving: Serving, expected: Expected, policy: str, seconds: float
) -> None:
    """Also where one worker's store is slower than the other's."""
    for head in (0, 1):
        serving.steer(seconds=seconds, head=head)
        assert serving.generate([OTHER], policy) == [expected[tuple(OTHER)]]
        if policy == "load":
            assert serving.found == [WHOLE]


@pytest.mark.parametrize("fault", ["error", "corrupt", "hang"])
@pytest.mark.parametrize("after", [0, 5])
def test_a_load_that_fails_on_one_worker_is_computed_by_both(
    serving: Serving, expected: Expected, fault: str, after: int
) -> None:
    """The other's loads may all have come."""
    for head in (0, 1):
        serving.steer(seconds=0.004, head=head, fail_after=after, fault=fault)
        assert serving.generate([OTHER]) == [expected[tuple(OTHER)]]


def test_a_load_that_fails_on_one_worker_under_a_pass(serving: Serving, expected: Expected) -> None:
    """The pass is over what is not there on one of the two: both take it back."""
    counter = "vllm:cacheflow_overlaps"
    before = serving.metric(counter, result="failed")
    numbers = count()

    def asked() -> None:
        number = next(numbers)
        serving.steer(
            seconds=0.01,
            head=number % 2,
            stores="full",  # or the tail would be stored, and little left to compute behind it
            parts=1,  # which come last, and go on under the pass
            fail_after=(4 + 7 * number) % 28,
            fail_count=1,
            fault="error",
            number=number,
        )
        prompts = [OTHER_TAILED, EDGES[2]]
        answers = serving.generate(prompts, "load")
        assert answers == [expected[tuple(prompt)] for prompt in prompts]

    assert serving.comes(lambda: serving.metric(counter, result="failed") > before, asked)


def test_aborted_while_it_is_restored(serving: Serving, expected: Expected) -> None:
    """An abort in any state of a restore frees everything on both; the others go on."""
    serving.steer(seconds=0.02, head=1)
    for policy in ("load", "adaptive"):
        for steps in (1, 3, 10):
            dropped, kept = serving.submit(OTHER, policy), serving.submit(EDGES[2], policy)
            done = serving.work(until=iter([False] * steps + [True]).__next__)
            serving.abort(dropped)
            done |= serving.work()
            assert done[kept] == expected[tuple(EDGES[2])]


def test_batches_on_a_small_pool(serving: Serving, expected: Expected) -> None:
    """Some are preempted, some of what they share is stored whole, some by halves."""
    for batch, fault in enumerate(("none", "error")):
        after = 7 if fault == "error" else -1
        serving.steer(seconds=0.002, head=batch, fail_after=after, fault=fault)
        prompts = [*FORKS[8 * batch : 8 * batch + 8], OTHER]
        assert serving.generate(prompts) == [expected[tuple(prompt)] for prompt in prompts]


def test_what_two_workers_stored_is_restored_by_one(
    serving: Serving, alone: Serving, expected: Expected
) -> None:
    """Which puts the halves of each block together."""
    serving.steer()
    assert alone.generate([OTHER], "load") == [expected[tuple(OTHER)]]
    assert alone.found == [WHOLE]
