"""Options of the pool backend. Secrets have no place among them."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Final

from pydantic import Field, field_validator, model_validator

from cacheflow.errors import ConfigError
from cacheflow.pool import check_etcd_url
from cacheflow.storage_backends.options import Options

__all__ = ["Address", "PoolOptions", "parse_address", "read_token", "tls_context"]

TOKEN_VARIABLE: Final = "CACHEFLOW_POOL_TOKEN"
_DEFAULT_PORT: Final = 7411

Address = tuple[str, int]


class PoolOptions(Options):
    """Options of the ``pool`` backend: where the stores are, in one of three ways, and how to talk.

    The token that stores ask for is read from ``token_file``, or from the environment variable
    ``CACHEFLOW_POOL_TOKEN``.
    """

    peers: tuple[str, ...] = ()
    """``host:port`` of each store. Give every client the same: keys are placed by these names."""
    dns: str | None = None
    """``name:port``: every address of that name is a store (a headless service, say)."""
    etcd: str | None = None
    """``http://host:2379``: the stores that have announced themselves there."""
    etcd_prefix: str = "/cacheflow/pool/"
    replicas: int = Field(default=1, ge=1, le=8)
    """Stores that each object is written to."""
    transports: tuple[str, ...] = ("nixl", "tcp")
    """Best first; what does not work on this machine is left out."""
    token_file: Path | None = None
    tls: bool = False
    """The side channel, and the tcp transport, over TLS."""
    tls_ca: Path | None = None
    """Authority of the stores' certificates; None: the system's."""
    tls_cert: Path | None = None
    """Certificate and key of this client, in one PEM file, where stores ask for one."""
    connect_seconds: float = Field(default=2.0, gt=0, le=60)
    request_seconds: float = Field(default=1.0, gt=0, le=60)
    """A store that does not answer for so long counts as dead until it does."""
    transfer_seconds: float = Field(default=10.0, gt=0, le=600)
    """For the bytes of one read or write."""
    discovery_seconds: float = Field(default=2.0, gt=0, le=3600)
    """Between two looks at DNS or etcd."""

    @field_validator("peers")
    @classmethod
    def _addresses(cls, peers: tuple[str, ...]) -> tuple[str, ...]:
        for peer in peers:
            parse_address(peer)
        if len(set(peers)) != len(peers):
            raise ValueError("the same store is named twice")
        return peers

    @field_validator("dns")
    @classmethod
    def _address(cls, dns: str | None) -> str | None:
        if dns is not None:
            parse_address(dns)
        return dns

    @field_validator("etcd")
    @classmethod
    def _is_url(cls, etcd: str | None) -> str | None:
        return None if etcd is None else check_etcd_url(etcd)

    @model_validator(mode="after")
    def _one_way(self) -> PoolOptions:
        ways = [bool(self.peers), self.dns is not None, self.etcd is not None]
        if sum(ways) != 1:
            raise ValueError("give one of peers, dns and etcd")
        return self


def parse_address(text: str) -> Address:
    """``host:port`` or ``[v6]:port``; without a port it is 7411.

    Raises:
        ValueError: it is neither.
    """
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        host, port = text, str(_DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if "@" in host:
        raise ValueError("an address must hold no credentials")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{text!r} is not host:port")
    return host, int(port)


def read_token(options: PoolOptions) -> bytes:
    """The token; empty if there is none. Reads a file.

    Raises:
        ConfigError: the file cannot be read, or is no text.
    """
    if options.token_file is None:
        return os.environ.get(TOKEN_VARIABLE, "").encode()
    try:
        return options.token_file.read_text(encoding="utf-8").strip().encode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"storage backend 'pool', option 'token_file' ({options.token_file}): {reason}"
        ) from error


def tls_context(options: PoolOptions) -> ssl.SSLContext | None:
    """What connections are made with; None: bare TCP. Reads files.

    Raises:
        ConfigError: a file cannot be used.
    """
    if not options.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=options.tls_ca)
        if options.tls_cert is not None:
            context.load_cert_chain(options.tls_cert)
    except OSError as error:  # SSLError is one
        reason = error.strerror or str(error)
        raise ConfigError(f"storage backend 'pool', options 'tls_*': {reason}") from error
    return context
