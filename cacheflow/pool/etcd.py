"""etcd over its HTTP/JSON gateway: who is there, told by those who are.

A store writes one key under a lease that it keeps alive; a client reads all keys of the prefix.
Needs httpx. Every call has a deadline; what fails is tried again, and what was known stays known.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

from cacheflow.errors import BackendError, ConfigError

if TYPE_CHECKING:
    import httpx

    from cacheflow.pool.settings import StoreSettings

__all__ = ["Announcement", "Etcd", "check_etcd_url"]

_log = logging.getLogger(__name__)
_SECONDS: Final = 3.0
_LATER: Final = 1.0
"""Seconds between two attempts to announce a store."""


class Etcd:
    """One etcd server, or one of a cluster, at ``url``. Made by :meth:`open`."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self._url = url.rstrip("/")
        self._http = http

    @classmethod
    async def open(cls, url: str) -> Self:
        """Nothing is asked yet.

        Raises:
            ConfigError: httpx is not installed.
        """
        return cls(url, await asyncio.to_thread(_client))

    async def list(self, prefix: str) -> dict[str, str]:
        """Keys under ``prefix`` and their values."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        found = await self._call("kv/range", {"key": _b64(prefix), "range_end": _b64(end)})
        entries = found.get("kvs", [])
        return {_text(entry["key"]): _text(entry.get("value", "")) for entry in entries}

    async def grant(self, seconds: int) -> str:
        """A lease of ``seconds``; its id."""
        return str((await self._call("lease/grant", {"TTL": seconds})).get("ID", ""))

    async def put(self, key: str, value: str, lease: str) -> None:
        """Write ``key``, for as long as ``lease`` lasts."""
        await self._call("kv/put", {"key": _b64(key), "value": _b64(value), "lease": lease})

    async def keep_alive(self, lease: str) -> bool:
        """Renew; False if the lease is over."""
        found = await self._call("lease/keepalive", {"ID": lease})
        return int(found.get("result", {}).get("TTL", 0)) > 0

    async def revoke(self, lease: str) -> None:
        """End it, and remove its keys."""
        await self._call("lease/revoke", {"ID": lease})

    async def aclose(self) -> None:
        """Idempotent."""
        await self._http.aclose()

    async def _call(self, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        import httpx

        try:
            answer = await self._http.post(f"{self._url}/v3/{path}", json=fields)
            answer.raise_for_status()
            found = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            reason = f"{type(error).__name__} {error}".strip()
            raise BackendError(
                reason, operation=path, context=self._url, is_temporary=True
            ) from error
        if not isinstance(found, dict):
            raise BackendError("its answer is no object", operation=path, context=self._url)
        return found


def check_etcd_url(url: str) -> str:
    """``url``; raises ValueError if it is none of an etcd server, or holds what must not be
    printed."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError("write it as http://host:2379")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("must hold no credentials, query or fragment")
    return url


class Announcement:
    """A store says that it is there, until it is closed."""

    def __init__(self, settings: StoreSettings, etcd: Etcd) -> None:
        assert settings.advertise is not None
        self._etcd = etcd
        self._key = settings.etcd_prefix + settings.advertise
        self._value = json.dumps({"address": settings.advertise})
        self._ttl = settings.etcd_ttl
        self._lease = ""
        self._is_written = False
        """The key is there, under that lease: one without it could be kept alive for ever."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; :meth:`aclose` must follow."""
        self._task = asyncio.create_task(self._run())

    async def aclose(self) -> None:
        """Take the store off the list at once. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])
        if self._lease:
            with suppress(BackendError):  # then the lease ends by itself
                await self._etcd.revoke(self._lease)
        await self._etcd.aclose()

    async def _run(self) -> None:
        while True:
            try:
                if not (self._is_written and await self._etcd.keep_alive(self._lease)):
                    self._is_written = False
                    self._lease = await self._etcd.grant(self._ttl)
                    await self._etcd.put(self._key, self._value, self._lease)
                    self._is_written = True
                    _log.info("announced as %s", self._key)
            except Exception as error:  # of answers of another shape, too: the store stays unseen
                _log.warning("cannot be announced: %s", error)
                await asyncio.sleep(_LATER)
                continue
            await asyncio.sleep(self._ttl / 3)


def _client() -> httpx.AsyncClient:
    """Imports, and reads certificates: not on the loop."""
    try:
        import httpx
    except ImportError as error:
        raise ConfigError("etcd needs httpx: pip install 'cacheflow-kv[etcd]'") from error
    return httpx.AsyncClient(timeout=_SECONDS)


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _text(data: str) -> str:
    return base64.b64decode(data).decode("utf-8", "replace")
