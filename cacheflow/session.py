"""The public facade: an engine, its tiers and a restorer, and sessions that generate with them.

::

    async with CacheFlow.open(settings, engine=engine) as flow:
        session = flow.session("agent-7")
        async for token in session.generate(prompt):
            ...
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from cacheflow.clock import SystemClock
from cacheflow.costs import (
    COSTS_FILE,
    ComputeModel,
    CostChecks,
    CostStore,
    KeptCosts,
    channel_key,
    compute_key,
)
from cacheflow.errors import ConfigError
from cacheflow.kv import (
    ChunkAuth,
    Stamp,
    chunk_keys,
    extend_keys,
    key_root,
    model_id,
    tenant_id,
)
from cacheflow.memory import StagingPool
from cacheflow.restore import Restoration, Restorer, RestoreRequest
from cacheflow.restore.answered import first_token
from cacheflow.restore.saver import STAGING_OWNER, Saver
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.settings import Settings
from cacheflow.tiers.opening import open_tiers
from cacheflow.tiers.planned import PlannedWrites
from cacheflow.tiers.promotion import promotions
from cacheflow.tiers.staged import STAGED_CHANNEL, StagedCopies
from cacheflow.tiers.value import CostValue
from cacheflow.tiers.write_policies import WriteAll
from cacheflow.types import Codec, Span

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence

    from cacheflow.abc import Engine, StorageBackend
    from cacheflow.clock import Clock
    from cacheflow.restore.saver import Saved
    from cacheflow.settings import TierSettings
    from cacheflow.tiers.write_policies import WritePolicy
    from cacheflow.types import ChunkKey, Event, Observer

__all__ = ["TOKENS_IN_ONE_GO", "CacheFlow", "Generation", "Session"]

TOKENS_IN_ONE_GO: Final = 4096
"""Prompt tokens whose keys are made before the event loop goes on: about 0.3 ms."""
_KEEP_SECONDS: Final = 60.0
"""Between two saves of what was learned about costs."""
_CLOSE_SECONDS: Final = 2.0
"""Closing waits this long for the last one."""
_FORGET_SECONDS: Final = 1.0
"""Forgetting waits this long for room to copy what is still to be stored."""


@dataclass(slots=True)
class Generation:
    """What a :meth:`Session.generate` did, filled in as it goes."""

    restoration: Restoration | None = None
    ttft_seconds: float | None = None
    """From arrival to the first token."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was resident or stored somewhere."""
    saved: dict[str, Saved] | None = None
    """By tier; counted on behind the request until nothing is ``pending``: see
    :meth:`CacheFlow.flush`."""


