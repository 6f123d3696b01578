"""vLLM's KV connector over CacheFlow: the two halves, and the doors vLLM knows them by.

In the engine core it holds the ``Desk``, in the worker the ``Depot``; each method passes on to one
of them. Where the model or the set-up is of a kind that cannot be restored exactly, one line says
so and every request passes through untouched.
"""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from cacheflow.clock import SystemClock
from cacheflow.costs import COSTS_FILE, ComputeModel, CostStore, compute_key
from cacheflow.errors import ConfigError
from cacheflow.kv import model_id
from cacheflow.plugins.vllm.blocks import BlockMemory
from cacheflow.plugins.vllm.compat import check, installed_version
from cacheflow.plugins.vllm.depot import Depot
from cacheflow.plugins.vllm.desk import Desk
from cacheflow.plugins.vllm.keyring import Keyring
from cacheflow.plugins.vllm.metrics import CacheFlowPromMetrics, CacheFlowStats
from cacheflow.plugins.vllm.model import Model, describe
from cacheflow.plugins.vllm.pins import Pins
from cacheflow.plugins.vllm.records import Orders, Report
from cacheflow.plugins.vllm.restores import Limits
from cacheflow.plugins.vllm.saver import Provenance
from cacheflow.plugins.vllm.saves import SaveBook
from cacheflow.plugins.vllm.settings import OUTSIDE_SHARE, VllmSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CacheFlowConnector", "StepOrders", "StepReport"]

_THIS_VLLM: Final = f"vllm={installed_version()};threads={os.cpu_count()}"
"""Under which compute costs are kept, beside the model's identity."""
_log = logging.getLogger("vllm.cacheflow")  # vLLM shows what is logged below its own name


