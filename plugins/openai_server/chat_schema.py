"""Requests and answers of ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from cacheflow.plugins.openai_server.common_schema import (
    Answered,
    Asked,
    CommonFields,
    Content,
    Lenient,
    Report,
    Usage,
)

__all__ = [
    "CalledFunction",
    "ChatChoice",
    "ChatChunk",
    "ChatCompletion",
    "ChatDelta",
    "ChatMessage",
    "ChatRequest",
    "ChatTool",
    "ChunkChoice",
    "DeltaCall",
    "GivenCall",
    "Message",
    "ToolCall",
]


class GivenFunction(Lenient):
    """A function that the assistant called, as clients send it back."""

    name: str
    arguments: str = ""


class GivenCall(Lenient):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: GivenFunction


class Message(Lenient):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[GivenCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of role 'tool' needs the tool_call_id that it answers")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only a message of role 'assistant' has tool_calls")
        if self.content is None and not self.tool_calls:
            raise ValueError(f"a message of role {self.role!r} needs content")
        return self


class FunctionSpec(Asked):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Asked):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionSpec
    cache_control: dict[str, Any] | None = None
    """Accepted as from clients made for Anthropic's API; nothing needs to be marked here."""


class NamedFunction(Asked):
    """The function in a tool choice."""

    name: str


class ChosenTool(Asked):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ResponseFormat(Lenient):
    """What the answer must look like; only text is known."""

    type: Literal["text", "json_object", "json_schema"]


class StreamOptions(Asked):
    """What a stream has in it."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatRequest(CommonFields):
    """What may be asked. What the engine cannot do is known here too, to be refused by name."""

    messages: list[Message] = Field(min_length=1)
    tools: list[ChatTool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None


class CalledFunction(Answered):
    """A function that the model calls; ``arguments`` is JSON."""

    name: str
    arguments: str


class ToolCall(Answered):
    """A call in an answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Answered):
    """The model's answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None
    """Left out where there are none."""

    @model_serializer(mode="wrap")
    def _as_openai_does(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = write(self)
        if self.tool_calls is None:
            del fields["tool_calls"]
        return fields


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(Answered):
    """There is one."""

    index: int = 0
    message: ChatMessage
    logprobs: None = None
    finish_reason: FinishReason


class ChatCompletion(Answered):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    service_tier: None = None
    cacheflow: Report


class DeltaCall(ToolCall):
    """A call in a stream, all of it at once."""

    index: int


class ChatDelta(Answered):
    """What a chunk adds; nothing else is in it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[DeltaCall] | None = None

    @model_serializer(mode="wrap")
    def _without_nulls(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if value is not None}


class ChunkChoice(Answered):
    """There is one, or none in the chunk with the usage."""

    index: int = 0
    delta: ChatDelta
    logprobs: None = None
    finish_reason: FinishReason | None = None


class ChatChunk(Answered):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str
    cacheflow: Report | None = None
