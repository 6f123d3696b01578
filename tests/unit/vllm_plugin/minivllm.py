"""A vLLM in miniature: a scheduler loop with paged blocks around the plugin's desk and depot.

It repeats the order in which vLLM calls connector and scheduler, and keeps a KV cache whose right
content is known for every position and head, so that a block copied to the wrong place, too late,
or over compute's is noticed. With several ranks each has a worker and heads of its own, and they
compute a layer together: what one reads too early spoils it for all.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from cacheflow.clock import SystemClock
from cacheflow.costs import ComputeModel
from cacheflow.distributed import cut_layout
from cacheflow.plugins.vllm.blocks import BlockMemory
from cacheflow.plugins.vllm.depot import Depot
from cacheflow.plugins.vllm.desk import Desk
from cacheflow.plugins.vllm.keyring import Keyring
from cacheflow.plugins.vllm.pins import Pins
from cacheflow.plugins.vllm.restores import Limits
from cacheflow.plugins.vllm.saver import Provenance
from cacheflow.plugins.vllm.saves import SaveBook
from cacheflow.plugins.vllm.settings import OUTSIDE_SHARE
from cacheflow.types import NO_ID, KVLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from cacheflow.plugins.vllm.records import Orders
    from cacheflow.plugins.vllm.settings import VllmSettings
    from cacheflow.types import Shard

BLOCK = 16
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", chunk_tokens=BLOCK)
WIDE = KVLayout(num_layers=2, num_kv_heads=2, head_dim=32, dtype="float32", chunk_tokens=BLOCK)
"""For several ranks: a head of a block fills a page."""


@dataclass(eq=False)
class MiniRequest:
    """The fields of vLLM's Request that the plugin reads."""

    request_id: str
    all_token_ids: list[int]
    priority: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    cache_salt: str | None = None
    prompt_embeds: object | None = None
    pooling_params: object | None = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    prefill_stats: Any = None
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    computed: int = 0
    """Tokens that were really computed, not restored."""

    @cached_property
    def sums(self) -> list[int]:
        return list(accumulate(self.all_token_ids))

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass(eq=False)
class MiniBlock:
    block_id: int
    ref_cnt: int = 0


