"""What can be set of a store process; says what is allowed and opens nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import ByteSize, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from cacheflow.environment import not_json, tell_unread, what_is_wrong
from cacheflow.errors import ConfigError
from cacheflow.pool.etcd import check_etcd_url
from cacheflow.settings import TierSettings

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = ["StoreSettings"]

_PREFIX: Final = "CACHEFLOW_STORE_"
_LEAST_TOKEN: Final = 16
_LOOKUP_LEASE: Final = 1.0
"""Seconds that what a lookup found is spared: whoever wants to read it leases it."""
_MOST_FILLING: Final = 4096


class StoreSettings(BaseSettings):
    """``CACHEFLOW_STORE_ARENA=4GiB`` sets ``arena``, and so on; arguments win. Lists are JSON; an
    empty variable is none.

    Raises:
        ConfigError: a value cannot be used; the message names it.
    """

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    arena: ByteSize = Field(default=ByteSize(1 << 30), ge=1 << 16)
    """Memory for objects, registered once and touched as it fills."""
    host: str = "127.0.0.1"
    """Address to listen at; ``0.0.0.0`` for all. Without a token only loopback is allowed."""
    port: int = Field(default=7411, ge=0, le=65535)
    """Of the side channel; 0: any."""
    data_port: int = Field(default=7412, ge=0, le=65535)
    """Where the tcp transport listens; 0: any."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Of ``/metrics``, on the same host; None: not served."""
    transports: tuple[str, ...] = ("nixl", "tcp")
    """Those offered to clients; what does not work here is left out, with a warning."""
    token: SecretStr = SecretStr("")
    """Clients must say it; empty: whoever can connect may read and write."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    """Clients must have a certificate of this authority."""
    eviction: Literal["lru", "s3fifo", "cost-aware"] = "cost-aware"
    ttl: float | None = Field(default=None, gt=0)
    """Seconds after which an object is gone, used or not."""
    tenant_quota: ByteSize | None = Field(default=None, ge=1 << 20)
    """Most bytes of the arena for any one tenant; as much again on disk."""
    spill: Path | None = None
    """Folder of the disk tier; None: there is none."""
    spill_bytes: ByteSize | None = Field(default=None, ge=1 << 20)
    """Cap of that folder; None: half of its file system."""
    lease_seconds: float = Field(default=10.0, gt=0.1, le=600)
    """How long a client may read what it was promised without asking again."""
    fill_seconds: float = Field(default=60.0, gt=0.1, le=3600)
    """A client that takes longer to write an object is disconnected."""
    drain_seconds: float = Field(default=30.0, ge=0, le=3600)
    """After SIGTERM: for clients to finish, and for the disk to catch up."""
    max_clients: int = Field(default=512, ge=1)
    etcd: str | None = None
    """``http://host:2379``: announce this store there."""
    etcd_prefix: str = "/cacheflow/pool/"
    etcd_ttl: int = Field(default=10, ge=1, le=600)
    """Seconds after which a store that has died is taken off the list."""
    advertise: str | None = None
    """``host:port`` that clients reach this store at, for etcd."""

    def __init__(self, **values: Any) -> None:
        tell_unread(_PREFIX, type(self).model_fields)
        try:
            super().__init__(**values)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_input=False)
            raise ConfigError("; ".join(map(_told, problems))) from None
        except SettingsError as error:
            field, wrong = not_json(error, _PREFIX)
            raise ConfigError(f"store setting {field}: {wrong}") from None
        self._check()

    @field_validator("token")
    @classmethod
    def _long_enough(cls, token: SecretStr) -> SecretStr:
        if 0 < len(token.get_secret_value()) < _LEAST_TOKEN:
            raise ValueError(f"give at least {_LEAST_TOKEN} characters, random ones")
        return token

    @field_validator("etcd")
    @classmethod
    def _is_url(cls, etcd: str | None) -> str | None:
        return None if etcd is None else check_etcd_url(etcd)

    @field_validator("advertise")
    @classmethod
    def _is_address(cls, advertise: str | None) -> str | None:
        host, _, port = (advertise or "host:1").rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ValueError("write it as host:port, which clients are to connect to")
        return advertise

    def _check(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("store settings tls_cert and tls_key: give both, or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("store setting tls_client_ca: needs tls_cert and tls_key")
        if self.etcd is not None and self.advertise is None:
            raise ConfigError("store setting advertise: say how clients reach this store")
        is_open = not self.token.get_secret_value() and self.tls_client_ca is None
        if is_open and self.host not in ("127.0.0.1", "::1", "localhost"):
            raise ConfigError(
                f"store setting token: {self.host} can be reached from elsewhere; give a token or "
                "tls_client_ca"
            )

    def arena_tier(self, capacity: int) -> TierSettings:
        """How the arena is kept."""
        return TierSettings.model_validate(
            {
                "name": "arena",
                "backend": "arena",
                "capacity_bytes": max(capacity, 1 << 20),
                "eviction": self.eviction,
                "ttl": self.ttl,
                "tenant_quota_bytes": self.tenant_quota,
                "lease_seconds": _LOOKUP_LEASE,
                "store_operations": _MOST_FILLING,
            }
        )

    def spill_tier(self) -> TierSettings | None:
        """How the disk is kept."""
        if self.spill is None:
            return None
        options: dict[str, Any] = {"path": str(self.spill), "fsync": False}
        if self.spill_bytes is not None:
            options["max_bytes"] = int(self.spill_bytes)
        return TierSettings.model_validate(
            {
                "name": "spill",
                "backend": "nvme",
                "options": options,
                "eviction": self.eviction,
                "ttl": self.ttl,
                "tenant_quota_bytes": self.tenant_quota,
                "lease_seconds": _LOOKUP_LEASE,
            }
        )


def _told(problem: ErrorDetails) -> str:
    where = ".".join(map(str, problem["loc"]))
    return f"store setting {where}: {what_is_wrong(problem)}"
