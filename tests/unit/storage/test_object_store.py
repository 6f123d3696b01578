"""The object store tier: few requests and bounded ones, honest errors, no secret in any."""

from __future__ import annotations

import asyncio
import logging
import traceback
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.errors import BackendError, ConfigError
from cacheflow.memory import InFlight
from cacheflow.storage_backends.object_store import (
    ObjectStoreBackend,
    ObjectStoreOptions,
    backend,
    headers,
    names,
)
from cacheflow.storage_backends.object_store.opening import make_store
from cacheflow.testing.objects import aligned_buffer, load_one, make_object
from cacheflow.testing.storage_harness import idle, load_all, store_all
from cacheflow.types import Read, Span, TransferStatus
from tests.unit.storage.answers import answering

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cacheflow.testing.objects import StoredObject
    from cacheflow.testing.s3_server import S3Server

QUICK: dict[str, object] = {"timeout": 1.0, "connect_timeout": 0.5, "retries": 1}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials of nobody, and no cloud to ask for others."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDNOBODY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nobodys-secret")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server


class Counted:
    """An obstore store that counts requests and how many were under way at once."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: list[str] = []
        self.under_way = self.most = 0

    def list(self, *args: Any, **options: Any) -> Any:
        self.calls.append("list")
        return self._store.list(*args, **options)

    def __getattr__(self, name: str) -> Any:
        async def counted(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            try:
                return await getattr(self._store, name)(*args, **options)
            finally:
                self.under_way -= 1

        return counted


async def open_store(**options: object) -> ObjectStoreBackend:
    return await ObjectStoreBackend.open({"url": "memory:///", **options})


def count(store: ObjectStoreBackend) -> Counted:
    counted: Any = Counted(store._store)
    store._store = store._headers._store = counted
    return counted  # type: ignore[no-any-return]


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"url": "https://bucket.s3.amazonaws.com/x"}, "s3://"),
        ({"url": "s3:///no-bucket"}, "no bucket"),
        ({"url": "file://relative/folder"}, "three slashes"),
        ({"url": "s3://key:SESAME@bucket/x"}, "no credentials"),
        ({"url": "az://container/x?sig=SESAME"}, "no credentials"),
        ({"url": "s3://b/x", "endpoint": "http://key:SESAME@host"}, "no credentials"),
        ({"url": "s3://b/x", "endpoint": "host:9000"}, "http://"),
        ({"url": "memory:///", "endpoint": "http://host"}, "s3://"),
        ({"url": "memory:///", "secret_access_key": "SESAME"}, "secret_access_key"),
        ({"url": "memory:///", "part_bytes": 1}, "part_bytes"),
        ({}, "url"),
    ],
)
async def test_bad_options(options: dict[str, object], word: str) -> None:
    """Options that make no store, and any that would hold a secret, are refused by name; the
    message repeats no secret."""
    with pytest.raises(ConfigError, match="object-store") as caught:
        await ObjectStoreBackend.open(options)
    assert word in str(caught.value)
    assert "SESAME" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("anonymous", [True, False])
@pytest.mark.parametrize(
    ("url", "kind"), [("gs://bucket/a/b", "GCSStore"), ("az://container/a/b", "AzureStore")]
)
def test_clients_of_other_clouds(
    url: str, kind: str, anonymous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients of GCS and Azure are made with the prefix, the bounds and the account of the
    environment. (That is all that is tested of them: there is no server for them here.)"""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    options = ObjectStoreOptions.parse("object-store", {"url": url, "anonymous": anonymous})
    store: Any = make_store(options)
    assert type(store).__name__ == kind
    assert store.prefix == "a/b"
    assert store.retry_config["max_retries"] == options.retries
    assert store.client_options["timeout"]


async def test_a_folder_is_private(tmp_path: Path) -> None:
    """A folder that is made is for this user only."""
    await (await open_store(url=f"file://{tmp_path}/store")).aclose()
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700


# -- opening ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "error", "words"),
    [
        (404, "NoSuchBucket", ConfigError, ("404 NoSuchBucket", "spelled")),
        (403, "InvalidAccessKeyId", ConfigError, ("InvalidAccessKeyId", "AWS_ACCESS_KEY_ID")),
        (403, "SignatureDoesNotMatch", ConfigError, ("AWS_SECRET_ACCESS_KEY",)),
        (503, "SlowDown", BackendError, ("503 SlowDown",)),
        (0, "", BackendError, ("no answer in time",)),
    ],
)
async def test_opening_says_what_is_wrong(
    status: int, code: str, error: type[Exception], words: Sequence[str]
) -> None:
    """A bad bucket and bad credentials are ConfigErrors with what to do; a server in trouble or
    one that hangs is a temporary BackendError, within the time set."""
    async with answering(status, code) as server:
        with pytest.raises(error) as caught:
            await open_store(url="s3://bucket/x", endpoint=server.endpoint, **QUICK)
    for word in words:
        assert word in str(caught.value)
    if isinstance(caught.value, BackendError):
        assert caught.value.is_temporary
        # One further attempt, as set, unless the time is up: the server that hangs used it all.
        assert server.requests == (2 if status else 1)


