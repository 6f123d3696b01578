"""One request's frontier: which cells compute and loads may take next, and who may write them.

Compute walks cells forward (tile by tile, layer by layer), loads walk them backward, so wherever
they meet the recomputed set is a staircase and the meeting tile is split by layer. Holes (cells no
channel has) force their tile forward; loads then first fetch what the holes depend on.

What is left is kept as sums that change by differences, so that a question costs the same for 1,000
tokens and for 100,000. Every method expects the caller to hold the scheduler's gate: the compute
thread claims layers while the event loop claims and commits loads. Knows no engine, bytes or tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from cacheflow.scheduling.outlook import Work
from cacheflow.scheduling.planned import Planned
from cacheflow.scheduling.tiles import TileState, bits
from cacheflow.types import Claim, Span, TileWork

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cacheflow.scheduling.outlook import Outlook
    from cacheflow.scheduling.policies import Policy
    from cacheflow.types import Coverage, Load, RequestSpec

__all__ = ["Frontier", "Reach"]

_UNITS: Final = 128
"""A load should take about this fraction of what is left, so that the last ones end together."""
_LEAST_UNIT_SECONDS: Final = 0.004
"""Below this the cost of a load's own steps would show."""
_INFINITE: Final = float("inf")
_MOST: Final = 1 << 30
_PLANNED_SHARE: Final = 0.1
"""From this share of the time left on, what the suffix can hide decides the order of loads."""
_LEAST_HELD: Final = 4
"""Cells: fewer would win less than a load that lands late costs."""

_Counted: TypeAlias = tuple[int, dict[str, int], dict[str, int], int]
"""What of a tile is in the sums: free cells, loadable by channel and by one alone, shared."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Cells a channel could be asked for in one load."""

    tile: int
    layers: Span
    chunks: tuple[int, ...]
    nbytes: int


