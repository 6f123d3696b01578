"""What OpenAI's API has and this engine cannot do: refused by name, with the reason.

A field is fine while it asks for what happens anyway (``n=1``, ``top_p=1``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cacheflow.plugins.openai_server.errors import ApiError, unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel

__all__ = ["refuse_what_cannot_be", "stops_of"]

_MOST_STOPS: Final = 16

_BIAS: Final = "tokens cannot be made more or less likely: leave it out or set it to 0"
_RULES: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "frequency_penalty": ((0,), _BIAS),
    "presence_penalty": ((0,), _BIAS),
    "logit_bias": (({},), _BIAS),
    "n": ((1,), "there is one answer a request"),
    "best_of": ((1,), "there is one answer a request"),
    "logprobs": ((False,), "log probabilities are not kept"),
    "top_logprobs": ((0,), "log probabilities are not kept"),
    "reasoning_effort": (("none",), "the chat template knows no effort"),
    "reasoning": (({},), "the chat template knows no effort"),
    "verbosity": (("medium",), "the chat template knows no verbosity"),
    "service_tier": (("auto", "default"), "there is one tier of service"),
    "store": ((False,), "answers are not stored (their KV is)"),
    "modalities": ((["text"],), "this model answers in text"),
    "audio": ((), "this model answers in text"),
    "prediction": ((), "predicted output is not used"),
    "web_search_options": ((), "there is no web search"),
    "functions": (([],), "use tools"),
    "function_call": (("none",), "use tool_choice"),
    "echo": ((False,), "the prompt is not repeated"),
    "suffix": (("",), "text cannot be inserted"),
    "truncation": (("disabled",), "nothing is left out of a prompt silently"),
    "background": ((False,), "a response is made while its client waits"),
    "previous_response_id": ((), "responses are not kept: send the whole input again"),
    "conversation": ((), "conversations are not kept: send the whole input again"),
    "context_management": (([],), "nothing is left out of a conversation silently"),
    "moderation": ((), "there is no moderation"),
    "max_tool_calls": ((), "there are no built-in tools"),
}


def refuse_what_cannot_be(body: BaseModel) -> None:
    """Raise an ApiError for the first field of ``body`` that asks for something else."""
    for name in type(body).model_fields:
        allowed, why = _RULES.get(name, ((), ""))
        value = getattr(body, name)
        if why and value is not None and value not in allowed:
            raise unsupported(name, why)
    text = getattr(body, "text", None)
    form = getattr(body, "response_format", None) or getattr(text, "format", None)
    if form is not None and form.type != "text":
        where = "text.format" if text else "response_format"
        raise unsupported(where, "an answer's form cannot be forced: ask for it in words")


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop sequences of a request."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > _MOST_STOPS or not all(stops):
        raise ApiError(
            400,
            f"stop: give at most {_MOST_STOPS} sequences, none of them empty",
            code="invalid_value",
            param="stop",
        )
    return stops
