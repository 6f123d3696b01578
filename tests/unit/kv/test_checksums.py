"""Checksums: what they are, what they notice, and that hashing lets other threads in."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.kv import checksums, wsum
from cacheflow.kv.checksums import run_checksums
from cacheflow.types import ChecksumKind

MASK = 2**64 - 1


def splitmix64(index: int) -> int:
    """The ``index``-th output of splitmix64 seeded with 0, in plain integers."""
    z = (index + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def test_the_reference_is_splitmix64() -> None:
    """Its published first output for seed 0."""
    assert splitmix64(0) == 0xE220A8397B1DCDAF


@given(st.binary(max_size=256).map(lambda b: b[: len(b) // 4 * 4]))
def test_wsum_is_what_it_says(data: bytes) -> None:
    """The device checksum equals its definition in plain integers."""
    words = struct.unpack(f"<{len(data) // 4}I", data)
    assert wsum(data) == sum(w * (splitmix64(i) | 1) for i, w in enumerate(words)) & MASK
    assert wsum(memoryview(bytearray(data))) == wsum(data)


def test_wsum_notices_flips_that_cancel_in_a_plain_sum() -> None:
    """Two sign bits, two exchanged words, a difference moved along: all another sum."""
    data = bytearray(random.Random(1).randbytes(32768))
    right = wsum(bytes(data))
    for first, second in ((7, 2047), (3, 7), (32767, 4099)):
        bad = bytearray(data)
        bad[first] ^= 0x80
        bad[second] ^= 0x80
        assert wsum(bytes(bad)) != right
    for a, b in ((0, 4), (4096, 8192), (100, 30000)):
        bad = bytearray(data)
        bad[a : a + 4], bad[b : b + 4] = data[b : b + 4], data[a : a + 4]
        assert wsum(bytes(bad)) != right
    with pytest.raises(ValueError, match="multiple of 4"):
        wsum(b"12345")


def test_hashing_lets_other_threads_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """xxhash keeps the GIL for small runs: every 2 MiB, over however many calls, it is given up."""
    turns: list[float] = []
    monkeypatch.setattr("cacheflow.kv.checksums.time.sleep", turns.append)
    monkeypatch.setattr(checksums._turn, "nbytes", 0)
    block = memoryview(bytes(1 << 18))
    for _ in range(32):
        run_checksums(ChecksumKind.XXH3, block, run=1 << 15, runs=8, stride=1 << 18)
    assert len(turns) == 4
    wide = memoryview(bytes(8 << 20))
    run_checksums(ChecksumKind.XXH3, wide, run=1 << 20, runs=2, stride=2 << 20)
    assert len(turns) == 4, "xxhash gives up the GIL itself on wide runs"


@pytest.mark.both_loops
async def test_hashing_never_sleeps_on_an_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools and tests seal small chunks there."""
    turns: list[float] = []
    monkeypatch.setattr("cacheflow.kv.checksums.time.sleep", turns.append)
    run_checksums(
        ChecksumKind.XXH3, memoryview(bytes(8 << 20)), run=1 << 15, runs=8, stride=1 << 18
    )
    assert not turns
