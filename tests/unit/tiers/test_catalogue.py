"""The catalogue, under any sequence of events: sums exact, what is held stays, quotas hold."""

from __future__ import annotations

from itertools import count
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from cacheflow.testing.objects import object_key
from cacheflow.tiers.catalogue import Catalogue, Limits
from cacheflow.tiers.entry import Entry
from cacheflow.tiers.eviction import EvictionName, load_eviction

CAPACITY, QUOTA, PINS, LEASE = 100, 60, 30, 5.0
_numbers = st.integers(0, 9)
_sizes = st.integers(1, 40)
_tenants = st.sampled_from([b"a", b"b", b"c"])


class Machine(RuleBasedStateMachine):
    """Stores come in two steps, as in a tier: room first, then the object (or not)."""

    def __init__(self, eviction: EvictionName) -> None:
        super().__init__()
        self.eviction = eviction
        self.now = 0.0
        self.numbers = count()

    @initialize(ttl=st.sampled_from([None, 20.0]), leases=st.sampled_from([1, 3, 100]))
    def begin(self, ttl: float | None, leases: int) -> None:
        limits = Limits(CAPACITY, QUOTA, PINS, ttl, leases)
        self.limits = limits
        self.c = Catalogue(lambda: load_eviction(self.eviction, Entry), limits)
        self.leases: dict[Entry, float] = {}
        self.pending: list[tuple[int, bytes]] = []

    @rule(nbytes=_sizes, tenant=_tenants)
    def ask_for_room(self, nbytes: int, tenant: bytes) -> None:
        before = {entry: entry.nbytes for entry in self.c}
        held = self.held()
        room = self.c.make_room(nbytes, tenant, self.now)
        leaving = [entry for entry, _ in room.leaving]
        assert not set(leaving) & held, "what is held does not leave"
        assert set(self.c) == before.keys() - set(leaving)
        if room.refused:
            assert not leaving, "nothing leaves for a store that is refused"
            mine = sum(e.nbytes for e in held if e.tenant == tenant)
            coming = [n for n, t in self.pending if t == tenant]
            is_full = sum(n for n, _ in self.pending) + self.sum(held) + nbytes > CAPACITY
            assert is_full or sum(coming) + mine + nbytes > QUOTA, "there was room"
        else:
            self.pending.append((nbytes, tenant))
            assert self.c.used <= CAPACITY
            assert self.c.owned(tenant) <= QUOTA
            for entry, reason in room.leaving:
                assert reason in ("quota", "capacity", "pin")
                assert reason != "quota" or entry.tenant == tenant, "its own go first"

    @rule(number=_numbers, is_stored=st.booleans())
    def end_a_store(self, number: int, is_stored: bool) -> None:
        if self.pending:
            nbytes, tenant = self.pending.pop(0)
            self.c.release(nbytes, tenant)
            if is_stored:
                key = object_key(number)
                entry = Entry(key, nbytes, tenant, 0, 32, 96, self.now, self.now)
                self.c.put(entry)
                assert self.c.find(key) is entry

    @rule(number=_numbers)
    def delete(self, number: int) -> None:
        key = object_key(number)
        there = self.c.find(key)
        assert self.c.drop(key) is there
        assert self.c.find(key) is None

    @rule(number=_numbers)
    def look_up(self, number: int) -> None:
        for entry in self.c.of(object_key(number).chunk):
            self.c.tick(self.now)
            self.c.touch(entry, self.now)
            self.c.holds.lease(entry, self.now + LEASE)
            self.leases.pop(entry, None)
            self.leases[entry] = self.now + LEASE
            assert self.c.holds.leases <= self.limits.max_leases

    @rule(number=_numbers)
    def begin_read(self, number: int) -> None:
        for entry in self.c.of(object_key(number).chunk):
            self.c.holds.begin_read(entry)

    @rule(number=_numbers)
    def end_read(self, number: int) -> None:
        for entry in self.c.of(object_key(number).chunk):
            self.c.holds.end_read(entry)

    @rule(number=_numbers, seconds=st.sampled_from([1.0, 8.0, 1e6]))
    def pin(self, number: int, seconds: float) -> None:
        for entry in self.c.of(object_key(number).chunk):
            before = self.c.pins.nbytes(entry.tenant)
            is_new = entry not in self.c.pins
            if not self.c.pin(entry, self.now + seconds):
                assert is_new
                assert before + entry.nbytes > PINS

    @rule(number=_numbers, boost=st.sampled_from([0.1, 5.0]))
    def hint(self, number: int, boost: float) -> None:
        for entry in self.c.of(object_key(number).chunk):
            self.c.hint(entry, boost)

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        held = self.held()
        for entry, reason in self.c.take_expired(self.now):
            assert reason == "ttl"
            assert entry not in held

    @invariant()
    def sums_are_exact(self) -> None:
        entries = list(self.c)
        assert self.c.bytes == sum(e.nbytes for e in entries)
        assert len(self.c) == len(entries)
        for tenant in (b"a", b"b", b"c"):
            mine = [e for e in entries if e.tenant == tenant]
            coming = sum(n for n, t in self.pending if t == tenant)
            assert self.c.owned(tenant) == sum(e.nbytes for e in mine) + coming
            held = [e for e in mine if e in self.c.holds]
            assert self.c.holds.nbytes(tenant) == self.sum(held)
            pinned = self.sum(e for e in mine if e in self.c.pins)
            assert self.c.pins.nbytes(tenant) == pinned <= PINS
        assert self.c.reserved == sum(n for n, _ in self.pending)
        assert self.c.holds.nbytes() == self.sum(e for e in entries if e in self.c.holds)

    def teardown(self) -> None:
        """Once stores, reads and leases are over there is room for whatever may be stored."""
        for nbytes, tenant in self.pending:
            self.c.release(nbytes, tenant)
        for entry in self.c:
            while entry.reads:
                self.c.holds.end_read(entry)
        self.now += LEASE
        for tenant in (b"a", b"b"):
            assert not self.c.make_room(QUOTA, tenant, self.now).refused
            self.c.release(QUOTA, tenant)
            assert self.c.holds.nbytes() == self.c.holds.leases == 0

    def held(self) -> set[Entry]:
        """By what this test knows: reads, and leases that are neither over nor too many."""
        lasting = [e for e, until in self.leases.items() if until > self.now]
        return {e for e in self.c if e.reads} | (
            set(lasting[-self.limits.max_leases :]) & set(self.c)
            if len(lasting) <= self.limits.max_leases
            else {e for e in self.c if e in self.c.holds and e in lasting}
        )

    @staticmethod
    def sum(entries: object) -> int:
        return sum(e.nbytes for e in entries)  # type: ignore[attr-defined]


@pytest.mark.no_cover  # seconds under a tracer; other tests go the same ways
@pytest.mark.parametrize("eviction", get_args(EvictionName))
def test_any_sequence_of_events(eviction: EvictionName) -> None:
    """Sums are exact, what is held never leaves, capacity and quotas hold for what is stored
    through the tier, pins stay in their budget, and room is refused only when it has to be."""
    run_state_machine_as_test(
        lambda: Machine(eviction),  # type: ignore[arg-type]  # any factory will do
        settings=settings(stateful_step_count=30, deadline=None),
    )
