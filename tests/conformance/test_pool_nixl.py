"""The pool backend fulfils the storage contract over NIXL, on a store in another process.

Over plain TCP, where the store takes part in every transfer, and over what UCX picks by itself,
which is shared memory on one machine.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import pytest

from cacheflow.storage_backends.nixl.agent import UcxAgent, why_missing
from cacheflow.testing.conformance import Pause
from cacheflow.testing.store_process import StoreProcess
from tests.conformance import test_pool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cacheflow.abc import StorageBackend

if (reason := why_missing()) is not None:
    pytest.skip(f"no NIXL here: {reason}", allow_module_level=True)


@pytest.fixture(scope="module", params=["tcp", "all"])
def stores(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, StoreProcess]]:
    """As over tcp, and with what UCX may use set in all processes."""
    log = tmp_path_factory.mktemp("stores") / "log"
    options: dict[str, Any] = {"transports": '["nixl"]'}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("UCX_TLS", request.param)
        with (
            StoreProcess(log, arena=test_pool.ARENA, **options) as store,
            StoreProcess(log, arena=test_pool.SMALL, **options) as small,
        ):
            yield {test_pool.ARENA: store, test_pool.SMALL: small}


class TestPoolOverNixl(test_pool.TestPool):
    """What holds up transfers holds up the reactor's thread, where it would begin one."""

    transport: ClassVar[str] = "nixl"
    model_share: ClassVar[float] = 0.1  # an agent of UCX takes a tenth of a second to make

    @contextmanager
    def paused(self, backend: StorageBackend) -> Iterator[Pause]:
        pause, begin = Pause(), UcxAgent.begin

        def waiting(*args: Any) -> object:
            pause.wait()
            return begin(*args)

        with mock.patch.object(UcxAgent, "begin", waiting):
            try:
                yield pause
            finally:
                pause.go.set()
