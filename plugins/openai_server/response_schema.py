"""Requests and answers of ``/v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from cacheflow.plugins.openai_server.common_schema import (
    Answered,
    Asked,
    CommonFields,
    Content,
    Lenient,
    OutputDetails,
    Report,
    Text,
    TokenDetails,
)

__all__ = [
    "CalledItem",
    "InputItem",
    "MessageItem",
    "OutputItem",
    "OutputText",
    "Response",
    "ResponseRequest",
    "ResponseTool",
    "ResponseUsage",
    "Status",
]


class InputItem(Lenient):
    """One item of the conversation: a message, a call, or what a call gave."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    """Reasoning that clients send back is not shown to the model again."""
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Text | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
        }.get(self.type, ())
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f"an item of type {self.type!r} needs {name}")
        return self


class ResponseTool(Asked):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(Asked):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Lenient):
    """What the answer must look like; only text is known."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextConfig(Lenient):
    """How the answer is written."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseStreamOptions(Asked):
    """What a stream has in it."""

    include_obfuscation: bool | None = None


class ResponseRequest(CommonFields):
    """What may be asked. What the engine cannot do is known here too, to be refused by name."""

    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    tools: list[ResponseTool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[str] | None = None
    """Whatever is asked for: there is never any of it to include."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    text: TextConfig | None = None
    reasoning: dict[str, Any] | None = None
    service_tier: str | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    context_management: list[dict[str, Any]] | None = None


class OutputText(Answered):
    """Text of the answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[dict[str, Any]] = Field(default_factory=list, max_length=0)
    logprobs: list[dict[str, Any]] = Field(default_factory=list, max_length=0)


Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Answered):
    """The answer in words."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class CalledItem(Answered):
    """A call of a function; ``arguments`` is JSON."""

    id: str
    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    arguments: str
    status: Status


OutputItem = MessageItem | CalledItem


class ResponseUsage(Answered):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Answered):
    """Why an answer was cut."""

    reason: Literal["max_output_tokens"]


class PlainFormat(Answered):
    """The answer is text."""

    type: Literal["text"] = "text"


class AnswerText(Answered):
    """How the answer is written."""

    format: PlainFormat = Field(default_factory=PlainFormat)


class Response(Answered):
    """A whole answer, or the state of one that is being made."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None
    store: Literal[False] = False
    temperature: float | None
    text: AnswerText = Field(default_factory=AnswerText)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction
    tools: list[ResponseTool]
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    cacheflow: Report | None = None
