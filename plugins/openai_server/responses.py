"""``/v1/responses``: items in, items out, whole or as events. Nothing of a response is kept."""

from __future__ import annotations

import json
import time
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from cacheflow.plugins.openai_server.answering import Job
from cacheflow.plugins.openai_server.chat import forced_words
from cacheflow.plugins.openai_server.exchange import frame
from cacheflow.plugins.openai_server.prefix import Fingerprint
from cacheflow.plugins.openai_server.refusals import refuse_what_cannot_be
from cacheflow.plugins.openai_server.response_events import EventLog
from cacheflow.plugins.openai_server.response_items import (
    called_item,
    input_messages,
    input_tools,
    message_item,
)
from cacheflow.plugins.openai_server.response_schema import (
    ChosenFunction,
    IncompleteDetails,
    Response,
    ResponseUsage,
)
from cacheflow.plugins.openai_server.tool_calls import Call
from cacheflow.plugins.openai_server.usage import report_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from cacheflow.plugins.openai_server.answering import Answer
    from cacheflow.plugins.openai_server.response_schema import (
        OutputItem,
        ResponseRequest,
        Status,
    )
    from cacheflow.plugins.openai_server.service import Service

__all__ = ["ResponseTurn"]


class ResponseTurn:
    """One request and its answer's form."""

    def __init__(self, service: Service, body: ResponseRequest, tenant: str) -> None:
        refuse_what_cannot_be(body)
        self._service = service
        self._body = body
        self._scope = service.scope(body, tenant)
        choice = body.tool_choice
        self._forced = forced_words(
            [tool.name for tool in body.tools or ()],
            choice.name if isinstance(choice, ChosenFunction) else None,
            required=choice == "required",
        )
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def prepare(self) -> Job:
        """The prompt in tokens, and how to read the answer."""
        body = self._body
        messages, tools = input_messages(body), input_tools(body.tools)
        prompt = await self._service.words.render(messages, tools, self._forced)
        called = tools is not None and body.tool_choice != "none"
        return Job(
            scope=self._scope,
            sampling=self._body.sampling,
            keep_seconds=self._body.keep_seconds,
            prompt=prompt,
            max_new_tokens=self._service.room_for(
                prompt, "input", body.max_output_tokens, "max_output_tokens"
            ),
            made_of=Fingerprint.of(messages, tools),
            functions=frozenset(tool.name for tool in body.tools or ()) if called else None,
            forced=self._forced,
            one_call=body.parallel_tool_calls is False,
            messages=messages,
            tools=tools,
        )

    async def whole(self) -> Response:
        """The answer at its end."""
        async with self._service.answer(self.prepare) as answer:
            output: list[OutputItem] = []
            texts: list[str] = []
            async for piece in answer.pieces():
                if isinstance(piece, Call):
                    output += _said(texts)
                    output.append(called_item(piece))
                else:
                    texts.append(piece)
            output += _said(texts, cut=answer.finish_reason == "length", needed=not output)
            return self._response(output, answer)

    async def events(self) -> AsyncGenerator[str, None]:
        """The answer as server-sent events."""
        log = EventLog(self._state)
        async with self._service.answer(self.prepare) as answer:
            async with aclosing(answer.pieces()) as pieces:
                async for piece in pieces:
                    for event in log.add(piece):
                        yield _framed(event)
            for event in log.end(cut=answer.finish_reason == "length"):
                yield _framed(event)
            yield _framed(log.last(self._response(log.output, answer)))

    def _state(self) -> Response:
        return self._response([], None)

    def _response(self, output: list[OutputItem], answer: Answer | None) -> Response:
        body = self._body
        cut = answer is not None and answer.finish_reason == "length"
        ended: Status = "incomplete" if cut else "completed"
        return Response(
            id=self._id,
            created_at=self._created,
            status="in_progress" if answer is None else ended,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if cut else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._service.model,
            output=output,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            prompt_cache_key=body.prompt_cache_key,
            temperature=body.temperature,
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=body.top_p,
            usage=self._usage(answer) if answer is not None else None,
            user=body.user,
            cacheflow=report_of(answer) if answer is not None else None,
        )

    def _usage(self, answer: Answer) -> ResponseUsage:
        usage = self._service.usage(answer)
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=usage.prompt_tokens_details,
            output_tokens=usage.completion_tokens,
            output_tokens_details=usage.completion_tokens_details,
            total_tokens=usage.total_tokens,
        )


def _said(texts: list[str], *, cut: bool = False, needed: bool = False) -> list[OutputItem]:
    """The text so far as an item, and forgotten; an answer of nothing is an empty message."""
    text = "".join(texts)
    texts.clear()
    status: Status = "incomplete" if cut else "completed"
    return [message_item(text, status)] if text or needed else []


def _framed(event: dict[str, Any]) -> str:
    return frame(json.dumps(event, ensure_ascii=False), event["type"])
