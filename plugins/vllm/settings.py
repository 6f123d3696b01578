"""Settings of the vLLM plugin: those of CacheFlow and a few of its own.

From ``kv_connector_extra_config``, which comes first, or from ``CACHEFLOW_*``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pydantic import ByteSize, Field

from cacheflow.errors import ConfigError
from cacheflow.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["OUTSIDE_SHARE", "POLICIES", "VllmSettings", "policy_of"]

POLICIES: Final = ("adaptive", "load", "recompute")
"""Of the policies of :class:`cacheflow.settings.Settings`, those an engine that schedules itself
can follow."""


OUTSIDE_SHARE: Final = 0.7
"""Of the staging memory: what prefixes may fill before their requests enter the batch."""


class VllmSettings(Settings):
    """Everything that can be set for vLLM."""

    staging_bytes: ByteSize = Field(default=ByteSize(1 << 30), ge=1 << 20)
    """Cap of the worker's host memory that loads and stores pass through. A prefix that fits is
    loaded before the request takes any blocks."""
    save: bool = True
    """Store what is computed."""
    overlap: bool = True
    """Compute what is behind a prefix while its last layers are still being loaded."""
    lookup_patience: float = Field(default=0.25, gt=0, le=60)
    """Seconds a request waits for the tiers to say what they have."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> VllmSettings:
        """The settings in ``kv_connector_extra_config``, or from the environment.

        Raises:
            ConfigError: a value cannot be used; the message names it.
        """
        settings = cls(**extra)
        if settings.policy not in POLICIES:
            raise ConfigError(
                f"setting policy: {settings.policy!r} needs an engine that CacheFlow schedules; "
                f"vLLM can follow {', '.join(POLICIES)}"
            )
        return settings


def policy_of(settings: VllmSettings, params: Mapping[str, Any] | None) -> str:
    """A request may ask for its own policy: ``kv_transfer_params={"cacheflow_policy": ...}``.

    What is no policy is ignored: a request must not fail over a hint.
    """
    asked = (params or {}).get("cacheflow_policy")
    return asked if asked in POLICIES else settings.policy
