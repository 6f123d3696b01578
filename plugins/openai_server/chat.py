"""``/v1/chat/completions``: a conversation in, the next message out, whole or in pieces."""

from __future__ import annotations

import time
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING

from cacheflow.plugins.openai_server.answering import Job
from cacheflow.plugins.openai_server.chat_schema import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChosenTool,
    ChunkChoice,
    DeltaCall,
    ToolCall,
)
from cacheflow.plugins.openai_server.errors import ApiError
from cacheflow.plugins.openai_server.exchange import frame
from cacheflow.plugins.openai_server.messages import plain_messages, plain_tools
from cacheflow.plugins.openai_server.prefix import Fingerprint
from cacheflow.plugins.openai_server.refusals import refuse_what_cannot_be, stops_of
from cacheflow.plugins.openai_server.tool_calls import OPENING, Call
from cacheflow.plugins.openai_server.usage import report_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from cacheflow.plugins.openai_server.answering import Answer
    from cacheflow.plugins.openai_server.chat_schema import ChatRequest
    from cacheflow.plugins.openai_server.common_schema import Prefetched, Report, Usage
    from cacheflow.plugins.openai_server.service import Service

__all__ = ["ChatTurn", "forced_words"]


class ChatTurn:
    """One request and its answer's form."""

    def __init__(self, service: Service, body: ChatRequest, tenant: str) -> None:
        refuse_what_cannot_be(body)
        self._service = service
        self._body = body
        self._scope = service.scope(body, tenant)
        self._stops = stops_of(body.stop)
        self._forced = _forced(body)
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def prepare(self) -> Job:
        """The prompt in tokens, and how to read the answer."""
        body = self._body
        messages, tools = plain_messages(body.messages), plain_tools(body.tools)
        prompt = await self._service.words.render(messages, tools, self._forced)
        limit = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
        wanted = getattr(body, limit)
        called = tools is not None and body.tool_choice != "none"
        return Job(
            scope=self._scope,
            sampling=self._body.sampling,
            keep_seconds=self._body.keep_seconds,
            prompt=prompt,
            max_new_tokens=self._service.room_for(prompt, "messages", wanted, limit),
            made_of=Fingerprint.of(messages, tools),
            stops=self._stops,
            functions=frozenset(t.function.name for t in body.tools or ()) if called else None,
            forced=self._forced,
            one_call=body.parallel_tool_calls is False,
            messages=messages,
            tools=tools,
        )

    async def prefetch(self) -> Prefetched:
        """No answer: only have the conversation so far in memory when it goes on."""
        messages, tools = plain_messages(self._body.messages), plain_tools(self._body.tools)
        words = self._service.words
        return await self._service.prefetch(
            self._scope, lambda: words.render_so_far(messages, tools)
        )

    async def whole(self) -> ChatCompletion:
        """The answer at its end."""
        async with self._service.answer(self.prepare) as answer:
            pieces = [piece async for piece in answer.pieces()]
            text = "".join(piece for piece in pieces if isinstance(piece, str))
            calls = [_tool_call(piece) for piece in pieces if isinstance(piece, Call)]
            message = ChatMessage(content=text if text or not calls else None)
            if calls:
                message.tool_calls = calls
            return ChatCompletion(
                id=self._id,
                created=self._created,
                model=self._service.model,
                choices=[ChatChoice(message=message, finish_reason=answer.finish_reason)],
                usage=self._service.usage(answer),
                system_fingerprint=self._service.fingerprint,
                cacheflow=report_of(answer),
            )

    async def events(self) -> AsyncGenerator[str, None]:
        """The answer as server-sent events."""
        async with self._service.answer(self.prepare) as answer:
            async with aclosing(answer.pieces()) as pieces:
                index, first = 0, True
                async for piece in pieces:
                    if first:
                        yield self._chunk(ChatDelta(role="assistant", content=""))
                        first = False
                    if isinstance(piece, Call):
                        call = DeltaCall(index=index, **_tool_call(piece).model_dump())
                        index += 1
                        yield self._chunk(ChatDelta(tool_calls=[call]))
                    else:
                        yield self._chunk(ChatDelta(content=piece))
            yield self._last(answer)
            options = self._body.stream_options
            if options is not None and options.include_usage:
                yield self._data([], usage=self._service.usage(answer))
        yield frame("[DONE]")

    def _chunk(self, delta: ChatDelta) -> str:
        return self._data([ChunkChoice(delta=delta)])

    def _last(self, answer: Answer) -> str:
        choice = ChunkChoice(delta=ChatDelta(), finish_reason=answer.finish_reason)
        return self._data([choice], report=report_of(answer))

    def _data(
        self, choices: list[ChunkChoice], usage: Usage | None = None, report: Report | None = None
    ) -> str:
        chunk = ChatChunk(
            id=self._id,
            created=self._created,
            model=self._service.model,
            choices=choices,
            system_fingerprint=self._service.fingerprint,
            usage=usage,
            cacheflow=report,
        )
        empty = {name for name in ("usage", "cacheflow") if getattr(chunk, name) is None}
        return frame(chunk.model_dump_json(exclude=empty))


def _forced(body: ChatRequest) -> str:
    choice = body.tool_choice
    names = [tool.function.name for tool in body.tools or ()]
    wanted = choice.function.name if isinstance(choice, ChosenTool) else None
    return forced_words(names, wanted, required=choice == "required")


def forced_words(names: list[str], wanted: str | None, *, required: bool) -> str:
    """How an answer begins that must call a function: the model goes on from there.

    Raises:
        ApiError: there is no such function, or none at all.
    """
    if wanted is None and not required:
        return ""
    if not names or (wanted is not None and wanted not in names):
        raise ApiError(
            400,
            f"tool_choice: there is no tool {wanted!r}" if names else "tool_choice needs tools",
            code="invalid_value",
            param="tool_choice",
        )
    if wanted is None and len(names) == 1:
        wanted = names[0]
    start = f'{OPENING}\n{{"name": "'
    return f'{start}{wanted}", "arguments": ' if wanted else start


def _tool_call(call: Call) -> ToolCall:
    function = CalledFunction(name=call.name, arguments=call.arguments)
    return ToolCall(id=call.id, function=function)
