"""Agent sessions: a context that grows turn by turn, with a tool call between two turns.

While the tool runs, the GPU forgets the session's KV; its blocks stay in the tiers, so every turn
but the first starts with a restore. A turn arrives only once the turn before it was answered, so a
slow policy also slows the load down. Knows no hardware but the pace of decode.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cacheflow.errors import ConfigError
from cacheflow.simulation.jobs import Job
from cacheflow.simulation.traces import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.simulation.records import Record

__all__ = ["AgentSettings", "Agents"]

_IDS: Final = 1 << 32
"""Block names a session may use."""
_PARTIAL: Final = 1 << 31
"""From here on within those: last blocks that are not full, one a turn."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Means in tokens and seconds. ``system_tokens`` are shared by all sessions.

    ``tool_tokens``: what a tool's answer adds to the context; ``answer_tokens``: what the model
    says in a turn, at ``decode_seconds`` a token; ``pause_seconds``: how long a tool takes;
    ``start_seconds``: the sessions begin at random within this time.
    """

    sessions: int = 50
    turns: int = 8
    system_tokens: int = 2048
    first_tokens: int = 6000
    tool_tokens: int = 2000
    answer_tokens: int = 150
    decode_seconds: float = 0.02
    pause_seconds: float = 10.0
    start_seconds: float = 60.0

    def __post_init__(self) -> None:
        counts = (self.sessions, self.turns, self.first_tokens, self.tool_tokens)
        times = (self.decode_seconds, self.pause_seconds, self.start_seconds)
        if min(counts) < 1 or min(times) < 0 or min(self.system_tokens, self.answer_tokens) < 0:
            raise ConfigError("--agents: counts and tokens must be at least 1, seconds at least 0")


@dataclass(frozen=True, slots=True)
class _Turn:
    tokens: int
    answer: int
    pause: float


class Agents:
    """Closed-loop sessions; all is drawn in advance, so nothing depends on the order of events."""

    def __init__(self, settings: AgentSettings, seed: int = 0) -> None:
        self.name = f"{settings.sessions} agent sessions of {settings.turns} turns"
        self._settings = settings
        self._turns: list[list[_Turn]] = []
        self._starts: list[float] = []
        for session in range(settings.sessions):
            chance = random.Random(f"agents:{seed}:{session}")
            self._starts.append(chance.uniform(0.0, settings.start_seconds))
            self._turns.append(self._draw(chance))

    def __len__(self) -> int:
        """Requests in all."""
        return sum(map(len, self._turns))

    def _draw(self, chance: random.Random) -> list[_Turn]:
        settings, turns, tokens = self._settings, [], self._settings.system_tokens
        for number in range(settings.turns):
            mean = settings.tool_tokens if number else settings.first_tokens
            tokens += max(1, round(chance.expovariate(1 / mean)))
            answer = round(chance.expovariate(1.0) * settings.answer_tokens)
            pause = chance.expovariate(1.0) * settings.pause_seconds
            turns.append(_Turn(tokens, answer, pause))
            tokens += answer
        return turns

    def first(self) -> Sequence[Job]:
        return [self._job(session, 0, start) for session, start in enumerate(self._starts)]

    def then(self, job: Job, record: Record) -> Job | None:
        session, number = map(int, job.id.removeprefix("s").split(".t"))
        turn = self._turns[session][number]
        if number + 1 == len(self._turns[session]):
            return None
        arrival = record.first_token + turn.answer * self._settings.decode_seconds + turn.pause
        return self._job(session, number + 1, arrival)

    def _job(self, session: int, number: int, arrival: float) -> Job:
        turn = self._turns[session][number]
        ids = [self._id(session, block) for block in range(turn.tokens // BLOCK_TOKENS)]
        if turn.tokens % BLOCK_TOKENS:
            ids.append((session + 1) * _IDS + _PARTIAL + number)
        stored = range((turn.tokens + turn.answer) // BLOCK_TOKENS)
        return Job(
            id=f"s{session}.t{number}",
            arrival=arrival,
            total_tokens=turn.tokens,
            output_tokens=turn.answer,
            hash_ids=tuple(ids),
            leaves=tuple(self._id(session, block) for block in stored),
        )

    def _id(self, session: int, block: int) -> int:
        shared = block < self._settings.system_tokens // BLOCK_TOKENS
        return block if shared else (session + 1) * _IDS + block
