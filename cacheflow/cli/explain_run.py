"""The examination behind ``cacheflow explain``: a prompt's keys, what tiers say, and what follows.

Opens the engine for its identity and chat template only; nothing is computed or restored.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cacheflow.cli.store.opening import check_is_used
from cacheflow.errors import ConfigError
from cacheflow.kv import chunk_keys
from cacheflow.registry import load_backend, load_engine
from cacheflow.session.tenants import tenant_of
from cacheflow.settings import Settings, TierSettings
from cacheflow.tiers.departures import departures_path, read_departures
from cacheflow.tiers.explaining import ABSENT, absent, first_miss, judge, others

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cacheflow.abc import Engine, StorageBackend
    from cacheflow.kv import Stamp
    from cacheflow.tiers.departures import Departed
    from cacheflow.tiers.explaining import Others, State
    from cacheflow.types import ChunkKey

__all__ = ["Explained", "examine"]

_BATCH = 64
_CONTEXT = 12
"""Tokens shown on either side of the first that differs."""


@dataclass
class Explained:
    """``states``: of every whole chunk, in every tier (in the order of ``tiers``)."""

    tokens: int
    size: int
    tiers: list[str]
    states: list[tuple[State, ...]] = field(default_factory=list)
    miss: int | None = None
    """The first chunk that no tier has whole."""
    divergence: int | None = None
    """The first token that differs from what was sent before."""
    why: list[str] = field(default_factory=list)

    @property
    def chunks(self) -> int:
        return len(self.states)

    def runs(self) -> Iterator[tuple[int, int, tuple[State, ...]]]:
        """First and last token + 1 of neighbouring chunks in the same state."""
        start = 0
        for number in range(1, self.chunks + 1):
            if number == self.chunks or self.states[number] != self.states[start]:
                yield start * self.size, number * self.size, self.states[start]
                start = number

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "tokens": self.tokens,
            "chunk_tokens": self.size,
            "first_missing_token": None if self.miss is None else self.miss * self.size,
            "first_divergent_token": self.divergence,
            "runs": [
                {
                    "start": start,
                    "stop": stop,
                    "tiers": dict(zip(self.tiers, (state.what for state in states), strict=True)),
                }
                for start, stop, states in self.runs()
            ],
            "why": self.why,
        }


async def examine(
    prompt: Path,
    before: Path | None,
    model: Path | None,
    folder: Path | None,
    tenant: str,
    dtype: str,
) -> Explained:
    """See :func:`cacheflow.cli.explain.explain`.

    Raises:
        ConfigError: a file is not a prompt, there are no tiers, or one cannot be opened.
    """
    settings = _settings(folder)
    factory = cast("Any", await asyncio.to_thread(load_engine, "transformers"))
    path = model or await asyncio.to_thread(factory.small_model)
    engine = await factory.open_model(path, dtype=dtype)
    try:
        reader = _Reader(engine)
        tokens = await asyncio.to_thread(reader.read, prompt)
        earlier = None if before is None else await asyncio.to_thread(reader.read, before)
        who = tenant_of(tenant, settings, engine)
        size = engine.layout.chunk_tokens
        found = Explained(len(tokens), size, [tier.name for tier in settings.tiers])
        keys = chunk_keys(who.root, tokens, size)
        async with AsyncExitStack() as stack:
            backends = [await _open(tier, stack) for tier in settings.tiers]
            left = await asyncio.to_thread(_departed, settings)
            answers = [
                await _states(backend, keys, engine, who.stamp, gone)
                for backend, gone in zip(backends, left, strict=True)
            ]
            found.states = list(zip(*answers, strict=True))
            found.miss = first_miss(found.states)
            if earlier is not None:
                found.why += _compared(found, tokens, earlier, reader)
            found.why.append(_missing(found))
            if found.miss == 0 and not any(state.usable for c in found.states for state in c):
                for tier, backend in zip(settings.tiers, backends, strict=True):
                    infos = [info async for info in backend.scan()]
                    held = others(infos, engine.layout, who.stamp, "canonical")
                    found.why.append(_held(tier, held))
    finally:
        await engine.aclose()
    return found


class _Reader:
    """Files to tokens, by the engine's tokenizer and chat template."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def read(self, path: Path) -> list[int]:
        """The tokens of a file, as many as a request may have."""
        tokens, longest = self._tokens(path), self.engine.max_tokens
        if not tokens:
            raise ConfigError(f"{path} is empty: it holds no tokens to look for")
        if len(tokens) > longest:
            raise ConfigError(
                f"{path} has {len(tokens)} tokens, more than the model's context of {longest}: no "
                "request can have had them"
            )
        return tokens

    def _tokens(self, path: Path) -> list[int]:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 text: {error.reason}") from None
        if path.suffix != ".json":
            if self.engine.tokenizer is None:
                raise ConfigError(f"{path} is text, and the model has no tokenizer")
            return list(self.engine.tokenizer(text).input_ids)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not JSON: {error}") from None
        tools = value.get("tools") if isinstance(value, dict) else None
        value = value.get("messages", value) if isinstance(value, dict) else value
        if isinstance(value, list) and all(type(token) is int for token in value):
            return value
        if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
            raise ConfigError(f"{path} holds neither token ids nor messages")
        if self.engine.chat is None:
            raise ConfigError(f"{path} holds messages, and the model has no chat template")
        return list(self.engine.chat.render(value, tools))

    def text(self, tokens: Sequence[int]) -> str:
        if self.engine.tokenizer is None:
            return str(list(tokens))
        return repr(self.engine.tokenizer.decode(list(tokens)))


