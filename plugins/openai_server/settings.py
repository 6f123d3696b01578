"""Settings of the server: from arguments, or from ``CACHEFLOW_SERVER_*`` environment variables.

Says what is allowed and nothing else. What tiers there are and how much memory they take is said by
``cacheflow.settings``.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from cacheflow.environment import not_json, tell_unread, what_is_wrong
from cacheflow.errors import ConfigError

__all__ = ["ApiKey", "ServerSettings"]

_PREFIX: Final = "CACHEFLOW_SERVER_"


class ApiKey(BaseModel):
    """A bearer token, and the tenant that its requests belong to."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    key: SecretStr = Field(min_length=8)
    tenant: str = Field(default="", max_length=256)
    """Stored KV is never shared between tenants."""


class ServerSettings(BaseSettings):
    """Everything that can be set. ``CACHEFLOW_SERVER_MAX_RUNNING=8`` sets ``max_running``.

    Raises:
        ConfigError: a value cannot be used, or there is no such setting; the message names it.
    """

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=0, le=65535)
    """0: any free one; the log says which."""
    model_name: str = Field(default="", max_length=256)
    """What clients call the model. Empty: the name of its folder."""
    api_keys: tuple[ApiKey, ...] = Field(default=(), repr=False)
    """JSON: ``[{"key": "...", "tenant": "a"}]``. None: whoever reaches the port may ask."""
    user_is_tenant: bool = False
    """Whether requests of different ``user`` never share stored KV. Their sessions never do."""
    max_body_bytes: ByteSize = Field(default=ByteSize(8 << 20), ge=1 << 10)
    max_connections: int = Field(default=512, ge=1)
    """Sockets that are open at once. One more takes the place of the oldest one without a request;
    if all have one, it is answered 503."""
    header_seconds: float = Field(default=10.0, gt=0)
    """A connection that has not brought the head of a request by then is closed."""
    max_running: int = Field(default=16, ge=1)
    """Requests in the engine at once; others wait for their turn."""
    max_waiting: int = Field(default=64, ge=0)
    """Requests that may wait; more are answered 429 with Retry-After."""
    queue_seconds: float = Field(default=60.0, gt=0)
    """A request that waited as long is answered 429."""
    request_seconds: float = Field(default=600.0, gt=0)
    """A request that takes as long, waiting included, is ended with 504."""
    default_max_tokens: int | None = Field(default=None, ge=1)
    """Of chat completions and responses that do not say. None: what the context has room for."""
    max_sessions: int = Field(default=256, ge=1)
    """Conversations that are known at once; the one not used for longest is forgotten first."""
    max_branches: int = Field(default=8, ge=1)
    """Conversations under one ``prompt_cache_key``."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """After SIGTERM running requests have as long to end; then they are cancelled."""
    log_level: Literal["critical", "error", "warning", "info", "debug"] = "info"

    def __init__(self, **values: Any) -> None:
        tell_unread(_PREFIX, type(self).model_fields)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None
        except SettingsError as error:
            field, wrong = not_json(error, _PREFIX)
            raise ConfigError(f"server setting {field}: {wrong}") from None


def _explain(error: ValidationError) -> str:
    """Each bad setting by name and what is wrong with it, never its value: there are secrets."""
    lines = []
    for problem in error.errors(include_url=False, include_input=False):
        where = ".".join(map(str, problem["loc"]))
        what = what_is_wrong(problem)
        if problem["type"] == "extra_forbidden":
            what = f"there is no such setting (known: {', '.join(ServerSettings.model_fields)})"
        lines.append(f"server setting {where}: {what}")
    return "; ".join(lines)