class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """Orders on their way to the worker."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders


class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """A report on its way back."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """There is one worker: more are refused at the start."""
        raise NotImplementedError("CacheFlow runs with one worker")


class CacheFlowConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """``--kv-transfer-config`` with ``kv_connector`` "CacheFlowConnector" and
    ``kv_connector_module_path`` "cacheflow.plugins.vllm.connector".

    Raises:
        ConfigError: this vLLM is not supported, or a setting cannot be used.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check()
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = VllmSettings.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self.desk: Desk | None = None
        self.depot: Depot | None = None
        self._requests: dict[str, Any] = {}
        self._layers: dict[str, int] = {}
        """A layer's name -> its number."""
        self._model = self._describe(vllm_config, kv_cache_config)

    def _describe(self, vllm_config: Any, kv_cache_config: Any) -> Model | None:
        try:
            if not self.settings.tiers:
                raise ConfigError("no tiers are set (setting tiers)")
            return describe(vllm_config, kv_cache_config)
        except ConfigError as error:
            if self.role is KVConnectorRole.SCHEDULER:
                _log.warning("CacheFlow lets every request pass through: %s", error)
            return None

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later, nothing else."""
        return False

    # -- the scheduler's side ------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._model is None:
            return
        layout, settings, config = self._model.layout, self.settings, self._vllm_config
        staged = int(settings.staging_bytes * OUTSIDE_SHARE) // layout.payload_bytes()
        self.desk = Desk(
            settings=settings,
            limits=Limits(
                block=layout.chunk_tokens,
                budget=config.scheduler_config.max_num_batched_tokens,
                staged_blocks=staged,
                layers=layout.num_layers,
                shares=bool(config.cache_config.enable_prefix_caching),
            ),
            keyring=Keyring(self._model.identity, settings.salt_bytes, layout.chunk_tokens),
            book=SaveBook(layout.chunk_tokens),
            costs=self._learned(self._model),
            clock=SystemClock(),
            pins=Pins(kv_cache_manager.block_pool),
            cache=kv_cache_manager,
        )

    def _learned(self, model: Model) -> ComputeModel:
        """Compute costs, as far as earlier processes left them."""
        costs = ComputeModel(*model.flops)
        if self.settings.keep_costs:
            store = CostStore(self.settings.cache_dir / COSTS_FILE)
            if (profile := store.compute(compute_key(model.identity, _THIS_VLLM))) is not None:
                costs.prime(profile)
        return costs

    def _keep(self, desk: Desk, model: Model) -> None:
        profile = desk.costs.profile()
        if self.settings.keep_costs and profile is not None:
            key = compute_key(model.identity, _THIS_VLLM)
            CostStore(self.settings.cache_dir / COSTS_FILE).save({key: profile}, {})

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.desk is None:
            return 0, False
        return self.desk.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self.desk is not None:
            self.desk.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self.desk is None:
            return StepOrders(Orders())
        return StepOrders(
            self.desk.orders(
                scheduler_output.num_scheduled_tokens,
                self._requests,
                tuple(scheduler_output.preempted_req_ids or ()),
            )
        )

    def update_connector_output(self, connector_output: Any) -> None:
        news = connector_output.kv_connector_worker_meta
        if self.desk is not None and isinstance(news, StepReport):
            self.desk.heard(news.report)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        if self.desk is not None:
            self.desk.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        """Steps go on until the worker has said that every pinned block is free."""
        return self.desk is not None and self.desk.pending

    def reset_cache(self) -> bool:
        """Nothing stored so far is used again by this engine: its weights may have changed."""
        if self.desk is not None:
            self.desk.reset()
        return True

    # -- the worker's side ---------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        if self._model is None:
            return
        layout = self._model.layout
        names = sorted(kv_caches, key=_layer_number)
        self._layers = {name: number for number, name in enumerate(names)}
        caches = [kv_caches[name] for name in names]
        if len(caches) != layout.num_layers:
            raise ConfigError(f"{len(caches)} KV caches for {layout.num_layers} layers")
        isa = _get_attn_isa(
            caches[0].dtype,
            layout.chunk_tokens,
            layout.head_dim,
            self._vllm_config.cache_config.cache_dtype,
        )
        shape = "x".join(map(str, caches[0].shape[1:]))
        self.depot = Depot(
            self.settings,
            BlockMemory(caches, layout),
            Provenance(
                layout_id=f"vllm-cpu/{isa}/{shape}",
                grid_id=f"vllm={installed_version()};isa={isa};threads={torch.get_num_threads()}",
                model_id=model_id(self._model.identity),
            ),
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Before a forward pass: claims hold and staged prefixes are in place on return."""
        super().bind_connector_metadata(connector_metadata)
        if self.depot is not None and isinstance(connector_metadata, StepOrders):
            self.depot.carry_out(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads were started when the metadata came; they need no forward context."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Before a layer's attention: what the step reads of it is in place on return, or named in
        :meth:`get_block_ids_with_load_errors`."""
        # A layer that is not known has no cache of its own: it reads that of one before it.
        if self.depot is not None and (layer := self._layers.get(layer_name)) is not None:
            self.depot.overlaps.wait(layer)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that the step has read and that were not there: vLLM drops what it said for the
        requests that have them."""
        return self.depot.overlaps.take_invalid() if self.depot is not None else set()

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Whole blocks are saved, after the step that completes them."""

    def wait_for_save(self) -> None:
        """After a forward pass: its complete blocks may be copied. Waits for nothing."""
        metadata = self._connector_metadata
        if self.depot is not None and isinstance(metadata, StepOrders):
            self.depot.save(metadata.orders)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self.depot is None:
            return None
        report = self.depot.report()
        return StepReport(report) if report else None

    # -- metrics -------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> CacheFlowStats | None:
        """Called in both processes; each tells what it has counted."""
        source = self.desk or self.depot
        sums = source.counts.take() if source is not None else {}
        return CacheFlowStats(data=sums) if sums else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CacheFlowStats:
        return CacheFlowStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> CacheFlowPromMetrics:
        return CacheFlowPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self.desk is not None and self._model is not None:
            self._keep(self.desk, self._model)
        if self.depot is not None:
            self.depot.close()


def _layer_number(name: str) -> int:
    found = re.search(r"\.(\d+)\.", name)
    if found is None:
        raise ConfigError(f"KV cache {name!r} has no layer number in its name")
    return int(found[1])