def _settings(folder: Path | None) -> Settings:
    settings = Settings()
    if folder is not None:
        if not folder.is_dir():
            raise ConfigError(f"--folder: {folder} is not a folder")
        tier = TierSettings(name="disk", backend="nvme", options={"path": str(folder)})
        settings = settings.model_copy(update={"tiers": (tier,)})
    if not settings.tiers:
        raise ConfigError("there are no tiers: give --folder, or set CACHEFLOW_TIERS")
    return settings


async def _open(tier: TierSettings, stack: AsyncExitStack) -> StorageBackend:
    options = tier.options
    if tier.backend == "nvme" and "path" in options:  # looking makes no store
        await asyncio.to_thread(check_is_used, Path(str(options["path"])))
        options = {**options, "create": False}
    kind = await asyncio.to_thread(load_backend, tier.backend)
    backend = await kind.open(options)
    stack.push_async_callback(backend.aclose)
    return backend


def _departed(settings: Settings) -> list[Departed]:
    """What is known to have left each tier."""
    return [read_departures(departures_path(settings.cache_dir, each)) for each in settings.tiers]


async def _states(
    backend: StorageBackend, keys: Sequence[ChunkKey], engine: Engine, stamp: Stamp, left: Departed
) -> list[State]:
    states: list[State] = []
    for first in range(0, len(keys), _BATCH):
        found = await backend.lookup(keys[first : first + _BATCH])
        states += [judge(infos, engine.layout, stamp, "canonical") for infos in found]
    return [
        absent(left.reason(key), all_known=left.all_known) if state is ABSENT else state
        for key, state in zip(keys, states, strict=True)
    ]


def _compared(
    found: Explained, tokens: Sequence[int], earlier: Sequence[int], reader: _Reader
) -> list[str]:
    """Where the prompt leaves what was sent before."""
    shared = min(len(tokens), len(earlier))
    at = next((i for i in range(shared) if tokens[i] != earlier[i]), shared)
    if at == len(earlier):
        return [f"it goes on from all {at} tokens that were sent before"]
    if at == len(tokens):
        return [f"it is the beginning of what was sent before, up to token {at}"]
    found.divergence, chunk = at, at // found.size
    line = (
        f"it leaves what was sent before at token {at}, in chunk {chunk}: after "
        f"{reader.text(tokens[max(at - _CONTEXT, 0) : at])} came "
        f"{reader.text(earlier[at : at + _CONTEXT])}, and now "
        f"{reader.text(tokens[at : at + _CONTEXT])}; what was stored then is of no use from token "
        f"{chunk * found.size} on"
    )
    return [line]


def _missing(found: Explained) -> str:
    """What the pattern of stored chunks proves about the missing ones."""
    size, miss = found.size, found.miss
    if not found.chunks:
        return f"it is shorter than a chunk of {size} tokens: there is nothing to store"
    if miss is None:
        return "all whole chunks are stored: they are restored, or recomputed if that is faster"
    fates = ", ".join(
        f"{tier}: {state.what}"
        for tier, state in zip(found.tiers, found.states[miss], strict=True)
        if state is not ABSENT
    )
    if fates:
        return (
            f"tokens {miss * size}-{(miss + 1) * size} are not to be had ({fates}); what follows "
            "is in the table, and is recomputed where no tier has it"
        )
    behind = [n for n in range(miss + 1, found.chunks) if any(s.usable for s in found.states[n])]
    if behind:
        return (
            f"tokens {miss * size}-{(miss + 1) * size} are missing, and chunk {behind[0]} behind "
            "them, whose key holds them, is stored: they were evicted, expired, deleted, dropped "
            "on the way, left out by the write policy, or declined by a full tier (eviction "
            "cost-aware) as worth less than what it holds; they are recomputed"
        )
    if miss:
        return (
            f"nothing is stored from token {miss * size} on: a token of chunk {miss} differs from "
            "what was stored (give what was sent before with --before), or from there on it was "
            "evicted, expired, or not stored yet"
        )
    return "nothing of it is stored"


def _held(tier: TierSettings, held: Others) -> str:
    name = tier.name
    if tier.backend == "dram":
        return f"{name} is memory of the process that serves: it cannot be seen from here"
    if held.kin:
        return (
            f"{name} holds {held.kin} objects of this model and tenant, of other prompts: this one "
            "differs within its first chunk, or it was evicted, expired or never stored"
        )
    if not held.strangers:
        return f"{name} is empty"
    parts = "; ".join(
        f"{count} of another {', '.join(what)}" for what, count in held.strangers.items()
    )
    return f"{name} holds nothing of this model and tenant, but {parts}"