async def test_a_server_that_is_not_there() -> None:
    """A refused connection is a temporary BackendError."""
    with pytest.raises(BackendError, match="cannot be reached") as caught:
        await open_store(url="s3://bucket/x", endpoint="http://127.0.0.1:9", **QUICK)
    assert caught.value.is_temporary


async def test_wrong_credentials_on_a_real_server(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's refusal is a ConfigError that names the variables; a bucket that is not there
    is one that asks for its spelling."""
    with pytest.raises(ConfigError, match="NoSuchBucket"):
        await open_store(url="s3://no-such-bucket/x", endpoint=s3.endpoint)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY"):
        await ObjectStoreBackend.open(s3.options("x"))


# -- errors of requests ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "temporary", "outcome"),
    [
        (503, "SlowDown", True, TransferStatus.FAILED),
        (500, "InternalError", True, TransferStatus.FAILED),
        (429, "TooManyRequests", True, TransferStatus.FAILED),
        (403, "AccessDenied", False, TransferStatus.FAILED),
        (400, "BadRequest", False, TransferStatus.FAILED),
        (507, "InsufficientStorage", True, TransferStatus.FULL),
        (0, "", True, TransferStatus.FAILED),
    ],
)
async def test_what_may_pass_is_temporary(
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
    temporary: bool,
    outcome: TransferStatus,
) -> None:
    """Errors of reads, writes, lookups and deletes say whether the same call may succeed later; a
    store without room answers FULL; every buffer is let go."""
    monkeypatch.setattr(backend, "check", _no_check)
    stored, hold = make_object(1), InFlight()
    async with answering(status, code) as server:
        options = {**QUICK, "timeout": 0.3, "retries": 0}
        store = await open_store(url="s3://bucket/x", endpoint=server.endpoint, **options)
        [written] = await store.store([stored.write(hold=hold)])
        assert written.status is outcome
        [read] = await load_all(store, [Read(stored.key, 0, aligned_buffer(4096, hold))])
        assert read.status is TransferStatus.FAILED
        errors: list[Any] = [written.error, read.error]
        for call in (store.lookup([stored.key.chunk]), store.delete([stored.key])):
            with pytest.raises(BackendError) as caught:
                await call
            errors.append(caught.value)
        await store.aclose()
    assert [error.is_temporary for error in errors] == [temporary] * 4
    assert [error.operation for error in errors] == ["store", "load", "lookup", "delete"]
    await idle(hold)


async def test_no_secret_in_any_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, s3: S3Server
) -> None:
    """Keys, secrets and tokens of the environment are in no exception, traceback, repr or log line,
    even where the server repeats them; they come from the environment only."""
    caplog.set_level(logging.DEBUG)
    key, secret = s3.secrets
    monkeypatch.setenv("AWS_SESSION_TOKEN", token := "a-token-nobody-sees")
    monkeypatch.setattr(backend, "check", _no_check)
    stored, seen = make_object(1), ""
    async with answering(403, "InvalidAccessKeyId", key=f"{key} {secret}") as server:
        for endpoint in (server.endpoint, s3.endpoint):  # the real one dislikes the token
            store = await open_store(url="s3://bucket/x", endpoint=endpoint, **QUICK)
            seen += repr(store) + repr(store.options) + repr(store._store)
            [written] = await store.store([stored.write()])
            read, _ = await load_one(store, stored.key, 0, 4096)
            seen += f"{written!r} {read!r}"
            for call in (store.lookup([stored.key.chunk]), store.used_bytes()):
                with pytest.raises(BackendError) as caught:
                    await call
                seen += "".join(traceback.format_exception(caught.value))
            await store.aclose()
    seen += caplog.text
    assert "InvalidAccessKeyId" in seen
    assert not [each for each in (key, secret, token) if each in seen]


# -- requests --------------------------------------------------------------------------------------


async def test_a_lookup_is_two_rounds_then_one(s3: S3Server) -> None:
    """64 chunks: a listing each, all at once, then the headers; the second time listings only,
    which notice what another process has replaced or deleted."""
    objects = [make_object(number, layers=Span(0, 1)) for number in range(64)]
    chunks = [each.key.chunk for each in objects]
    one = await ObjectStoreBackend.open(s3.options("rounds"))
    two = await ObjectStoreBackend.open({**s3.options("rounds"), "concurrency": 64})
    await store_all(one, *objects)
    counted = count(two)
    assert await two.lookup(chunks) == [[each.info] for each in objects]
    assert sorted(counted.calls) == ["get_async"] * 64 + ["list"] * 64
    counted.calls.clear()
    assert await two.lookup(chunks) == [[each.info] for each in objects]
    assert counted.calls == ["list"] * 64
    objects[0] = make_object(0, 1, layers=Span(0, 1))
    await store_all(one, objects[0])
    await one.delete([objects[1].key])
    counted.calls.clear()
    assert await two.lookup(chunks[:3]) == [[objects[0].info], [], [objects[2].info]]
    assert sorted(counted.calls) == ["get_async", "list", "list", "list"]
    await one.aclose()
    await two.aclose()


async def test_requests_at_once_are_bounded() -> None:
    """No more requests are under way than ``concurrency``, however many are asked for."""
    objects = [make_object(number) for number in range(40)]
    store = await open_store(concurrency=3)
    await store_all(store, *objects)
    counted = count(store)
    reads = [Read(each.key, 0, aligned_buffer(len(each.data))) for each in objects]
    results = await load_all(store, reads)
    assert {result.status for result in results} == {TransferStatus.OK}
    assert counted.most == 3
    await store.aclose()


async def test_cancelling_frees_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that hangs and is cancelled gives up its slot and its buffer at once."""
    monkeypatch.setattr(backend, "check", _no_check)
    stored, hold = make_object(1), InFlight()
    async with answering(0) as server:
        options = {**QUICK, "timeout": 60, "concurrency": 1}
        store = await open_store(url="s3://bucket/x", endpoint=server.endpoint, **options)
        for _ in range(2):  # the second one gets as far as the first
            server.asked.clear()
            buffer = aligned_buffer(4096, hold)
            load = asyncio.ensure_future(load_all(store, [Read(stored.key, 0, buffer)]))
            await asyncio.wait_for(server.asked.wait(), 10)
            load.cancel()
            await asyncio.wait([load])
            await idle(hold)
        await store.aclose()


async def test_large_headers_are_read_in_one_request_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A header that is larger than expected costs a second request once, not again."""
    monkeypatch.setattr(headers, "_FIRST_GUESS", 64)
    store = await open_store()
    await store_all(store, make_object(1), make_object(2))
    counted = count(store)
    for number, requests in ((1, 2), (2, 1)):
        counted.calls.clear()
        stored = make_object(number)
        assert await store.lookup([stored.key.chunk]) == [[stored.info]]
        assert counted.calls.count("get_async") == requests
    await store.aclose()


async def test_what_is_not_ours_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other objects under the prefix are neither listed nor counted nor reported; a listing of
    many pages is walked to its end."""
    monkeypatch.setattr(backend, "_PAGE_OBJECTS", 10)
    objects = [make_object(number, layers=Span(0, 1)) for number in range(35)]
    store = await open_store()
    await store_all(store, *objects)
    folder = names.folder_of(objects[0].key.chunk)
    elsewhere = f"{folder}/{names.path_of(objects[1].key).partition('/')[2]}"
    for path in ("readme.txt", f"{folder}/notes", elsewhere, f"x/{names.path_of(objects[2].key)}"):
        store._store.put(path, b"something else")
    assert await store.lookup([objects[0].key.chunk]) == [[objects[0].info]]
    found = [info.key async for info in store.scan()]
    assert sorted(found) == sorted(each.key for each in objects)
    assert await store.used_bytes() == sum(len(each.data) for each in objects)
    await store.aclose()


# -- large objects ---------------------------------------------------------------------------------


def large_object(number: int) -> StoredObject:
    """One of 12 MiB and a bit: 512 layers' worth of payload under a layout of its own."""
    from dataclasses import replace

    from cacheflow.kv import decode_header, seal
    from cacheflow.testing.objects import TINY, StoredObject

    layout = replace(TINY, num_layers=96, chunk_tokens=512)
    key = replace(make_object(number).key, layers=Span(0, 96))
    payload = bytearray(number.to_bytes(4, "little") * (layout.payload_bytes() // 4))
    _, header = seal(
        key, layout, memoryview(payload), grid_id="large", segments=(), canonical=False
    )
    return StoredObject(decode_header(header), header, bytes(payload))


async def test_large_objects_are_written_in_parts(s3: S3Server) -> None:
    """An object over ``part_bytes`` is uploaded in parts from the caller's memory, becomes visible
    whole, and is read like any other; cancelled or not, no upload is left unfinished."""
    options = {**s3.options("large"), "part_bytes": 5 << 20}
    store = await ObjectStoreBackend.open(options)
    stored, hold = await asyncio.to_thread(large_object, 1), InFlight()
    [result] = await store.store([stored.write(hold=hold)])
    assert result.status is TransferStatus.OK, result
    await idle(hold)
    meta = await store._store.head_async(names.path_of(stored.key))
    assert str(meta["e_tag"]).strip('"').endswith("-3")
    assert await store.lookup([stored.key.chunk]) == [[stored.info]]
    _, data = await load_one(store, stored.key, 0, len(stored.data))
    assert data == stored.data
    other = await asyncio.to_thread(large_object, 2)
    write = asyncio.ensure_future(store.store([other.write(hold=hold)]))
    await asyncio.sleep(0)
    write.cancel()
    await asyncio.wait([write])
    await idle(hold)
    assert await asyncio.to_thread(s3.unfinished_uploads) == 0
    await store.aclose()


async def _no_check(store: object, options: object) -> None:
    """In the place of looking into the bucket at open."""
