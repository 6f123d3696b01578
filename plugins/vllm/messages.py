"""Orders and reports in the envelopes in which vLLM carries them between its processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cacheflow.plugins.vllm.records import Orders, Report

__all__ = ["StepOrders", "StepReport"]


class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """Orders on their way to the workers."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders


class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Reports on their way back: tensor-parallel rank -> its own."""

    def __init__(self, reports: Mapping[int, Report]) -> None:
        self.reports = dict(reports)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """vLLM puts a step's reports together; what they come to is the scheduler's business,
        which remembers who has said what."""
        assert isinstance(other, StepReport)
        return StepReport({**self.reports, **other.reports})
