"""What a store says of its arena."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.errors import BackendError
from cacheflow.storage_backends.nixl.hello import Hello

HELLO = Hello("cacheflow-host-1-abcd", 0x7F00_0000_0000, 1 << 40, b"\0metadata\xff")


def test_it_comes_back() -> None:
    """What is encoded is decoded."""
    assert Hello.decode(HELLO.encode()) == HELLO


@pytest.mark.parametrize("keep", range(len(HELLO.encode()) - len(HELLO.metadata) + 1))
def test_cut_short(keep: int) -> None:
    """A greeting without all of its head, name and some metadata is a BackendError."""
    with pytest.raises(BackendError, match="not understood"):
        Hello.decode(HELLO.encode()[:keep])


@given(st.binary(max_size=200))
def test_noise(data: bytes) -> None:
    """Anything else is a BackendError too."""
    with pytest.raises(BackendError, match="not understood"):
        Hello.decode(data)
