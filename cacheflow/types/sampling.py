"""How a token is chosen where it is not always the likeliest one."""

from __future__ import annotations

from dataclasses import dataclass

from cacheflow.errors import ConfigError

__all__ = ["Sampling"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Draw from the model's distribution. The draw at a position depends on the logits there, on
    ``seed`` and on the position alone: on no other request, and on nothing that a restart forgets.

    Raises:
        ConfigError: a number cannot be.
    """

    temperature: float = 1.0
    """Logits are divided by it: below 1 likely tokens become likelier."""
    top_p: float = 1.0
    """Only the likeliest tokens that have this much of the probability together can be drawn."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.temperature < float("inf"):
            raise ConfigError(f"temperature must be a positive number, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p}")
