"""What requests and answers of several endpoints have in common."""

from __future__ import annotations

import secrets
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from cacheflow.types import Sampling

__all__ = [
    "Answered",
    "Asked",
    "CommonFields",
    "Content",
    "ErrorBody",
    "Lenient",
    "Model",
    "ModelList",
    "Prefetched",
    "PrefixDivergence",
    "Report",
    "Text",
    "Usage",
]

_TEXT_PARTS: Final = ("text", "input_text", "output_text", "refusal")


class Asked(BaseModel):
    """Part of a request in which an unknown field is an error: nothing is ignored silently."""

    model_config = ConfigDict(extra="forbid")


class Lenient(BaseModel):
    """Part of a request that clients copy from our answers, with whatever their SDK put there."""

    model_config = ConfigDict(extra="ignore")


class Answered(BaseModel):
    """Part of an answer."""

    model_config = ConfigDict(extra="forbid")


def _joined(value: object) -> object:
    """Parts of text as one text; anything else than text is refused by name."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise ValueError(f"this model takes text only, not a part of type {kind!r}")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise ValueError("a part of text needs a field 'text' with a string")
        texts.append(text)
    return "\n".join(texts)


_RETENTION: Final = {"30m": 1800.0, "12h": 43200.0, "24h": 86400.0}
"""Seconds; what only says that memory is enough says nothing to us."""


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_PARTS_SCHEMA: Final = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "type": {"enum": ["text", "input_text", "output_text"]},
                    "text": {"type": "string"},
                },
                "required": ["type", "text"],
            },
        },
    ]
}

Text = Annotated[str, BeforeValidator(_joined), WithJsonSchema(_PARTS_SCHEMA)]
"""A text, or a list of parts of text."""
Content = Annotated[
    str | None,
    BeforeValidator(_joined),
    WithJsonSchema({"anyOf": [*_PARTS_SCHEMA["anyOf"], {"type": "null"}]}),
]
"""The same, or null."""


class CacheOptions(Lenient):
    """OpenAI's newer way to say how long; breakpoints are not needed here and do no harm."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None


class CommonFields(Asked):
    """Who asks, in which conversation (what sessions and tenants are made of), and how an answer's
    tokens are chosen."""

    model: str
    temperature: float | None = Field(default=None, ge=0, le=2)
    """Left out or 0: always the likeliest token."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """The same seed and prompt give the same answer; left out, each request has its own."""
    prompt_cache_key: str | None = Field(default=None, max_length=1024)
    """Names a conversation (or several that begin alike): its KV is looked for there first."""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """Advice on how long the conversation's KV is worth keeping."""
    prompt_cache_options: CacheOptions | None = None
    user: str | None = Field(default=None, max_length=1024)
    safety_identifier: str | None = Field(default=None, max_length=1024)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    """Stored KV is shared only among requests of the same salt."""
    metadata: dict[str, str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _unicode(cls, value: object) -> object:
        """JSON can write half of a surrogate pair, which nothing behind can store or send back."""
        left = [value]
        while left:
            part = left.pop()
            if isinstance(part, dict):
                left += [*part, *part.values()]
            elif isinstance(part, list):
                left += [each for each in part if isinstance(each, str | dict | list)]
            elif isinstance(part, str) and not part.isascii() and not _is_unicode(part):
                raise ValueError("the request holds text that is not Unicode")
        return value

    @property
    def sampling(self) -> Sampling | None:
        """How tokens are drawn; None: they are not."""
        if not self.temperature:
            return None
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return Sampling(self.temperature, self.top_p or 1.0, seed)

    @property
    def keep_seconds(self) -> float | None:
        """How long the conversation's KV is worth keeping; None: nothing is said."""
        options = self.prompt_cache_options
        if options is not None and options.ttl is not None:
            return _RETENTION[options.ttl]
        return _RETENTION.get(self.prompt_cache_retention or "")


class TokenDetails(Answered):
    """Where the prompt's KV came from. ``cached`` is what was not prefilled as new; the last three
    say how much of it was in memory, loaded, and computed again in step with the loads."""

    cached_tokens: int
    cache_write_tokens: int
    """New tokens of the prompt that make whole chunks: what is stored for later."""
    resident_tokens: int
    loaded_tokens: int
    recomputed_tokens: int


class OutputDetails(Answered):
    """Of the answer's tokens."""

    reasoning_tokens: int = 0


class Usage(Answered):
    """Tokens of a chat completion or completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails
    completion_tokens_details: OutputDetails


class PrefixDivergence(Answered):
    """Where a conversation's new prompt left what it had in the KV cache."""

    token: int
    """Index of the first token that differs."""
    held_tokens: int
    """Tokens that the conversation had; those from ``token`` on are of no use now."""
    message: int | None
    """Index of the message that the token is in, as the template rendered it."""
    reason: str
    """What changed: ``docs/server.md`` explains each word."""


class Report(Answered):
    """What CacheFlow did for this request; an addition to OpenAI's answers."""

    session: str
    ttft_seconds: float | None
    divergence: PrefixDivergence | None


class Prefetched(Answered):
    """A conversation's KV is in memory."""

    object: Literal["prefetch"] = "prefetch"
    session: str
    seconds: float
    usage: Usage


class ErrorFields(Answered):
    """What is inside ``error``."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Answered):
    """An error in OpenAI's shape."""

    error: ErrorFields


class Model(Answered):
    """The model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "cacheflow"
    max_model_len: int


class ModelList(Answered):
    """All models that are served: one."""

    object: Literal["list"] = "list"
    data: list[Model]