class MiniPool:
    """Reference-counted blocks; number 0 is vLLM's null block."""

    def __init__(self, size: int) -> None:
        self.blocks = [MiniBlock(i) for i in range(size)]
        self.num_gpu_blocks = size
        self.free = list(range(1, size))

    def take(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        taken = [self.free.pop(0) for _ in range(count)]
        for block_id in taken:
            self.blocks[block_id].ref_cnt = 1
        return taken

    def touch(self, blocks: Sequence[MiniBlock]) -> None:
        for block in blocks:
            if not block.ref_cnt:
                self.free.remove(block.block_id)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[MiniBlock]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if not block.ref_cnt:
                self.free.append(block.block_id)


@dataclass(frozen=True)
class Part:
    """What one step computes of a request."""

    request: MiniRequest
    start: int
    stop: int
    table: tuple[int, ...]
    preemptions: int
    """Of the request when the step was scheduled: what is computed for it later is stale."""
    wrong: list[int] = field(default_factory=list)
    """Layers that read what compute would not have put there."""


@dataclass(eq=False)
class MiniVllm:
    """``step_seconds``: what a step with tokens takes; ``depth``: steps that are scheduled before
    the first of them is carried out (vLLM's async scheduling has two); ``by_layer``: the runner
    asks for each layer before it reads it; ``ranks``: tensor-parallel workers."""

    settings: VllmSettings
    pool_blocks: int = 200
    budget: int = 128
    step_seconds: float = 0.0
    depth: int = 1
    by_layer: bool = True
    layout: KVLayout = LAYOUT
    ranks: int = 1
    waiting: list[MiniRequest] = field(default_factory=list)
    running: list[MiniRequest] = field(default_factory=list)
    done: list[MiniRequest] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    broken: int = 0
    """Requests taken back because of what they had read."""

    def __post_init__(self) -> None:
        self.pool = MiniPool(self.pool_blocks)
        self.tables: dict[str, list[int]] = {}
        self.under_way: deque[tuple[Orders, list[Part]]] = deque()
        (self.shards,) = cut_layout(self.layout, ranks=self.ranks)
        self.caches = [self._caches(shard) for shard in self.shards]
        self.depots = [self._depot(rank) for rank in range(self.ranks)]
        self.depot = self.depots[0]
        block_bytes = self.shards[0].layout.payload_bytes()
        staged = int(self.settings.staging_bytes * OUTSIDE_SHARE) // block_bytes
        layers = self.layout.num_layers
        self.desk = Desk(
            settings=self.settings,
            limits=Limits(BLOCK, self.budget, staged, layers, self.ranks, shares=False),
            keyring=Keyring({"model": "mini"}, b"", BLOCK),
            book=SaveBook(BLOCK),
            costs=ComputeModel(1e6, 1.0),
            clock=SystemClock(),
            pins=Pins(self.pool),
            cache=self,
        )
        self.desk.let_race(races=True, overlaps=self.depth == 1)

    def _caches(self, shard: Shard) -> list[torch.Tensor]:
        """Packed as vLLM's kernels do: a layer's block by heads, K and then V of each."""
        shape = (self.pool_blocks, len(shard.heads), 2 * BLOCK, self.layout.head_dim)
        return [torch.zeros(shape) for _ in shard.layers]

    def _depot(self, rank: int) -> Depot:
        shard = self.shards[rank]
        memory = BlockMemory(self.caches[rank], shard.layout)
        return Depot(self.settings, memory, shard, Provenance("mini", "mini", NO_ID))

    # -- KVCacheManager ------------------------------------------------------------------------

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return (self.tables[request_id],)

    def get_computed_blocks(self, request: MiniRequest) -> tuple[list[int], int, int]:
        """There is no local prefix cache here."""
        return [], 0, 0

    def allocate_slots(
        self, request: MiniRequest, num_new_tokens: int, *, delay_cache_blocks: bool = False
    ) -> object | None:
        table = self.tables.setdefault(request.request_id, [])
        needed = -(-(request.num_computed_tokens + num_new_tokens) // BLOCK) - len(table)
        taken = self.pool.take(max(needed, 0))
        if taken is None:
            return None
        table += taken
        return taken

    def cache_blocks(self, request: MiniRequest, num_computed_tokens: int) -> None:
        """As above."""

    # -- the loop ------------------------------------------------------------------------------

    def add(self, name: str, tokens: list[int], policy: str = "adaptive") -> MiniRequest:
        request = MiniRequest(name, tokens, kv_transfer_params={"cacheflow_policy": policy})
        self.waiting.append(request)
        self.desk.arrived(request)
        return request

    def run(self, seconds: float = 20.0) -> None:
        """Until there is nothing left to do, pins included."""
        end = time.monotonic() + seconds
        while self.waiting or self.running or self.desk.pending or self.under_way:
            assert time.monotonic() < end, "the engine hangs"
            self.step()

    def settle(self, seconds: float = 20.0) -> None:
        """Until everything that was saved is stored."""
        end = time.monotonic() + seconds
        while self.desk.book._under_way:  # until the scheduler has heard how they ended
            assert time.monotonic() < end, "stores hang"
            self.step()

    def step(self) -> dict[str, int]:
        self.desk.jump(lambda name: any(r.request_id == name for r in self.running))
        scheduled: dict[str, int] = {}
        for request in list(self.running):
            if request in self.running:
                self._schedule_running(request, scheduled)
        for request in list(self.waiting):
            if sum(scheduled.values()) < self.budget and not self.preempted:
                self._admit(request, scheduled)
        requests = {r.request_id: r for r in self.running}
        orders = self.desk.orders(scheduled, requests, tuple(self.preempted))
        self.preempted.clear()
        parts = []
        for request in self.running:
            if tokens := scheduled.get(request.request_id, 0):
                start = request.num_computed_tokens
                table = tuple(self.tables[request.request_id])
                times = request.num_preemptions
                parts.append(Part(request, start, start + tokens, table, times))
                request.num_computed_tokens += tokens
        self.under_way.append((orders, parts))
        while len(self.under_way) >= (self.depth if scheduled else 1):
            self._carry_out(*self.under_way.popleft())
        return scheduled

    def _carry_out(self, orders: Orders, parts: list[Part]) -> None:
        for depot in self.depots:
            depot.carry_out(orders)
        if parts:
            self._forward(parts)
        invalid: set[int] = set()
        for depot in self.depots:
            depot.save(orders)
            invalid |= depot.overlaps.take_invalid()
        said = {rank: depot.report() for rank, depot in enumerate(self.depots)}
        reports = {rank: report for rank, report in said.items() if report}
        if invalid:
            self.desk.stale(invalid)
        for part in parts:
            request = part.request
            if part.preemptions != request.num_preemptions or request not in self.running:
                continue
            bad = [i for i, block_id in enumerate(part.table) if block_id in invalid]
            if bad:  # what vLLM does, and the mixin
                self.broken += 1
                request.num_computed_tokens = min(request.num_computed_tokens, bad[0] * BLOCK)
                continue
            assert not part.wrong, f"{request.request_id} read layers {part.wrong} too early"
            if part.stop == request.num_tokens:
                self.finish(request)
        if reports:
            self.desk.heard(reports)

    def finish(self, request: MiniRequest) -> None:
        """It ends, or is aborted."""
        if request in self.running:
            self.check(request)
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.desk.finished(request.request_id)
        self._free(request)
        self.done.append(request)

    def preempt(self, request: MiniRequest) -> None:
        self.running.remove(request)
        self.preempted.append(request.request_id)
        self._free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)

    def _free(self, request: MiniRequest) -> None:
        table = self.tables.pop(request.request_id, [])
        self.pool.free_blocks([self.pool.blocks[i] for i in reversed(table)])

    def _schedule_running(self, request: MiniRequest, scheduled: dict[str, int]) -> None:
        room = self.budget - sum(scheduled.values())
        new = min(request.num_tokens - request.num_computed_tokens, room)
        new = self.desk.cap(request, request.num_computed_tokens, new) if new else 0
        while new and request in self.running:
            if self.allocate_slots(request, new) is not None:
                scheduled[request.request_id] = new
                return
            scheduled.pop(self.running[-1].request_id, None)
            self.preempt(self.running[-1])

    def _admit(self, request: MiniRequest, scheduled: dict[str, int]) -> None:
        external = self.desk.matched(request, 0)
        if external is None:
            return
        new = min(request.num_tokens - external, self.budget - sum(scheduled.values()))
        new = self.desk.cap(request, external, new)
        if not new or self.allocate_slots(request, external + new) is None:
            return
        self.desk.allocated(request, external)
        self.waiting.remove(request)
        self.running.append(request)
        request.num_computed_tokens = external
        scheduled[request.request_id] = new

    # -- the model -----------------------------------------------------------------------------

    def _forward(self, parts: list[Part]) -> None:
        for layer in range(self.layout.num_layers):
            if self.by_layer:
                for depot in self.depots:
                    depot.overlaps.wait(layer)
            for part in parts:
                self._compute(part, layer)
            if self.step_seconds:
                time.sleep(self.step_seconds / self.layout.num_layers)
        for part in parts:
            part.request.computed += part.stop - part.start

    def _compute(self, part: Part, layer: int) -> None:
        """Into the blocks that the request had when the step was scheduled; rubbish, if what comes
        before is not as it should be."""
        request, table = part.request, part.table
        for head, cache in self._heads(layer):
            before = [value(request, layer, head, position) for position in range(part.start)]
            read = cache[list(table), :BLOCK, 0].flatten()[: part.start]
            if before != read.tolist() and layer not in part.wrong:
                part.wrong.append(layer)
        for head, cache in self._heads(layer):
            for position in range(part.start, part.stop):
                right = -1.0 if part.wrong else value(request, layer, head, position)
                for row in _rows(cache, table, position):
                    row.fill_(right)

    def check(self, request: MiniRequest) -> None:
        """Every position that counts as computed holds what compute would have put there, or a step
        that is still to be carried out puts it there."""
        parts = [p for _, parts in self.under_way for p in parts if p.request is request]
        first = min((part.start for part in parts), default=request.num_computed_tokens)
        aims = (ids for orders, _ in self.under_way for _, ids in orders.targets.values())
        still_to_be_placed, table = set().union(*aims), self.tables[request.request_id]
        for position in range(first):
            if table[position // BLOCK] in still_to_be_placed:
                continue
            for layer in range(self.layout.num_layers):
                for head, cache in self._heads(layer):
                    right = value(request, layer, head, position)
                    for row in _rows(cache, table, position):
                        assert bool((row == right).all()), position

    def _heads(self, layer: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Number and ``[blocks, 2 * tokens, dim]`` of each head that some rank holds."""
        for shard, caches in zip(self.shards, self.caches, strict=True):
            for index, head in enumerate(shard.heads):
                yield head, caches[layer][:, index]


def _rows(cache: torch.Tensor, table: Sequence[int], position: int) -> tuple[torch.Tensor, ...]:
    """K and V of a token."""
    block, at = cache[table[position // BLOCK]], position % BLOCK
    return block[at], block[BLOCK + at]


def value(request: MiniRequest, layer: int, head: int, position: int) -> float:
    """What the "model" computes: it depends on all tokens up to the position."""
    return float((request.sums[position] * 31 + layer * 7 + head * 3 + position) % 65521)
