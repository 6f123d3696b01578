"""Backend options: pydantic models whose errors name the option."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Options"]


class Options(BaseModel):
    """Base of every backend's options; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def parse(cls, backend: str, options: Mapping[str, object]) -> Self:
        """Raises ConfigError naming the backend, the option and what is wrong."""
        try:
            return cls.model_validate(dict(options))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "options"
            raise ConfigError(
                f"storage backend {backend!r}, option {where!r}: {first['msg']} "
                f"(options: {', '.join(cls.model_fields)})"
            ) from None
