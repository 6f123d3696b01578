"""From options to an opened store: the client is made, and the bucket looked at once.

Nothing is written: a store needs no marker, every object says what it is.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from cacheflow.errors import ConfigError
from cacheflow.storage_backends.object_store.problems import (
    STORE_ERRORS,
    is_refusal,
    problem,
    summary,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from cacheflow.storage_backends.object_store.settings import ObjectStoreOptions

__all__ = ["check", "make_store"]

_CREDENTIALS: Final = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN)",
    "gs": "GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or a token)",
    "file": "the rights of this user",
}
"""Where the credentials of a kind of store come from."""


def make_store(options: ObjectStoreOptions) -> ObjectStore:
    """The client; blocking for a folder, which is made if it is missing.

    Raises:
        ConfigError: the options make no store.
    """
    try:
        return _make(options)
    except STORE_ERRORS as error:
        raise ConfigError(_about(options, f"{summary(error)}: check the options")) from None


async def check(store: ObjectStore, options: ObjectStoreOptions) -> None:
    """One listing: is there such a bucket, and may we look into it?

    Raises:
        ConfigError: there is none, or the credentials are refused.
        BackendError: it cannot be told now: the server does not answer as it should.
    """
    try:
        await anext(store.list(chunk_size=1), None)
    except STORE_ERRORS as error:
        failure = problem(error, "open", options.url)
        if is_refusal(error):
            where = _CREDENTIALS[options.scheme]
            raise ConfigError(_about(options, f"{summary(error)}; set {where}")) from None
        if failure.is_temporary:
            raise failure from None
        raise ConfigError(_about(options, f"{summary(error)}; is it spelled right?")) from None


def _make(options: ObjectStoreOptions) -> ObjectStore:
    parts = urlsplit(options.url)
    if options.scheme != "s3" and (options.endpoint or options.region):
        raise ConfigError(_about(options, "endpoint and region belong to s3:// only"))
    match options.scheme:
        case "memory":
            return MemoryStore()
        case "file":
            folder = Path(unquote(parts.path))
            os.makedirs(folder, mode=0o700, exist_ok=True)  # noqa: PTH103 - the mode of parents too
            return LocalStore(folder, automatic_cleanup=True)
        case "s3":
            return S3Store(parts.netloc, config=_s3(options), **_shared(options))
        case "gs":
            config: Any = {"skip_signature": True} if options.anonymous else None
            return GCSStore(parts.netloc, config=config, **_shared(options))
        case _:
            config = {"skip_signature": True} if options.anonymous else None
            return AzureStore(parts.netloc, config=config, **_shared(options))


def _s3(options: ObjectStoreOptions) -> Any:
    config: dict[str, str | bool] = {}
    if options.endpoint:
        config["endpoint"] = options.endpoint
    if options.region:
        config["region"] = options.region
    if options.anonymous:
        config["skip_signature"] = True
    return config


def _shared(options: ObjectStoreOptions) -> Any:
    """What all remote stores take: the prefix, and bounds on time and attempts."""
    timeout = timedelta(seconds=options.timeout)
    client: dict[str, Any] = {
        "timeout": timeout,
        "connect_timeout": timedelta(seconds=options.connect_timeout),
    }
    if options.endpoint and options.endpoint.startswith("http:"):
        client["allow_http"] = True
    return {
        "prefix": urlsplit(options.url).path.strip("/") or None,
        "client_options": client,
        "retry_config": {"max_retries": options.retries, "retry_timeout": timeout},
    }


def _about(options: ObjectStoreOptions, what: str) -> str:
    return f"storage backend 'object-store', option 'url' ({options.url}): {what}"
