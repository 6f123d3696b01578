"""Requests' messages and tools as chat templates take them.

Chat templates of Hugging Face models take plain dictionaries, the arguments of calls as objects.
Where a template knows nothing of tools, they are described in words: :func:`in_words`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from cacheflow.plugins.openai_server.tool_calls import CLOSING, OPENING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.plugins.openai_server.chat_schema import ChatTool, Message

__all__ = ["Rendered", "in_words", "plain_call", "plain_messages", "plain_tools"]

Rendered: TypeAlias = dict[str, Any]
"""A message as a template takes it."""

_INSTRUCTION: Final = (
    "You may call functions to help with the user's request. These are their signatures:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call one, write a JSON object with its name and arguments between these tags:\n"
    f'{OPENING}\n{{{{"name": <name>, "arguments": <object>}}}}\n{CLOSING}'
)


def plain_messages(messages: Sequence[Message]) -> list[Rendered]:
    """``messages`` as dictionaries; what was not given is left out."""
    return [_plain(message) for message in messages]


def plain_tools(tools: Sequence[ChatTool] | None) -> list[dict[str, Any]] | None:
    """``tools`` as dictionaries; None where there are none."""
    if not tools:
        return None
    return [tool.model_dump(exclude_none=True, exclude={"cache_control"}) for tool in tools]


def _plain(message: Message) -> Rendered:
    role = "system" if message.role == "developer" else message.role
    plain: Rendered = {"role": role, "content": message.content or ""}
    if message.name:
        plain["name"] = message.name
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            plain_call(call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls
        ]
    return plain


def plain_call(call_id: str, name: str, written: str) -> dict[str, Any]:
    """A call; ``written``: its arguments, which are JSON unless a model made a mistake."""
    try:
        arguments = json.loads(written or "{}")
    except (ValueError, RecursionError):  # the template shows it as it was
        arguments = written
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def in_words(messages: list[Rendered], tools: list[dict[str, Any]] | None) -> list[Rendered]:
    """The same conversation for a template without tools: signatures in the system message, calls
    between tags, results as what the user says."""
    told = [_told(message) for message in messages]
    if not tools:
        return told
    signatures = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instruction = _INSTRUCTION.format(tools=signatures)
    if told and told[0]["role"] == "system":
        head = {"role": "system", "content": f"{told[0]['content']}\n\n{instruction}"}
        return [head, *told[1:]]
    return [{"role": "system", "content": instruction}, *told]


def _told(message: Rendered) -> Rendered:
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"{OPENING}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSING}"
        for call in message.get("tool_calls", ())
    ]
    text = "\n".join([content, *calls] if content else calls) if calls else content
    return {"role": message["role"], "content": text}
