"""Backend options: pydantic models whose errors name the option."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_core import ErrorDetails

__all__ = ["Options"]


class Options(BaseModel):
    """Base of every backend's options; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def parse(cls, backend: str, options: Mapping[str, object]) -> Self:
        """Raises ConfigError naming the backend, and what is wrong with each bad option."""
        try:
            return cls.model_validate(dict(options))
        except ValidationError as error:
            problems = "; ".join(map(_told, error.errors(include_url=False, include_input=False)))
            raise ConfigError(
                f"storage backend {backend!r}, {problems} (options: {', '.join(cls.model_fields)})"
            ) from None


def _told(problem: ErrorDetails) -> str:
    where = ".".join(map(str, problem["loc"]))
    what = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        what = "there is no such option"
    return f"option {where!r}: {what}" if where else what