class Frontier:
    """Cells, claims and readiness of one request."""

    def __init__(
        self, spec: RequestSpec, policy: Policy, outlook: Outlook, *, pools: bool = False
    ) -> None:
        self.spec = spec
        self._pools = pools
        self.policy = policy
        self.cancelled = False
        self.begun = False
        """Whether optional recompute has started (or was found worth starting)."""
        self._left = False
        """Whether the request no longer counts among all."""
        self.leaves = False
        """Whether compute last left the rest of the prefix to loads."""
        self.computing = False
        """Whether the compute worker is at it."""
        self.is_first_to_compute = self.is_first_to_load = True
        """Whether no request is more urgent: nothing of others is waited for before this one."""
        self.turned_away: set[str] = set()
        """Channels that had nothing to load for it when last asked."""
        self.compute_turned_away = False
        """The same for compute."""
        self.todo = Work()
        """All that nobody has begun: free cells of the prefix, and the suffix."""
        self.free = Work()
        """Free cells of the prefix alone."""
        self.free_bytes: dict[str, int] = {}
        """Left to be asked of each channel; cells of several channels count in each."""
        work = outlook.compute.work
        self.tiles = [
            TileState(tile, spec.num_layers, spec.chunk_tokens, work(tile)) for tile in spec.tiles
        ]
        self._suffix_work = [work(piece) for piece in spec.suffix]
        self.suffix_low = [0] * len(spec.suffix)
        self._outlook = outlook
        self._by_layers = policy.by_layers(spec)
        self._whole_tiles = policy.whole_tiles(spec)
        self.heights: Sequence[int] | None = None
        """Planned layers of each tile to recompute, if the policy plans."""
        self._strides: dict[str, int] = {}
        self._only: dict[str, int] = {}
        self._shared = 0
        self._loads: dict[str, int] = {}
        """Loads in flight, by channel."""
        self._open = (1 << len(self.tiles)) - 1
        """Tiles that are not complete."""
        self._has_free = 0
        self._running = 0
        self._front = [0] * spec.num_layers
        """Per layer: how many leading tiles are ready."""
        self._counted: list[_Counted] = [(0, {}, {}, 0) for _ in self.tiles]
        for t in range(len(self.tiles)):
            self._recount(t)
        for work_of_piece in self._suffix_work:
            self._add_work(self.todo, spec.num_layers, work_of_piece)
            outlook.all_suffixes.add(spec.num_layers, work_of_piece)
        outlook.requests += 1

    # -- sums ----------------------------------------------------------------------------------

    def _refresh(self, t: int) -> None:
        self.tiles[t].refresh()
        self._recount(t)

    def _recount(self, t: int) -> None:
        """Bring the sums up to date with what the tile says now."""
        state = self.tiles[t]
        free, counts, only, shared = self._counted[t]
        now_free = state.free.bit_count()
        if now_free != free:
            self._add_work(self.todo, now_free - free, state.work)
            self.free.add(now_free - free, state.work)
        if state.counts != counts or state.only != only:
            for channel, stride in self._strides.items():
                delta = (state.counts.get(channel, 0) - counts.get(channel, 0)) * stride
                self.free_bytes[channel] += delta
                if not self._left:
                    self._outlook.all_bytes[channel] += delta
                if self.compute_turned_away:
                    self._outlook.bytes_ahead[channel] += delta
                alone = state.only.get(channel, 0) - only.get(channel, 0)
                self._only[channel] += alone * stride
        now_shared = state.union - sum(state.only.values())
        self._shared += now_shared - shared
        self._counted[t] = (now_free, state.counts, state.only, now_shared)
        bit = 1 << t
        self._has_free = self._has_free | bit if now_free else self._has_free & ~bit
        if state.complete:
            self._open &= ~bit

    def _add_work(self, total: Work, count: int, work: tuple[float, float]) -> None:
        total.add(count, work)
        if not self._left:
            self._outlook.all_work.add(count, work)
        for channel in self.turned_away:
            self._outlook.work_ahead[channel].add(count, work)

    def turn_compute_away(self, away: bool) -> None:
        """Compute found nothing to do here for now, so others are computed while this one loads."""
        if away != self.compute_turned_away:
            self.compute_turned_away = away
            for channel, nbytes in self.free_bytes.items():
                self._outlook.bytes_ahead[channel] += nbytes if away else -nbytes

    def turn_away(self, channel: str, away: bool) -> None:
        """``channel`` found nothing to load here for now: this one is computed first."""
        if away != (channel in self.turned_away):
            (self.turned_away.add if away else self.turned_away.discard)(channel)
            self._outlook.work_ahead[channel].add_all(self.todo, 1 if away else -1)

    def leave(self) -> None:
        """The request is over: nothing of it counts any more. Idempotent."""
        if self._left:
            return
        self._left = True
        outlook = self._outlook
        outlook.requests -= 1
        outlook.all_work.add_all(self.todo, -1)
        for i, work in enumerate(self._suffix_work):
            outlook.all_suffixes.add(self.suffix_low[i] - self.spec.num_layers, work)
        for channel, nbytes in self.free_bytes.items():
            outlook.all_bytes[channel] -= nbytes

    # -- what is known -------------------------------------------------------------------------

    def extend(self, coverage: Coverage) -> None:
        """A channel answered: it has these layers of these chunks."""
        channel = coverage.channel
        self._outlook.channel(channel)
        if channel not in self._strides:
            self.free_bytes[channel] = self._only[channel] = self._loads[channel] = 0
        self._strides[channel] = coverage.stride
        for t, state in enumerate(self.tiles):
            state.extend(channel, coverage.layers)
            self._refresh(t)

    def plan(self, compute_backlog: float, load_backlog: float) -> None:
        """Fix the staircase now, if the policy does that and all costs are known."""
        layer = [self._outlook.layer_seconds(state.work) for state in self.tiles]
        bandwidth = sum(self._outlook.channel(c).bandwidth or 0.0 for c in self._strides)
        if not bandwidth or None in layer:
            return
        stride = max(self._strides.values())
        chunk = self.spec.chunk_tokens
        self.heights = self.policy.plan(
            Planned(
                num_layers=self.spec.num_layers,
                layer_seconds=[seconds or 0.0 for seconds in layer],
                load_seconds=[t.width // chunk * stride / bandwidth for t in self.spec.tiles],
                compute_backlog=compute_backlog,
                load_backlog=load_backlog,
            )
        )

    def planned(self) -> tuple[float, float]:
        """Seconds of compute and of loads that the plan still asks for (all, without a plan)."""
        compute = load = 0.0
        for t, state in enumerate(self.tiles):
            free = state.free
            below = free if self.heights is None else free & ((1 << self.heights[t]) - 1)
            compute += below.bit_count() * (self._outlook.layer_seconds(state.work) or 0.0)
            width = state.tile.width // self.spec.chunk_tokens
            for channel, stride in self._strides.items():
                bandwidth = self._outlook.channel(channel).bandwidth
                if bandwidth:
                    load += (free & ~below).bit_count() * width * stride / bandwidth
        return compute, load

    def drop_channel(self, channel: str) -> None:
        """Stop counting on a channel: it is late or broken."""
        for t, state in enumerate(self.tiles):
            state.forget(channel)
            self._refresh(t)

    @property
    def channels(self) -> Sequence[str]:
        """Channels that have answered."""
        return tuple(self._strides)

    @property
    def restored(self) -> bool:
        """Every cell of the prefix is ready, none merely enqueued on the compute stream."""
        return not (self._open or self._running)

    @property
    def finished(self) -> bool:
        """Prefix restored and suffix computed."""
        last = self.spec.num_layers
        return self.restored and all(low == last for low in self.suffix_low)

    @property
    def layer_cost(self) -> float:
        """Seconds of one layer of what compute is at (0 while nothing is known)."""
        work = self._suffix_work[0]
        if self._running:
            work = self.tiles[self._running.bit_length() - 1].work
        return self._outlook.layer_seconds(work) or 0.0

    @property
    def position(self) -> int:
        """First token of the lowest tile that is not complete."""
        first = (self._open & -self._open).bit_length() - 1
        return self.tiles[first].tile.start if first >= 0 else self.spec.prefix_tokens

    @property
    def last_free(self) -> int:
        """First token of the highest tile with free cells (0 without one)."""
        return self.tiles[self._has_free.bit_length() - 1].tile.start if self._has_free else 0

    def remaining(self, now: float) -> float:
        """Seconds to the end of the suffix with all resources to itself (0 if nothing is known)."""
        outlook = self._outlook
        whole = outlook.seconds(self.todo)
        loads = self.loads_left(now, alone=True)
        if whole is None:
            return loads or 0.0
        suffix = self.suffix_seconds
        hidden = min(self._overlap(), suffix)
        both = outlook.meeting(self.free, loads, hidden) or 0.0
        return max(both, hidden) + suffix - hidden

    @property
    def suffix_seconds(self) -> float:
        """What is left of the suffix (0 while nothing is known)."""
        outlook = self._outlook
        return (outlook.seconds(self.todo) or 0.0) - (outlook.seconds(self.free) or 0.0)

    def _suffix_layer(self) -> float:
        """Seconds of a layer of the first suffix piece, if it may start under the last loads."""
        if not self.policy.overlaps:
            return 0.0
        return self._outlook.layer_seconds(self._suffix_work[0]) or 0.0

    def _overlap(self) -> float:
        """Seconds for which loads may go on at most after compute has turned to the suffix."""
        return (self.spec.num_layers - self.suffix_low[0] - 1) * self._suffix_layer()

    def _left_to_loads(self, left: float) -> float:
        """Seconds until the first suffix piece ends if all the rest, ``left`` seconds, is loaded.

        A layer only has to be there before the suffix reaches it, and loads then come in that
        order: ``max(arrival(layer) + suffix from that layer on)`` over the layers where the free
        cells of some tile end.
        """
        layer = self._suffix_layer()
        last = self.spec.num_layers
        ends = {self.tiles[t].free.bit_length() for t in self._free_tiles()}
        total = sum(self.free_bytes.values())
        flying = sum(self._outlook.channel(c).in_flight_bytes for c in self._strides)
        free_seconds = left * total / (total + flying) if total else 0.0
        latest = max((last - self.suffix_low[0]) * layer, left + layer)
        cells = self.free.linear or 1.0
        for end in ends:
            below = (1 << end) - 1
            share = sum(
                (self.tiles[t].free & below).bit_count() * self.tiles[t].work[0]
                for t in self._free_tiles()
            )
            arrival = left - free_seconds * (1 - share / cells)
            latest = max(latest, arrival + (last - end + 1) * layer)
        return latest

    def _free_tiles(self) -> Iterator[int]:
        tiles = self._has_free
        while tiles:
            yield (tiles & -tiles).bit_length() - 1
            tiles &= tiles - 1

    def paused(self) -> list[int]:
        """First tokens of tiles whose hidden state is of no more use, each named once.

        That is: complete tiles that stopped half way, and everything once the request is cancelled.
        """
        last, found = self.spec.num_layers, []
        for state in self.tiles:
            idle = not state.running and 0 < state.low < last
            if idle and (state.complete or self.cancelled):
                state.low = last
                found.append(state.tile.start)
        for i, piece in enumerate(self.spec.suffix):
            if self.cancelled and 0 < self.suffix_low[i] < last:
                self.suffix_low[i] = last
                found.append(piece.start)
        return found

    # -- compute -------------------------------------------------------------------------------

    def next_work(self, now: float) -> TileWork | None:
        """The lowest tile (then the suffix) whose next layer compute should take now."""
        for t in self._candidates():
            state = self.tiles[t]
            if self._decide(t, state.low, now) is not Claim.REFUSED:
                return TileWork(self.spec.id, state.tile, state.low)
        for i, piece in enumerate(self.spec.suffix):
            low = self.suffix_low[i]
            if low < self.spec.num_layers:
                ready = self._advance_front(low) == len(self.tiles)
                return TileWork(self.spec.id, piece, low, is_suffix=True) if ready else None
        return None

    def begin(self, work: TileWork) -> None:
        """The compute worker takes ``work``."""
        if not work.is_suffix:
            t = self.index(work)
            self.tiles[t].running = True
            self._running |= 1 << t

    def _candidates(self) -> Iterator[int]:
        """Tiles that compute could go on with, in its order."""
        if self._by_layers:
            order = [
                (state.low, t)
                for t, state in enumerate(self.tiles)
                if not (state.complete or self._behind(t, state.low))
            ]
            yield from (t for _, t in sorted(order))
            return
        tiles = self._open
        while tiles:
            t = (tiles & -tiles).bit_length() - 1
            yield t
            if not self.tiles[t].low and self._advance_front(0) < t:
                return  # No tile behind one that cannot begin was ever begun.
            tiles &= tiles - 1

    def claim(self, work: TileWork, layer: int, now: float) -> Claim:
        """Called by the compute thread before ``layer``; whatever is granted will be enqueued."""
        if self.cancelled or layer >= self.spec.num_layers:
            return Claim.REFUSED
        if work.is_suffix:
            return self._claim_suffix(work, layer)
        t = self.index(work)
        if self._by_layers and self._behind(t, layer):
            return Claim.REFUSED
        answer = self._decide(t, layer, now)
        if answer is not Claim.REFUSED:
            state = self.tiles[t]
            state.low = layer + 1
            state.ready |= 1 << layer
            self.begun = True
            self._refresh(t)
        return answer

    def _claim_suffix(self, work: TileWork, layer: int) -> Claim:
        if self._advance_front(layer) < len(self.tiles):
            return Claim.REFUSED
        i = work.tile.index - self.spec.suffix[0].index
        self.suffix_low[i] = layer + 1
        self._add_work(self.todo, -1, self._suffix_work[i])
        if not self._left:
            self._outlook.all_suffixes.add(-1, self._suffix_work[i])
        return Claim.WRITE

    def _behind(self, t: int, layer: int) -> bool:
        """Whether another tile has to catch up before ``t`` goes on to ``layer``."""
        below = (1 << layer) - 1
        return any(state.free & below for i, state in enumerate(self.tiles) if i != t)

    def returned(self, work: TileWork, next_layer: int) -> None:
        """The compute thread is out of ``work`` and holds its hidden state at ``next_layer``."""
        if not work.is_suffix:
            t = self.index(work)
            state = self.tiles[t]
            state.running = False
            self._running &= ~(1 << t)
            state.low = next_layer
            self._refresh(t)

    def wake_at(self, now: float) -> float:
        """When compute should look again although nothing ended: loads will be too late then."""
        if not self.policy.hedges:
            return _INFINITE
        for t in self._candidates():
            state = self.tiles[t]
            target = self._target(t, state.low)
            if target is not None and not state.committing >> target & 1:
                cost = self._outlook.layer_bound(state.work) or 0.0
                seconds = cost * (target - state.low + 1) + self._overlap()
                seconds = max(seconds, self._patience(now))
                return self._flip(seconds, now)
        return _INFINITE

    def _flip(self, seconds: float, now: float) -> float:
        """When :meth:`loads_left` will exceed ``seconds`` if nothing is delivered before."""
        times = [_INFINITE]
        for channel in self._strides:
            nbytes, model = self._before(channel), self._outlook.channel(channel)
            if model.in_flight:
                when = model.slower_than(seconds, model.in_flight_bytes + nbytes, now)
            elif nbytes:  # About to start, by all that is known.
                when = now + max(seconds, self._outlook.transfer_seconds(channel, nbytes))
            else:
                continue
            times.append(when)
        return min(times)

    def _patience(self, now: float) -> float:
        """How far loads may fall behind before a recompute that was not worth starting starts."""
        if self.begun or self.policy.begin(self._gain(now)):
            return 0.0
        return 2 * max(
            (self._outlook.transfer_seconds(c, self._before(c)) for c in self._strides),
            default=0.0,
        )

    def _gain(self, now: float) -> float | None:
        """Share of the load-only time that both ends together would save, if all is known."""
        load = self.loads_left(now)
        if load is None:
            return None
        both = self._outlook.meeting(self.free, load, self._overlap())
        if both is None:
            return None
        return 1 - both / load if load > 0.0 else 0.0

    def index(self, work: TileWork) -> int:
        """Position of the prefix tile ``work`` is about."""
        return work.tile.index - self.spec.tiles[0].index

    def _advance_front(self, layer: int) -> int:
        front, tiles = self._front[layer], self.tiles
        while front < len(tiles) and tiles[front].ready >> layer & 1:
            front += 1
        self._front[layer] = front
        return front

    def _target(self, t: int, layer: int) -> int | None:
        """The lowest cell at or above ``layer`` that still has to become ready, if reachable."""
        state = self.tiles[t]
        open_cells = (state.full & ~state.ready) >> layer << layer
        if not open_cells or self._advance_front(layer) < t:
            return None
        return (open_cells & -open_cells).bit_length() - 1

    def _decide(self, t: int, layer: int, now: float) -> Claim:
        target = self._target(t, layer)
        if target is None:
            return Claim.REFUSED
        state = self.tiles[t]
        if state.committing >> target & 1:
            return Claim.REFUSED
        if state.must <= target and not self._worth(state, target, layer, now):
            return Claim.REFUSED
        return Claim.WRITE if target == layer else Claim.THROUGH

    def _worth(self, state: TileState, target: int, layer: int, now: float) -> bool:
        if not self.policy.hedges:
            free = self._may_take(state, target, layer) and self.policy.compute(None, None)
            return free or self._stalled(now)
        cost = self._outlook.layer_bound(state.work)
        compute = None if cost is None else cost * (target - layer + 1)
        left = self.loads_left(now)
        patient = left is not None and left < self._patience(now)
        self.leaves = patient or not self._sooner(compute, left, now)
        return not self.leaves or self._stalled(now)

    def _sooner(self, compute: float | None, left: float | None, now: float) -> bool:
        """Whether all would be done sooner with one more cell, which takes ``compute``, recomputed
        than with all that is left, which takes ``left``, loaded."""
        if self._pools and compute is not None and self._outlook.requests > 1:
            suffixes = self._outlook.seconds(self._outlook.all_suffixes) or 0.0
            return self.policy.compute(compute + suffixes, self._outlook.all_loads(now))
        layer = self._suffix_layer()
        if compute is None or left is None or layer == 0.0 or compute >= left:
            return self.policy.compute(compute, left)
        compute += (self.spec.num_layers - self.suffix_low[0]) * layer
        if self.policy.compute(compute, left + layer):
            return True
        return self.policy.compute(compute, self._left_to_loads(left))

    def _may_take(self, state: TileState, target: int, layer: int) -> bool:
        """Without hedging, what a load has begun stays with it (a cell, or with ``whole_tiles`` the
        tile), and a plan is kept."""
        if self.heights is not None and target >= self.heights[state.tile.index]:
            return False
        if self._whole_tiles:
            return layer > 0 or not (state.in_flight or state.ready)
        return not state.in_flight >> target & 1

    def _stalled(self, now: float) -> bool:
        """Nothing is on its way and no channel would start anything: either side's estimate says
        that the other is faster. Then compute goes on, or nobody ever would."""
        if any(self._loads.values()):
            return False
        return all(self.next_reach(channel, now) is None for channel in self._strides)

    # -- loads ---------------------------------------------------------------------------------

    def next_reach(self, channel: str, now: float) -> Reach | None:
        """The cells ``channel`` should be asked for next, from the back."""
        if self.cancelled or not self.free_bytes.get(channel):
            return None
        if self._by_layers:
            return self._top_layer(channel, now)
        held = self._held_back(channel, now) if self.policy.overlaps else {}
        for t in self._load_order():
            mask = self._allowed(t, channel) & ~held.get(t, 0)
            if mask:
                return self._cut(channel, t, mask, now)
        return self._lowest_layer(channel, held) if held else None

    def _held_back(self, channel: str, now: float) -> dict[int, int]:
        """Cells by tile that come last and from the lowest layer up, because they can hide behind
        the suffix: all once compute has left them, before that as many of the highest layers as
        arrive while the suffix is computed."""
        if self.leaves:
            allowed = {t: self._allowed(t, channel) for t in self._free_tiles()}
            return {t: mask for t, mask in allowed.items() if mask}
        meeting = self._meeting_tile(now)
        if meeting is None:
            return {}
        tiles = {t: self._allowed(t, channel) for t in self._free_tiles() if t >= meeting}
        stride = self._strides[channel] / self.spec.chunk_tokens
        room = self._overlap() * (self._outlook.channel(channel).bandwidth or 0.0) / stride
        if room < _LEAST_HELD * self.tiles[meeting].tile.width:
            return {}
        low, high = 0, self.spec.num_layers
        while low < high:
            middle = (low + high) // 2
            tokens = sum(
                (mask >> middle).bit_count() * self.tiles[t].tile.width for t, mask in tiles.items()
            )
            low, high = (low, middle) if tokens <= room else (middle + 1, high)
        held = {t: mask >> low << low for t, mask in tiles.items()}
        return {t: mask for t, mask in held.items() if mask}

    def _meeting_tile(self, now: float) -> int | None:
        """The tile in which compute is expected to leave the rest to loads; None where the suffix
        is too short to plan for."""
        if not (self.is_first_to_load and self.is_first_to_compute and self._has_free):
            return None
        hidden = self._overlap()
        left = self.loads_left(now)
        if left is None or hidden < _PLANNED_SHARE * left:
            return None
        if any(self.tiles[t].must > self.tiles[t].low for t in self._free_tiles()):
            return None
        spent, rate = hidden, left / (self.free.linear or 1.0)
        for t in self._free_tiles():
            state = self.tiles[t]
            count = state.free.bit_count()
            spent += count * (self._outlook.layer_seconds(state.work) or 0.0)
            left -= count * state.work[0] * rate
            if spent >= left:
                return t
        return None

    def _lowest_layer(self, channel: str, masks: Mapping[int, int]) -> Reach:
        """One load of the lowest layers: of one tile as long as no other has lower ones."""
        lows = {t: (mask & -mask).bit_length() - 1 for t, mask in masks.items()}
        t = min(lows, key=lambda each: (lows[each], each))
        low = lows.pop(t)
        chunks = self.tiles[t].chunks_for(channel, low)
        stride = self._strides[channel] * len(chunks)
        stop = min(lows.values(), default=_MOST)
        stop = min(max(stop, low + 1), low + self._unit(channel, stride))
        top = low + 1
        while (
            top < stop
            and masks[t] >> top & 1
            and (len(self.tiles[t].parts) == 1 or self.tiles[t].chunks_for(channel, top) == chunks)
        ):
            top += 1
        return Reach(t, Span(low, top), chunks, stride * (top - low))

    def _allowed(self, t: int, channel: str) -> int:
        state = self.tiles[t]
        if self._whole_tiles and (state.low or state.running) and not state.must:
            return 0
        mask = state.wanted.get(channel, 0)
        if self.heights is not None:
            mask = mask >> self.heights[t] << self.heights[t]
        return mask

    def _top_layer(self, channel: str, now: float) -> Reach | None:
        masks = [self._allowed(t, channel) for t in range(len(self.tiles))]
        top = max(mask.bit_length() for mask in masks) - 1
        for t in range(len(masks) - 1, -1, -1):
            if top >= 0 and masks[t] >> top & 1:
                return self._cut(channel, t, 1 << top, now)
        return None

    def _load_order(self) -> Iterator[int]:
        """Backward, but what a hole depends on before what lies behind it."""
        holes = [t for t, state in enumerate(self.tiles) if state.must > state.low]
        stop = len(self.tiles)
        if not holes:
            yield from range(stop - 1, -1, -1)
            return
        for first, end in zip([0, *holes], [*holes, stop], strict=True):
            yield from range(end - 1, first - 1, -1)

    def _cut(self, channel: str, t: int, mask: int, now: float) -> Reach | None:
        """The topmost layers of ``mask`` with the same chunks, as many as one load should have."""
        state = self.tiles[t]
        top = mask.bit_length() - 1
        chunks = state.chunks_for(channel, top)
        stride = self._strides[channel] * len(chunks)
        for size in (self._unit(channel, stride), 1):
            low = top
            while (
                top - low + 1 < size
                and low > 0
                and mask >> (low - 1) & 1
                and (len(state.parts) == 1 or state.chunks_for(channel, low - 1) == chunks)
            ):
                low -= 1
            nbytes = stride * (top - low + 1)
            load = self._outlook.load_seconds(channel, nbytes, now)
            if self.policy.load(load, self._reached(channel, t, low, now)):
                return Reach(t, Span(low, top + 1), chunks, nbytes)
            if top == low:
                break
        return None

    def _unit(self, channel: str, stride: int) -> int:
        """How many layers one load should carry: a fraction of the time left, in whole layers."""
        free = self.free_bytes[channel]
        return self._outlook.unit_layers(channel, stride, free, _UNITS, _LEAST_UNIT_SECONDS)

    def _reached(self, channel: str, t: int, layer: int, now: float) -> float | None:
        """Seconds until cell ``(t, layer)`` would be ready if ``channel`` left it alone: by
        compute, or by another channel that has all the rest as well."""
        if self._pools and self._outlook.requests > 1:
            return self._outlook.seconds(self._outlook.all_work)
        compute = self._compute_to(t, layer, now)
        if compute is not None:
            compute += self._work_before(channel)
            if self.policy.overlaps:
                compute += layer * (self._outlook.layer_seconds(self._suffix_work[0]) or 0.0)
        for other in self._strides:
            if other != channel and self.tiles[t].wanted.get(other, 0) >> layer & 1:
                model = self._outlook.channel(other)
                nbytes = model.in_flight_bytes + self.free_bytes[other]
                seconds = model.left(nbytes, now) if model.bandwidth else None
                if seconds is not None:
                    compute = seconds if compute is None else min(compute, seconds)
        return compute

    def _compute_to(self, t: int, layer: int, now: float) -> float | None:
        """Seconds until compute would have finished cell ``(t, layer)`` if loads left it alone."""
        outlook = self._outlook
        total = outlook.seconds(self.free)
        if total is None:
            return None
        behind = self._has_free >> t << t
        while behind:
            i = (behind & -behind).bit_length() - 1
            state = self.tiles[i]
            beyond = state.free >> (layer + 1) if i == t else state.free
            total -= (outlook.layer_seconds(state.work) or 0.0) * beyond.bit_count()
            behind &= behind - 1
        return total + outlook.current_left(now)

    def _work_before(self, channel: str) -> float:
        """Seconds of compute for more urgent requests, from which ``channel`` has turned away."""
        if self.is_first_to_load:
            return 0.0
        ahead = self._outlook.seconds(self._outlook.work_ahead[channel]) or 0.0
        own = self._outlook.seconds(self.todo) if channel in self.turned_away else 0.0
        return ahead - (own or 0.0)

    def _before(self, channel: str, *, alone: bool = False) -> int:
        """Bytes that ``channel`` has still to be asked for until this request is loaded."""
        nbytes = self.free_bytes[channel]
        if nbytes and not (alone or self.is_first_to_compute):
            ahead = self._outlook.bytes_ahead[channel]
            nbytes += ahead - (nbytes if self.compute_turned_away else 0)
        return nbytes

    def loads_left(self, now: float, *, alone: bool = False) -> float | None:
        """Seconds until all in flight and all free bytes of every channel would be there.

        ``alone``: as if no other request were waiting. None while a channel that is needed has
        shown nothing; 0 when nothing is left to load.
        """
        longest = 0.0
        for channel in self._strides:
            nbytes = self._before(channel, alone=alone)
            if self._shared:
                nbytes -= self.free_bytes[channel] - self._only[channel]
            if nbytes > 0 or self._loads[channel]:
                model = self._outlook.channel(channel)
                queued = model.in_flight_bytes + nbytes
                seconds = model.left(queued, now)
                if seconds is None:
                    return None
                longest = max(longest, seconds)
        if self._shared:
            nbytes = sum(self._only.values()) + self._shared * max(self._strides.values())
            longest = max(longest, self._outlook.shared_seconds(self._strides, nbytes))
        return longest

    # -- loads that ended ----------------------------------------------------------------------

    def start(self, load: Load) -> None:
        """The load's cells are claimed from now on."""
        self._loads[load.channel] += 1
        self.tiles[load.tile].claim(load)
        self._refresh(load.tile)

    def commit(self, load: Load) -> int:
        """Layers (bitmap) of a verified load that may be published; compute took the others."""
        state = self.tiles[load.tile]
        layers = 0 if self.cancelled else bits(load.layers) & ~state.ready
        state.commit(load, layers)
        return layers

    def landed(self, load: Load, layers: int) -> None:
        """Published."""
        self._loads[load.channel] -= 1
        self.tiles[load.tile].landed(load, layers)
        self._refresh(load.tile)

    def lost(self, load: Load, chunks: Sequence[int]) -> None:
        """Not delivered: other sources or recompute take over."""
        self._loads[load.channel] -= 1
        self.tiles[load.tile].lost(load, chunks)
        self._refresh(load.tile)