class CacheFlow:
    """Owns the backends, the staging pool and the restorer of one engine. Use :meth:`open`."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        backends: Mapping[str, StorageBackend],
        restorer: Restorer,
        saver: Saver,
        clock: Clock,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.backends = backends
        self.restorer = restorer
        self.clock = clock
        self._saver = saver
        self._sessions: WeakValueDictionary[str, Session] = WeakValueDictionary()
        """Known as long as anybody, or :attr:`_resident`, has them."""
        self._resident: set[Session] = set()
        """Sessions with KV in memory."""
        self._turns = count(1)
        self._root = key_root(engine.identity, settings.salt_bytes)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: Settings | None = None,
        *,
        engine: Engine,
        backends: Mapping[str, StorageBackend] | None = None,
        observer: Observer | None = None,
        compute: ComputeModel | None = None,
    ) -> AsyncIterator[CacheFlow]:
        """Open the tiers of ``settings`` (or take ``backends``, which stay the caller's).

        ``compute``: what is known of this engine's speed already, and learned on from here; then
        the caller keeps what is learned, and none of it comes from or goes to the cache directory.

        Raises:
            ConfigError: a setting, a tier or the model cannot be used; says which and why.
            IntegrityError: a tier's folder holds something else.
        """
        settings = settings or Settings()
        clock = SystemClock()
        async with AsyncExitStack() as stack:
            tiers = settings.tiers if backends is None else ()
            costs = compute or ComputeModel(*engine.layer_flops)
            value = CostValue(costs, engine.layout, engine.grid)
            stamp = _stamp(settings, engine)
            if backends is None:
                backends = await open_tiers(
                    settings, stack, value, stamp, clock, observer or _ignore
                )
            channels: dict[str, StorageBackend] = dict(backends)
            staged = StagedCopies(backends)
            if STAGED_CHANNEL in channels:
                raise ConfigError(f"setting tiers: the name {STAGED_CHANNEL!r} is taken")
            if backends:
                channels[STAGED_CHANNEL] = staged
            decoded = any(tier.codec is not Codec.RAW for tier in tiers)
            pool = _staging(
                settings.staging_bytes, channels, engine, len(backends), decoded=decoded
            )
            stack.push_async_callback(pool.aclose)
            stack.push_async_callback(staged.aclose)
            scheduler = BatchScheduler(
                costs,
                clock,
                objective=settings.objective,
                max_load_bytes=settings.staging_bytes // (8 * (len(channels) + 1)),
                claim_ahead=engine.claim_ahead,
                max_requests=settings.max_restores,
                max_tokens=settings.max_restore_tokens,
            )
            value.loads_over(scheduler.channel(name) for name in backends)
            if compute is None and settings.keep_costs:
                kept = _kept_costs(settings, tiers, engine, costs, scheduler)
                await stack.enter_async_context(_keeping(kept))
            if observer is not None:
                observer = CostChecks(observer, costs, backends, scheduler.channel)
            restorer = Restorer(
                engine,
                scheduler,
                channels,
                pool,
                clock=clock,
                load_deadline=settings.load_deadline,
                observer=observer,
                stamp=stamp,
                allow_lossy=settings.allow_lossy,
            )
            await stack.enter_async_context(restorer)
            saver = Saver(
                engine,
                backends,
                pool,
                clock,
                restorer.emit,
                staged,
                deadline=settings.load_deadline,
                max_bytes=settings.staging_bytes // (len(channels) + 1),
                policy=_write_policy(settings, engine, costs, scheduler, backends),
                stamp=stamp,
            )
            await stack.enter_async_context(saver)
            flow = cls(settings, engine, backends, restorer, saver, clock)
            stack.push_async_callback(flow.forget)
            stack.push_async_callback(flow.flush, settings.flush_seconds)
            yield flow

    def session(self, session_id: str) -> Session:
        """The session called ``session_id``, new or known.

        It stays known while its KV is in memory, or while you hold it.
        """
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = Session(self, session_id)
        return session

    def keys(self, tokens: Sequence[int]) -> tuple[ChunkKey, ...]:
        """Keys of the whole chunks of ``tokens`` under this model and salt, all in one go: 128k
        tokens take some 7 ms."""
        return chunk_keys(self._root, tokens, self.engine.layout.chunk_tokens)

    async def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was generated so far is stored, at most ``timeout`` seconds.

        Returns whether it is (or was dropped, and counted); what is not goes on being stored.
        Leaving CacheFlow does this for ``flush_seconds`` and drops the rest.
        """
        return await self._saver.flush(timeout)

    async def forget(self) -> None:
        """Drop the KV of every session from memory, as :meth:`Session.forget` does."""
        sessions = list(self._resident)
        try:
            open_ = [session._request for session in sessions if session._request]
            await self._saver.release(open_, _FORGET_SECONDS)
        finally:
            for session in sessions:
                await session._close()

    async def _keys_in_pieces(
        self, tokens: Sequence[int], known: Sequence[ChunkKey]
    ) -> tuple[ChunkKey, ...]:
        """:meth:`keys` without blocking the loop. ``known``: those of the leading chunks."""
        keys, size = list(known), self.engine.layout.chunk_tokens
        while True:
            if extend_keys(keys, self._root, tokens, size, limit=TOKENS_IN_ONE_GO):
                return tuple(keys)
            await asyncio.sleep(0)


class Session:
    """One conversation. Its KV stays in memory between turns until :meth:`forget`."""

    def __init__(self, flow: CacheFlow, session_id: str) -> None:
        self.id = session_id
        self._flow = flow
        self._request: str | None = None
        self._tokens: list[int] = []
        """Tokens whose KV the engine holds."""
        self._keys: Sequence[ChunkKey] = ()
        """Keys of leading chunks of these tokens: the next turn goes on from them."""
        self._busy = asyncio.Lock()

    @property
    def resident_tokens(self) -> int:
        """Tokens of this session whose KV is in memory."""
        return len(self._tokens)

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int = 128,
        stop_tokens: Collection[int] = (),
        policy: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        save: bool = True,
        report: Generation | None = None,
    ) -> AsyncIterator[int]:
        """Greedy tokens after ``prompt`` (the whole history), as they are made.

        What is resident is used, what is stored is restored, the rest is computed; afterwards the
        whole chunks of the history are stored behind the request (``save``), where they are found
        at once. Abandoning the iterator keeps the session usable: it forgets its resident KV.

        ``policy``: instead of the setting's. ``priority``: higher goes before others, whatever the
        objective. ``deadline``: seconds from now in which the first token is wanted (objective
        ``deadline`` serves the earliest first).

        Raises:
            ConfigError: the prompt is empty, too long for the model, or holds an impossible token.
            CapacityError: the engine has no KV memory left.
        """
        report = report if report is not None else Generation()
        arrival = self._flow.clock.now()
        self._check(prompt, max_new_tokens)
        prompt = prompt[:]  # as it is now: the caller may go on with it while we wait
        async with self._busy:
            known = self._keys if self._is_extended_by(prompt) else ()
            keys = await self._flow._keys_in_pieces(prompt, known)
            try:
                request_id, resident = await self._open(prompt)
                request = RestoreRequest(
                    request_id,
                    prompt,
                    keys,
                    arrival,
                    resident,
                    priority,
                    None if deadline is None else arrival + deadline,
                )
                await self._restore(request, policy, report)
                token = await self._flow.engine.first_token(request_id)
                self._answered(request, report)
                self._promote(request, report)
                for made in range(1, max_new_tokens + 1):
                    yield token
                    if token in stop_tokens or made == max_new_tokens:
                        break
                    self._tokens.append(token)
                    token = (await self._flow.engine.decode([request_id], [token]))[0]
                if save:
                    report.saved = await self._save(request_id)
            except BaseException:
                # Half a turn is in the KV cache: what the engine holds is no longer known.
                await self._close()
                raise

    async def forget(self) -> None:
        """Drop the KV from memory; what is stored, or waits to be, stays.

        What is to be stored and finds no room to wait within a second is dropped, and counted:
        ``flush`` before, if all of it matters.
        """
        await self._close(_FORGET_SECONDS)

    async def _close(self, patience: float = 0.0) -> None:
        request_id, self._request = self._request, None
        self._tokens, self._keys = [], ()
        self._flow._resident.discard(self)
        if request_id is None:
            return
        self._flow.restorer.withdraw(request_id)
        try:
            await self._flow._saver.release([request_id], patience)
        finally:
            await self._flow.engine.close(request_id)

    def _answered(self, request: RestoreRequest, report: Generation) -> None:
        now = self._flow.clock.now()
        report.ttft_seconds = now - request.arrival
        assert report.restoration is not None, "a restored request has a report"
        layout = self._flow.engine.layout
        self._flow.restorer.emit(first_token(request, report.restoration, layout, now))

    def _check(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        if not len(prompt):
            raise ConfigError("the prompt is empty: give at least one token")
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        longest = self._flow.engine.max_tokens
        if len(prompt) + max_new_tokens - 1 > longest:
            raise ConfigError(
                f"prompt of {len(prompt)} tokens and max_new_tokens {max_new_tokens} do not fit "
                f"the model's context of {longest} tokens: shorten one of them"
            )

    async def _open(self, prompt: Sequence[int]) -> tuple[str, int]:
        """Continue the resident request if the prompt extends it, else open a new one."""
        if self._request and self._is_extended_by(prompt):
            held = len(self._tokens)
            await self._flow.engine.extend(self._request, prompt[held:])
            return self._request, held
        await self._close()
        self._request = f"{self.id}/{next(self._flow._turns)}"
        self._flow._resident.add(self)
        await self._flow.engine.open(self._request, prompt)
        return self._request, 0

    def _is_extended_by(self, prompt: Sequence[int]) -> bool:
        held = len(self._tokens)
        return 0 < held < len(prompt) and list(prompt[:held]) == self._tokens

    async def _restore(
        self, request: RestoreRequest, policy: str | None, report: Generation
    ) -> None:
        chosen = load_policy(policy or self._flow.settings.policy)
        restoration = await self._flow.restorer.run(request, chosen)
        if restoration.prefix_tokens:
            span = Span(0, restoration.prefix_tokens)
            self._flow.engine.set_segments(request.id, span, restoration.segments)
        self._tokens, self._keys = list(request.tokens), request.keys
        self._flow.restorer.offer(request.id, request.keys, self._flow.engine.segments(request.id))
        report.restoration = restoration
        report.cached_tokens = request.resident or restoration.stored_tokens

    def _promote(self, request: RestoreRequest, report: Generation) -> None:
        """What slow tiers delivered is copied to the faster ones, behind the request."""
        assert report.restoration is not None
        wanted = promotions(tuple(self._flow.backends), report.restoration.loaded_chunks)
        if wanted:
            self._flow._saver.promote(request.id, request.keys, wanted)

    async def _save(self, request_id: str) -> dict[str, Saved]:
        tokens = self._tokens
        keys = await self._flow._keys_in_pieces(tokens, self._keys)
        if self._tokens is tokens:  # not forgotten meanwhile
            self._keys = keys
        saved = self._flow._saver.save(request_id, keys)
        await asyncio.sleep(0)  # what comes next does not share a turn of the loop with the keys
        return saved


def _write_policy(
    settings: Settings,
    engine: Engine,
    costs: ComputeModel,
    scheduler: BatchScheduler,
    tiers: Collection[str],
) -> WritePolicy:
    if settings.write_policy == "all":
        return WriteAll()
    channels = [scheduler.channel(name) for name in tiers]
    return PlannedWrites(costs, channels, engine.layout, engine.grid)


def _stamp(settings: Settings, engine: Engine) -> Stamp:
    auth = ChunkAuth(settings.auth_bytes) if settings.auth_bytes else None
    return Stamp(model_id(engine.identity), tenant_id(settings.salt_bytes), auth)


def _staging(
    nbytes: int, channels: Collection[str], engine: Engine, tiers: int, *, decoded: bool
) -> StagingPool:
    """The staging pool in equal shares: one a channel, so that a hung tier cannot starve the rest,
    and one for what is being stored.

    Raises:
        ConfigError: a share has no room for one layer of the widest tile, or for one whole chunk.
    """
    layout, grid = engine.layout, engine.grid
    widest = max((*grid.head, grid.tail)) // layout.chunk_tokens
    # Encoded layers lie beside what they stand for, and are no larger than that.
    layers = widest * layout.layer_stride() * (2 if decoded else 1)
    needed = max(layout.payload_bytes(), layers)
    shares = len(channels) + 1
    share = nbytes // shares
    if share < needed:
        raise ConfigError(
            f"setting staging_bytes: {nbytes} bytes are too few for this model and "
            f"{tiers} tiers; give at least {needed * shares}"
        )
    pool = StagingPool(nbytes)
    for owner in (*channels, STAGING_OWNER):
        pool.set_cap(owner, share)
    return pool


def _kept_costs(
    settings: Settings,
    tiers: Sequence[TierSettings],
    engine: Engine,
    costs: ComputeModel,
    scheduler: BatchScheduler,
) -> KeptCosts:
    """Under keys that say what decides the costs; nothing is known of a caller's own backends."""
    return KeptCosts(
        CostStore(settings.cache_dir / COSTS_FILE),
        costs,
        compute_key(engine.identity, engine.grid_id),
        {tier.name: channel_key(tier.name, tier.backend, _channel_options(tier)) for tier in tiers},
        scheduler.channel,
    )


def _channel_options(tier: TierSettings) -> dict[str, object]:
    """What decides the speed of a tier: decoding is part of it."""
    return tier.options if tier.codec is Codec.RAW else {**tier.options, "tier codec": tier.codec}


@asynccontextmanager
async def _keeping(kept: KeptCosts) -> AsyncIterator[None]:
    """Begin with the costs learned once; keep what is learned, now and then and at the end."""
    kept.prime(*await asyncio.to_thread(kept.read))
    keeping = asyncio.create_task(_keep(kept))
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
        if save := kept.to_save():
            last = asyncio.ensure_future(asyncio.to_thread(save))
            await asyncio.wait([last], timeout=_CLOSE_SECONDS)


async def _keep(kept: KeptCosts) -> None:
    """Save what was learned, once a minute at most; until cancelled."""
    while True:
        await asyncio.sleep(_KEEP_SECONDS)
        if save := kept.to_save():
            await asyncio.to_thread(save)


def _ignore(event: Event) -> None:
    """An observer where there is none."""
