"""Settings of one CacheFlow: from arguments, or from ``CACHEFLOW_*`` environment variables.

Says what is allowed and nothing else: it opens no folder and loads no model, and it does not know
which backends are installed or what their options mean.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from cacheflow.environment import PREFIX, not_json, tell_unread, what_is_wrong
from cacheflow.errors import ConfigError
from cacheflow.types import Codec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Settings", "TierSettings", "default_cache_dir"]

_LEAST_SECRET: Final = 16
"""Characters of a secret that cannot be tried out."""


def default_cache_dir() -> Path:
    """Where models and costs are kept: ``$XDG_CACHE_HOME`` or ``~/.cache``, in ``cacheflow``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "cacheflow"


class TierSettings(BaseModel):
    """One place where chunks live: a backend by its registry name, and that backend's options.

    Raises:
        ConfigError: a value cannot be used, or there is no such field; the message names it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    if not TYPE_CHECKING:  # whose readers know the fields from the class

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise _TierError(list(_problems(error, TierSettings))) from None

    name: str = Field(min_length=1, max_length=64)
    """What metrics and messages call it; unique."""
    backend: str = Field(min_length=1)
    options: dict[str, Any] = Field(default_factory=dict, repr=False)
    codec: Codec = Codec.RAW
    """How chunks are stored here (docs/compression.md): ``raw``, ``zstd`` (lossless), or ``int8``
    or ``fp8``, which are lossy and need ``allow_lossy``. Chunks of any codec are read anywhere."""
    capacity_bytes: ByteSize | None = Field(default=None, ge=1 << 20)
    """Most bytes of objects; more evict others. None: as many as the backend takes, which has a cap
    of its own (docs/tiers.md says which)."""
    eviction: Literal["lru", "s3fifo", "cost-aware"] = "cost-aware"
    """What leaves first: docs/tiers.md says how each decides."""
    ttl: float | None = Field(default=None, gt=0)
    """Seconds after which a stored object is gone, used or not. None: it may stay for ever."""
    tenant_quota_bytes: ByteSize | None = Field(default=None, ge=1 << 20)
    """Most bytes of any one tenant (salt); one that needs more evicts its own first."""
    pin_bytes: ByteSize = Field(default=ByteSize(0), ge=0)
    """What each tenant may have pinned at once. 0: pins are refused."""
    lease_seconds: float = Field(default=10.0, gt=0, le=3600)
    """How long what a lookup found is safe from eviction; while it is being read it always is."""
    load_operations: int = Field(default=256, ge=1)
    load_bytes: ByteSize = Field(default=ByteSize(256 << 20), ge=1 << 20)
    """Reads handed to the backend at once; others wait in the order of arrival."""
    store_operations: int = Field(default=64, ge=1)
    store_bytes: ByteSize = Field(default=ByteSize(256 << 20), ge=1 << 20)


class Settings(BaseSettings):
    """Everything that can be set. ``CACHEFLOW_STAGING_BYTES=256MiB`` sets ``staging_bytes``.

    Lists are JSON: ``CACHEFLOW_TIERS='[{"name": "disk", "backend": "nvme", "options": {...}}]'``.
    A variable that nobody reads is warned of, once a process; an empty one is none.

    Raises:
        ConfigError: a value cannot be used, or there is no such setting; the message names it.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    cache_dir: Path = Field(default_factory=default_cache_dir)
    """Where converted models and learned costs are kept."""
    keep_costs: bool = True
    """Begin with the costs that earlier processes learned, and leave them to the next (a small file
    in ``cache_dir``)."""
    keep_departures: bool = True
    """Note which chunks leave tiers that last, and why, for ``cacheflow explain`` (digests only, at
    most 2 MiB a tier in ``cache_dir``)."""
    tiers: tuple[TierSettings, ...] = ()
    """Fastest first."""
    staging_bytes: ByteSize = Field(default=ByteSize(256 << 20), ge=1 << 20)
    """Cap of the host memory that loads land in before they are verified."""
    load_deadline: float = Field(default=30.0, gt=0, le=3600)
    """Seconds after which any one load is given up and recomputed: an absolute upper bound."""
    flush_seconds: float = Field(default=10.0, ge=0, le=3600)
    """Closing waits at most this long for what is still to be stored; the rest is dropped."""
    write_policy: Literal["all", "planned"] = "all"
    """Which chunks of a finished request are stored: ``planned`` leaves out the head that any
    restore would recompute anyway."""
    policy: Literal[
        "adaptive", "staircase", "two-pointer", "cake", "cake-sjf", "load", "recompute"
    ] = "adaptive"
    """Who makes a cell ready: docs/scheduling.md says what each does."""
    objective: Literal["tail", "mean", "deadline", "makespan"] = "tail"
    """What the order of waiting requests is for."""
    mode: Literal["exact", "fast"] = "exact"
    """``fast``: tiles are chunks, several of which, of one or several requests, are computed in one
    pass (docs/scheduling.md). Their KV is right within the dtype's tolerance, not bit for bit, so
    it counts as lossy: it needs ``allow_lossy``, and no flow without that ever loads it. The engine
    has to be opened in the same mode."""
    max_restores: int | None = Field(default=None, ge=1)
    """Restores under way at once; others wait for their turn in the order of the objective. None:
    any number."""
    max_restore_tokens: int | None = Field(default=None, ge=1)
    """Tokens of their prompts together, what they share counted once; a longer prompt goes alone.
    None: any number."""
    salt: SecretStr = SecretStr("")
    """Tenant salt: other salts never share stored chunks. Hashed into keys, never stored."""
    auth_key: SecretStr = SecretStr("")
    """Secret that chunks are authenticated with; chunks without are then refused. Empty: stores are
    trusted (SECURITY.md)."""
    allow_lossy: bool = Field(default=False, validate_default=True)
    """Whether KV that a lossy codec has touched, or fast mode has computed, may be used, and
    stored."""

    def __init__(self, **values: Any) -> None:
        tell_unread(PREFIX, type(self).model_fields)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_told("setting", _problems(error, Settings))) from None
        except SettingsError as error:
            raise ConfigError(_told("setting", [not_json(error, PREFIX)])) from None

    @field_validator("cache_dir")
    @classmethod
    def _is_path(cls, path: Path) -> Path:
        if "\0" in str(path):
            raise ValueError("it holds a NUL, which no path can")
        return path

    @field_validator("tiers")
    @classmethod
    def _unique(cls, tiers: tuple[TierSettings, ...]) -> tuple[TierSettings, ...]:
        names = [tier.name for tier in tiers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two tiers are called {name!r}: give each its own name")
        return tiers

    @field_validator("auth_key")
    @classmethod
    def _long_enough(cls, key: SecretStr) -> SecretStr:
        if 0 < len(key.get_secret_value()) < _LEAST_SECRET:
            raise ValueError(f"give at least {_LEAST_SECRET} characters, random ones")
        return key

    @field_validator("allow_lossy")
    @classmethod
    def _lossy_on_purpose(cls, allowed: bool, others: ValidationInfo) -> bool:
        for tier in others.data.get("tiers", ()):
            if tier.codec.is_lossy and not allowed:
                raise ValueError(
                    f"tier {tier.name!r} is to store with codec {tier.codec}, which is lossy: set "
                    "allow_lossy to true if that may be"
                )
        if others.data.get("mode") == "fast" and not allowed:
            raise ValueError("mode is fast, whose KV is not exact: set it to true if that may be")
        return allowed

    @property
    def salt_bytes(self) -> bytes:
        """The salt as the key root takes it; empty when none is set."""
        return self.salt.get_secret_value().encode()

    @property
    def auth_bytes(self) -> bytes:
        """The secret that chunks are authenticated with; empty when none is set."""
        return self.auth_key.get_secret_value().encode()


class _TierError(ConfigError, ValueError):
    """A ValueError as well, so that pydantic gathers it with what else is wrong with settings."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        super().__init__(_told("tier setting", problems))
        self.problems = problems


def _problems(error: ValidationError, cls: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Each bad field of ``cls``, and what is wrong with it (never its value: secrets)."""
    for problem in error.errors(include_url=False, include_input=False):
        where = ".".join(map(str, problem["loc"]))
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, _TierError):
            yield from ((f"{where}.{field}", what) for field, what in cause.problems)
        elif problem["type"] == "extra_forbidden":
            kind = "setting" if cls is Settings else "field"
            yield where, f"there is no such {kind} (known: {', '.join(cls.model_fields)})"
        else:
            yield where, what_is_wrong(problem)


def _told(what: str, problems: Iterable[tuple[str, str]]) -> str:
    """One line."""
    return "; ".join(f"{what} {where}: {wrong}" for where, wrong in problems)
