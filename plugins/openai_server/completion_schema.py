"""Requests and answers of ``/v1/completions``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cacheflow.plugins.openai_server.chat_schema import StreamOptions
from cacheflow.plugins.openai_server.common_schema import Answered, CommonFields, Report, Usage

__all__ = ["Completion", "CompletionChoice", "CompletionRequest"]

_Token = Annotated[int, Field(ge=0, lt=2**31)]


class CompletionRequest(CommonFields):
    """What may be asked. What the engine cannot do is known here too, to be refused by name."""

    prompt: str | list[_Token] | list[str] | list[list[_Token]]
    """One prompt, as text or as tokens; a list of one prompt is one prompt too."""
    max_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1)
    best_of: int | None = Field(default=None, ge=0)
    echo: bool | None = None
    suffix: str | None = None
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    logprobs: int | None = Field(default=None, ge=0, le=5)


class CompletionChoice(Answered):
    """There is one, or none in the event with the usage."""

    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: Literal["stop", "length"] | None


class Completion(Answered):
    """A whole answer, or one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str
    cacheflow: Report | None = None
