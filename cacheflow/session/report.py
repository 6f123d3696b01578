"""What a turn did and what its prompt was made of: plain records, filled in as it goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

    from cacheflow.restore import Restoration
    from cacheflow.restore.saver import Saved

__all__ = ["FinishReason", "Generation", "Usage", "report_of"]

FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]


@dataclass(slots=True)
class Usage:
    """Tokens of one turn."""

    prompt_tokens: int = 0
    resident_tokens: int = 0
    """Of the prompt: their KV was in memory, this session's or another's that began alike."""
    loaded_tokens: int = 0
    """Of the prompt: restored by loading."""
    recomputed_tokens: int = 0
    """Of the prompt: stored somewhere, and restored sooner by recomputing than by loading."""
    completion_tokens: int = 0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were resident or stored somewhere."""
        return self.resident_tokens + self.loaded_tokens + self.recomputed_tokens

    @property
    def total_tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.completion_tokens

    def __repr__(self) -> str:
        """The fields, and what they add up to."""
        names = ("prompt", "cached", "resident", "loaded", "recomputed", "completion")
        counts = (f"{name}_tokens={getattr(self, f'{name}_tokens')}" for name in names)
        return f"Usage({', '.join(counts)})"

    def restored(self, resident: int, restoration: Restoration, layers: int) -> None:
        """The prompt is in memory. Work on a tile is shared out by layers, so the parts are of
        token-layers, rounded: they add up to what was cached."""
        stored = 0 if resident else restoration.stored_tokens
        shared = min(restoration.shared_cells // layers, stored)
        loaded = round(sum(restoration.loaded_cells.values()) / layers)
        self.resident_tokens = resident + shared
        self.loaded_tokens = min(loaded, stored - shared)
        self.recomputed_tokens = stored - shared - self.loaded_tokens


@dataclass(slots=True)
class Generation:
    """What a :meth:`Session.generate` did, filled in as it goes."""

    restoration: Restoration | None = None
    """How the prefix came back; None until it has, and of a session's own KV in memory nothing had
    to."""
    ttft_seconds: float | None = None
    """From arrival to the first token."""
    usage: Usage = field(default_factory=Usage)
    finish_reason: FinishReason | None = None
    """None while it goes on, or if it failed."""
    saved: dict[str, Saved] | None = None
    """By tier; counted on behind the request until nothing is ``pending``: see
    :meth:`CacheFlow.flush`."""

    def made(self, token: int, stops: Collection[int], most: int) -> None:
        """One token more, of ``most``."""
        self.usage.completion_tokens += 1
        if token in stops:
            self.finish_reason = "stop"
        elif self.usage.completion_tokens == most:
            self.finish_reason = "length"

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was resident or stored somewhere."""
        return self.usage.cached_tokens


def report_of(given: Generation | None) -> Generation:
    """``given``, or a new one; ConfigError if it is something else."""
    if given is not None and not isinstance(given, Generation):
        raise ConfigError(f"report must be a Generation, got {type(given).__name__}")
    return Generation() if given is None else given
