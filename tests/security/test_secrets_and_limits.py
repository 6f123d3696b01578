"""Secrets are not shown, and headers cannot make their reader take much."""

from __future__ import annotations

import logging
import random
import struct
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from cacheflow.errors import ConfigError, IntegrityError
from cacheflow.kv import MAX_HEADER_BYTES, PREFIX_BYTES, Stamp, decode_header, header_size
from cacheflow.session.opening import stamp_of
from cacheflow.settings import Settings
from cacheflow.testing.objects import make_object

SALT, KEY, TOKEN = "salt-" + "s" * 20, "key-" + "k" * 20, "token-" + "t" * 20


def settings(**changes: Any) -> Settings:
    options = {"path": "/nowhere", "secret_access_key": TOKEN}
    tier = {"name": "t", "backend": "nvme", "options": options}
    return Settings(**{"salt": SALT, "auth_key": KEY, "tiers": [tier], **changes})


def test_settings_show_no_secret() -> None:
    """Not the salt, not the key, not the options of a tier, where credentials may be."""
    made = settings()
    for text in (repr(made), str(made), repr(made.tiers[0]), f"{made!r:.500}"):
        assert not [secret for secret in (SALT, KEY, TOKEN) if secret in text]


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": KEY},
        {"auth_key": "short-secret"},
        {"salt": b"\xff" + SALT.encode()},
        {"tiers": [{"name": "t", "backend": "nvme", "options": TOKEN}]},
        {"staging_bytes": SALT},
    ],
)
def test_errors_about_settings_show_no_value(wrong: dict[str, Any]) -> None:
    """A mistake is named, its value is not."""
    with pytest.raises(ConfigError) as caught:
        settings(**wrong)
    assert not [s for s in (SALT, KEY, TOKEN, "short-secret") if s in str(caught.value)]
    assert caught.value.__cause__ is None


class Engine:
    def __init__(self) -> None:
        self.identity = {"model": "m"}


def test_the_stamp_of_a_flow_shows_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    """What is made of the secrets can be logged by mistake without harm."""
    engine: Any = Engine()
    stamp = stamp_of(settings(), engine)
    assert stamp.auth is not None
    assert stamp.tenant_id != stamp_of(settings(salt=""), engine).tenant_id
    assert stamp.model_id == stamp_of(settings(salt=""), engine).model_id
    assert stamp_of(settings(auth_key=""), engine).auth is None
    logging.getLogger("test").warning("%r %s", stamp, stamp.auth)
    assert not [secret for secret in (SALT, KEY) if secret in caplog.text]
    assert Stamp() == Stamp()


def crafted(body: bytes) -> bytes:
    """A header of the largest size there is, with a right checksum, around ``body``."""
    size = MAX_HEADER_BYTES
    filler = bytes(size - PREFIX_BYTES - len(body))
    rest = bytes(16) + body + filler
    lengths = struct.pack("<II", size, size - PREFIX_BYTES)
    total = struct.pack("<Q", xxh3_64_intdigest(lengths + rest))
    return b"CFLWKV2\n" + lengths + total + rest


def test_a_header_cannot_make_its_reader_take_much() -> None:
    """Counts up to 2**32 in headers of up to 4 MiB with right checksums: refused, in a few times
    the header's own size. A larger header is refused by its first bytes."""
    header = bytearray(make_object(0).header)
    body = bytes(header[PREFIX_BYTES:])
    chance = random.Random(4)
    huge = []
    for _ in range(12):
        bad = bytearray(body[:400])
        for _ in range(3):
            at = chance.randrange(100, len(bad) - 4)
            struct.pack_into("<I", bad, at, chance.choice((2**32 - 1, 2**20, 2**19, 4096)))
        huge.append(crafted(bytes(bad)))
    tracemalloc.start()
    try:
        for data in huge:
            with suppress(IntegrityError):
                decode_header(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * MAX_HEADER_BYTES
    for size in (MAX_HEADER_BYTES + 4096, 2**32 - 4096):
        with pytest.raises(IntegrityError, match="header claims"):
            header_size(b"CFLWKV2\n" + struct.pack("<IIQ16x", size, size - PREFIX_BYTES, 0))
