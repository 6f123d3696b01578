"""Conformance: random sequences of operations, compared with a dictionary after each step."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cacheflow.testing.objects import aligned_buffer, make_object, object_key
from cacheflow.testing.storage_harness import BackendHarness, load_all
from cacheflow.types import Read, Span, TransferStatus

if TYPE_CHECKING:
    from cacheflow.testing.objects import StoredObject
    from cacheflow.types import ObjectKey

__all__ = ["ModelTests"]

_SHARDS = ((Span(0, 3), Span(0, 2)), (Span(0, 1), Span(0, 2)), (Span(1, 3), Span(1, 2)))
_numbers = st.tuples(st.integers(0, 3), st.sampled_from(range(len(_SHARDS))))


class ModelTests(BackendHarness):
    """A backend behaves like a dictionary from keys to bytes."""

    def test_behaves_like_a_dictionary(self, tmp_path: Path) -> None:
        """Any sequence of stores, replacements, deletes, lookups, reads, scans and reopenings
        agrees with a dictionary that was told the same."""
        examples = max(4, round(settings().max_examples * self.model_share))
        run_state_machine_as_test(
            lambda: _Machine(self, tmp_path),  # type: ignore[arg-type]  # any factory will do
            settings=settings(max_examples=examples, stateful_step_count=20, deadline=None),
        )


class _Machine(RuleBasedStateMachine):
    def __init__(self, harness: BackendHarness, base: Path) -> None:
        super().__init__()
        self.harness = harness
        self.where = Path(tempfile.mkdtemp(dir=base))
        self.runner = asyncio.Runner()
        self.expected: dict[ObjectKey, StoredObject] = {}
        self.backend = self.runner.run(harness.open_backend(self.where))

    def _load(self, key: ObjectKey, offset: int, nbytes: int) -> tuple[TransferStatus, bytes]:
        buffer = aligned_buffer(nbytes)
        [result] = self.runner.run(load_all(self.backend, [Read(key, offset, buffer)]))
        assert buffer.view is not None
        assert buffer.hold.in_flight == 0
        return result.status, bytes(buffer.view[: result.nbytes])

    @rule(numbers=st.lists(_numbers, min_size=1, max_size=4, unique=True), version=st.integers(0))
    def store(self, numbers: list[tuple[int, int]], version: int) -> None:
        objects = [_object(number, version) for number in numbers]
        results = self.runner.run(self.backend.store([each.write() for each in objects]))
        assert {result.status for result in results} == {TransferStatus.OK}
        self.expected |= {each.key: each for each in objects}

    @rule(numbers=st.lists(_numbers, max_size=4))
    def delete(self, numbers: list[tuple[int, int]]) -> None:
        keys = [_key(number) for number in numbers]
        answers = [self.expected.pop(key, None) is not None for key in keys]
        assert self.runner.run(self.backend.delete(keys)) == answers

    @rule(number=_numbers, first=st.integers(0, 30000), size=st.integers(1, 30000))
    def read(self, number: tuple[int, int], first: int, size: int) -> None:
        if not self.backend.capabilities.ranged_reads:
            first = 0
        status, data = self._load(_key(number), first, size)
        stored = self.expected.get(_key(number))
        if stored is None:
            assert (status, data) == (TransferStatus.MISSING, b"")
        else:
            assert data == stored.data[first : first + size]
            assert status is (TransferStatus.OK if len(data) == size else TransferStatus.SHORT)

    @rule()
    def scan(self) -> None:
        async def scan() -> dict[ObjectKey, Any]:
            return {info.key: info async for info in self.backend.scan()}

        assert self.runner.run(scan()) == {k: each.info for k, each in self.expected.items()}

    @precondition(lambda self: self.backend.capabilities.persistent)
    @rule()
    def reopen(self) -> None:
        self.runner.run(self.backend.aclose())
        self.backend = self.runner.run(self.harness.open_backend(self.where))

    @invariant()
    def agrees(self) -> None:
        chunks = [object_key(number).chunk for number in range(4)]
        found = self.runner.run(self.backend.lookup(chunks))
        assert {info.key: info for infos in found for info in infos} == {
            key: each.info for key, each in self.expected.items()
        }
        for chunk, infos in zip(chunks, found, strict=True):
            assert {info.key.chunk for info in infos} <= {chunk}
        used = self.runner.run(self.backend.used_bytes())
        assert used == sum(each.info.nbytes for each in self.expected.values())

    def teardown(self) -> None:
        leftovers = self.runner.run(self.harness.leftovers(self.backend))
        self.runner.run(self.backend.aclose())
        self.runner.close()
        assert not leftovers


def _object(number: tuple[int, int], version: int) -> StoredObject:
    layers, heads = _SHARDS[number[1]]
    return make_object(number[0], version, layers=layers, heads=heads)


def _key(number: tuple[int, int]) -> ObjectKey:
    return object_key(number[0], *_SHARDS[number[1]])
