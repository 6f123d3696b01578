"""Advice about a session: how much its KV will be wanted, in memory and in the tiers.

Decides what is forgotten and evicted first and nothing else: no advice changes an output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from cacheflow.errors import ClosedError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.types import ChunkKey

__all__ = ["Advice", "State", "advice_of", "tell_tiers"]

State: TypeAlias = Literal["active", "waiting", "idle", "done"]
"""In use; waiting for a tool, to be back soon; nobody knows when it is back; not to come back."""

_STANDING: Final = {"done": 0.0, "idle": 1.0, None: 2.0, "waiting": 3.0, "active": 4.0}
"""Who is forgotten first when KV memory is short; None: nothing was said."""
_PRIORITY: Final = {"done": 0.25, "idle": 1.0, None: 1.0, "waiting": 4.0, "active": 2.0}
"""How many times what they seem worth stored chunks count."""
_TTL: Final = 600.0
"""Seconds that advice counts without an ``eta`` or ``ttl``."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What was said last. ``expires``: when it counts no longer."""

    state: State | None = None
    eta: float | None = None
    priority: float = 1.0
    ttl: float = _TTL
    expires: float = float("inf")

    def standing(self, now: float) -> tuple[float, float]:
        """The least is forgotten first."""
        if now > self.expires:
            return _STANDING[None], 1.0
        return _STANDING[self.state], self.priority


def advice_of(
    state: State | None, eta: float | None, ttl: float | None, priority: float | None, now: float
) -> Advice:
    """The advice that these arguments are.

    Raises:
        ConfigError: there is no such state, or a number is not one.
    """
    if state is not None and state not in get_args(State):
        raise ConfigError(f"state {state!r} is not one of {', '.join(get_args(State))}")
    for name, value in (("eta", eta), ("ttl", ttl), ("priority", priority)):
        good = isinstance(value, int | float) and 0.0 < value < float("inf")
        if value is not None and not good and not (name == "eta" and value == 0):
            raise ConfigError(f"{name} must be a positive number, got {value!r}")
    lasts = ttl if ttl is not None else max(2.0 * (eta or 0.0), _TTL)
    weight = _PRIORITY[state] if priority is None else priority
    return Advice(state, eta, weight, lasts, now + lasts)


def tell_tiers(tiers: Iterable[StorageBackend], keys: Sequence[ChunkKey], advice: Advice) -> None:
    """Let tiers that evict know; those of a session that is to be back soon are pinned, too."""
    for tier in tiers:
        try:
            tier.hint(keys, advice.priority, advice.ttl)
            if advice.state == "waiting" and advice.eta:
                tier.pin(keys, advice.eta)
        except ClosedError:  # nothing is evicted there any more
            continue
