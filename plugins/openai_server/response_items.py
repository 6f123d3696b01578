"""The input of a response as messages, and its output as items. Pure.

A call that follows an assistant's message is part of it: the same conversation is rendered to the
same tokens whether it comes as chat messages or as items.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from cacheflow.plugins.openai_server.messages import plain_call
from cacheflow.plugins.openai_server.response_schema import CalledItem, MessageItem, OutputText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.plugins.openai_server.messages import Rendered
    from cacheflow.plugins.openai_server.response_schema import (
        InputItem,
        ResponseRequest,
        ResponseTool,
        Status,
    )
    from cacheflow.plugins.openai_server.tool_calls import Call

__all__ = ["called_item", "input_messages", "input_tools", "message_item"]


def input_messages(body: ResponseRequest) -> list[Rendered]:
    """The conversation as a chat template takes it."""
    messages: list[Rendered] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for item in body.input:
            _append(messages, item)
    return messages


def input_tools(tools: Sequence[ResponseTool] | None) -> list[dict[str, Any]] | None:
    """The tools as a chat template takes them; None where there are none."""
    if not tools:
        return None
    return [
        {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
        for tool in tools
    ]


def message_item(text: str | None, status: Status) -> MessageItem:
    """The answer in words; ``text`` None: nothing of it is there yet."""
    content = [] if text is None else [OutputText(text=text)]
    return MessageItem(id=f"msg_{uuid.uuid4().hex}", status=status, content=content)


def called_item(call: Call) -> CalledItem:
    """A call in the answer."""
    return CalledItem(
        id=f"fc_{uuid.uuid4().hex}",
        call_id=call.id,
        name=call.name,
        arguments=call.arguments,
        status="completed",
    )


def _append(messages: list[Rendered], item: InputItem) -> None:
    match item.type:
        case "message":
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": item.content or ""})
        case "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = plain_call(item.call_id or "", item.name or "", item.arguments or "")
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            result = {"role": "tool", "content": item.output or "", "tool_call_id": item.call_id}
            messages.append(result)
        case _:
            pass
