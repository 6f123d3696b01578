"""What a tier has, to the byte, and what leaves next: pure decisions, no I/O, time is an argument.

Entries that are held (leased by a lookup, or being read) never leave. Pinned ones are out of the
eviction order and leave last: a pin is broken rather than a store refused. Leases end by themselves
and are bounded in number. So room is refused only while what is held leaves none, and that never
lasts.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cacheflow.tiers.holding import Holds, Pins

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cacheflow.tiers.entry import Entry
    from cacheflow.tiers.eviction.protocol import EvictionPolicy
    from cacheflow.types import ChunkKey, ObjectKey

__all__ = ["Catalogue", "Leaving", "Limits", "Room"]

MAX_LEASES: Final = 1024
"""Objects that lookups hold at once. Looking for victims may pass over so many: 1 ms."""

Leaving = tuple["Entry", str]
"""What leaves, and why: ``capacity``, ``quota``, ``ttl``, ``full``, ``pin`` (it was broken)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes and seconds; None: no limit. ``pin_bytes``: what each tenant may have pinned."""

    capacity: int | None = None
    quota: int | None = None
    pin_bytes: int = 0
    ttl: float | None = None
    max_leases: int = MAX_LEASES


@dataclass(frozen=True, slots=True)
class Room:
    """The answer to a wish for room: what has to leave first, or why there is none."""

    leaving: tuple[Leaving, ...] = ()
    refused: str = ""


class Catalogue:
    """``make_policy`` makes an empty eviction policy: one for all, with a quota one a tenant."""

    def __init__(self, make_policy: Callable[[], EvictionPolicy[Entry]], limits: Limits) -> None:
        self.limits = limits
        self.bytes = 0
        """Of all entries."""
        self.reserved = 0
        """Bytes on their way in, and those of which nobody knows whether they have arrived."""
        self.unknown = 0
        """Bytes that the backend has and nobody has listed yet."""
        self.holds = Holds(limits.max_leases)
        self.pins = Pins(limits.pin_bytes)
        self._make_policy = make_policy
        self._order = make_policy()
        self._orders: dict[bytes, EvictionPolicy[Entry]] = {}
        self._chunks: dict[ChunkKey, tuple[Entry, ...]] = {}
        self._count = 0
        self._owned: defaultdict[bytes, int] = defaultdict(int)
        self._coming: defaultdict[bytes, int] = defaultdict(int)
        """Reserved bytes by tenant."""
        self._ages: OrderedDict[Entry, None] = OrderedDict()
        """By when they were stored."""

    # -- what is there -------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Entry]:
        for entries in self._chunks.values():
            yield from entries

    @property
    def used(self) -> int:
        """Bytes that count against the capacity."""
        return self.bytes + self.reserved + self.unknown

    def of(self, chunk: ChunkKey) -> tuple[Entry, ...]:
        """The entries of one chunk."""
        return self._chunks.get(chunk, ())

    def find(self, key: ObjectKey) -> Entry | None:
        """The entry of one object."""
        for entry in self._chunks.get(key.chunk, ()):
            if entry.key is key or entry.key == key:
                return entry
        return None

    def owned(self, tenant: bytes) -> int:
        """Bytes of one tenant, those on their way in included."""
        return self._owned.get(tenant, 0) + self._coming.get(tenant, 0)

    # -- coming, used, going -------------------------------------------------------------------

    def put(self, entry: Entry, evidence: float = 1.0) -> None:
        """``entry`` is stored, in the place of one of the same key if there was one.

        ``evidence``: see :meth:`touch`; that of the use which made it be stored.
        """
        if (old := self.drop(entry.key)) is not None:
            entry.uses, entry.boost = old.uses, old.boost
        self._chunks[entry.key.chunk] = (*self.of(entry.key.chunk), entry)
        self._count += 1
        self.bytes += entry.nbytes
        _add(self._owned, entry.tenant, entry.nbytes)
        self._ages[entry] = None
        self._enter_orders(entry, evidence + entry.uses)

    def drop(self, key: ObjectKey) -> Entry | None:
        """The object is gone, whoever took it."""
        entry = self.find(key)
        if entry is None:
            return None
        rest = tuple(each for each in self._chunks[key.chunk] if each is not entry)
        if rest:
            self._chunks[key.chunk] = rest
        else:
            del self._chunks[key.chunk]
        self._count -= 1
        self.bytes -= entry.nbytes
        _add(self._owned, entry.tenant, -entry.nbytes)
        self._ages.pop(entry, None)
        self._leave_orders(entry)
        self.holds.forget(entry)
        self.pins.forget(entry)
        return entry

    def touch(self, entry: Entry, now: float, evidence: float = 1.0) -> None:
        """A lookup found it. ``evidence``: how likely that use saves anything, 0 to 1."""
        entry.last_use = now
        entry.uses += 1
        self._reorder(entry, evidence)

    def hint(self, entry: Entry, boost: float) -> None:
        """From now on it is worth ``boost`` times what it is worth by itself."""
        is_more, entry.boost = boost > entry.boost, boost
        self._reorder(entry, 1.0 if is_more else 0.0)

    def pin(self, entry: Entry, until: float) -> bool:
        """Let it leave last until then; False if that is over its tenant's budget."""
        was_pinned = entry in self.pins
        if not self.pins.add(entry, until):
            return False
        if not was_pinned:
            self._leave_orders(entry)
        return True

    def _reorder(self, entry: Entry, evidence: float) -> None:
        for order in self._orders_of(entry):
            order.touch(entry, evidence, entry.worth, entry.boost)

    # -- room ----------------------------------------------------------------------------------

    def make_room(self, nbytes: int, tenant: bytes, now: float) -> Room:
        """Room for ``nbytes`` of ``tenant``, reserved until :meth:`release`; or why there is none.

        What leaves for it is out of the catalogue already: delete it, then store.
        """
        self.tick(now)
        capacity, quota = self.limits.capacity, self.limits.quota
        if quota is not None and nbytes > quota:
            return Room(refused="quota")
        if capacity is not None and nbytes > capacity:
            return Room(refused="capacity")
        own = 0 if quota is None else self.owned(tenant) + nbytes - quota
        total = 0 if capacity is None else self.used + nbytes - capacity
        if own > self._owned.get(tenant, 0) - self.holds.nbytes(tenant):
            return Room(refused="leased")
        if total > self.bytes - self.holds.nbytes():
            return Room(refused="opening" if self.unknown else "leased")
        leaving = self._take(own, "quota", tenant)
        leaving += self._take(total - sum(entry.nbytes for entry, _ in leaving), "capacity")
        self.reserve(nbytes, tenant)
        return Room(tuple(leaving))

    def admits(self, nbytes: int, worth: float, evidence: float) -> bool:
        """Whether something of ``nbytes`` is worth storing: there is room, or what would leave for
        it (quotas apart) is worth less."""
        capacity = self.limits.capacity
        if capacity is None or self.used + nbytes <= capacity:
            return True
        return self._order.admits(nbytes, worth, evidence)

    def take(self, nbytes: int, reason: str, now: float) -> list[Leaving]:
        """Whatever leaves first, ``nbytes`` of it or as much as there is."""
        self.tick(now)
        return self._take(nbytes, reason)

    def take_surplus(self, now: float) -> list[Leaving]:
        """What is there beyond quotas and capacity: left by others, or under other settings."""
        self.tick(now)
        leaving: list[Leaving] = []
        if self.limits.quota is not None:
            for tenant in list(self._owned):
                leaving += self._take(self.owned(tenant) - self.limits.quota, "quota", tenant)
        if self.limits.capacity is not None:
            leaving += self._take(self.used - self.limits.capacity, "capacity")
        return leaving

    def take_expired(self, now: float) -> list[Leaving]:
        """What has been here longer than the time to live, but for what is held."""
        self.tick(now)
        leaving: list[Leaving] = []
        for entry in self._ages:
            if not self.is_expired(entry, now):
                break
            if entry not in self.holds:
                leaving.append((entry, "ttl"))
        for entry, _ in leaving:
            self.drop(entry.key)
        return leaving

    def is_expired(self, entry: Entry, now: float) -> bool:
        """Whether its time to live is over."""
        return self.limits.ttl is not None and entry.stored + self.limits.ttl <= now

    def next_expiry(self) -> float | None:
        """When the oldest entry's time to live is over."""
        if self.limits.ttl is None or not self._ages:
            return None
        return next(iter(self._ages)).stored + self.limits.ttl

    def tick(self, now: float) -> None:
        """End leases and pins that are over."""
        self.holds.end_leases(now)
        for entry in self.pins.ended(now):
            self._enter_orders(entry, 1.0 + entry.uses)

    def reserve(self, nbytes: int, tenant: bytes) -> None:
        """``nbytes`` are on their way in; :meth:`release` must follow."""
        self.reserved += nbytes
        _add(self._coming, tenant, nbytes)

    def release(self, nbytes: int, tenant: bytes) -> None:
        """They have arrived (as an entry), or never will."""
        self.reserved -= nbytes
        _add(self._coming, tenant, -nbytes)

    def _take(self, nbytes: int, reason: str, tenant: bytes | None = None) -> list[Leaving]:
        if nbytes <= 0:
            return []
        order = self._order if tenant is None else self._orders.get(tenant)
        victims = [] if order is None else order.victims(nbytes, self.holds.__contains__)
        leaving = [(entry, reason) for entry in victims]
        short = nbytes - sum(entry.nbytes for entry in victims)
        if short > 0:
            broken = self.pins.broken(short, lambda entry: self._may_leave(entry, tenant))
            leaving += [(entry, "pin") for entry in broken]
        for entry, _ in leaving:
            self.drop(entry.key)
        return leaving

    def _may_leave(self, entry: Entry, tenant: bytes | None) -> bool:
        return tenant in (None, entry.tenant) and entry not in self.holds

    # -- orders --------------------------------------------------------------------------------

    def _orders_of(self, entry: Entry) -> tuple[EvictionPolicy[Entry], ...]:
        own = self._orders.get(entry.tenant)
        return (self._order,) if own is None else (self._order, own)

    def _enter_orders(self, entry: Entry, uses: float) -> None:
        if self.limits.quota is not None and entry.tenant not in self._orders:
            self._orders[entry.tenant] = self._make_policy()
        for order in self._orders_of(entry):
            order.insert(entry, entry.nbytes, entry.worth, uses, entry.boost)

    def _leave_orders(self, entry: Entry) -> None:
        for order in self._orders_of(entry):
            order.remove(entry)
        if entry.tenant in self._orders and not len(self._orders[entry.tenant]):
            del self._orders[entry.tenant]


def _add(sums: defaultdict[bytes, int], name: bytes, nbytes: int) -> None:
    sums[name] += nbytes
    if not sums[name]:
        del sums[name]
