"""``/v1/completions``: a prompt in, what follows it out. No chat template, no tools."""

from __future__ import annotations

import time
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Final, cast

from cacheflow.plugins.openai_server.answering import Job
from cacheflow.plugins.openai_server.completion_schema import Completion, CompletionChoice
from cacheflow.plugins.openai_server.errors import unsupported
from cacheflow.plugins.openai_server.exchange import frame
from cacheflow.plugins.openai_server.prefix import Fingerprint
from cacheflow.plugins.openai_server.refusals import refuse_what_cannot_be, stops_of
from cacheflow.plugins.openai_server.usage import report_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from cacheflow.plugins.openai_server.answering import Answer
    from cacheflow.plugins.openai_server.common_schema import Report, Usage
    from cacheflow.plugins.openai_server.completion_schema import CompletionRequest
    from cacheflow.plugins.openai_server.service import Service

__all__ = ["CompletionTurn"]

_DEFAULT_TOKENS: Final = 16
"""OpenAI's, for this endpoint."""


class CompletionTurn:
    """One request and its answer's form."""

    def __init__(self, service: Service, body: CompletionRequest, tenant: str) -> None:
        refuse_what_cannot_be(body)
        self._service = service
        self._body = body
        self._scope = service.scope(body, tenant)
        self._stops = stops_of(body.stop)
        self._prompt = _one_prompt(body)
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def prepare(self) -> Job:
        """The prompt in tokens."""
        given = self._prompt
        prompt = await self._service.words.encode(given) if isinstance(given, str) else given
        wanted = self._body.max_tokens
        return Job(
            scope=self._scope,
            sampling=self._body.sampling,
            keep_seconds=self._body.keep_seconds,
            prompt=prompt,
            max_new_tokens=self._service.room_for(
                prompt, "prompt", wanted, "max_tokens", usual=_DEFAULT_TOKENS
            ),
            made_of=Fingerprint.of((), None),
            stops=self._stops,
        )

    async def whole(self) -> Completion:
        """The answer at its end."""
        async with self._service.answer(self.prepare) as answer:
            text = "".join([cast("str", piece) async for piece in answer.pieces()])
            return self._completion(
                [_choice(text, answer)],
                usage=self._service.usage(answer),
                cacheflow=report_of(answer),
            )

    async def events(self) -> AsyncGenerator[str, None]:
        """The answer as server-sent events."""
        async with self._service.answer(self.prepare) as answer:
            async with aclosing(answer.pieces()) as pieces:
                async for piece in pieces:
                    choice = CompletionChoice(text=cast("str", piece), finish_reason=None)
                    yield self._event([choice])
            yield self._event([_choice("", answer)], cacheflow=report_of(answer))
            options = self._body.stream_options
            if options is not None and options.include_usage:
                yield self._event([], usage=self._service.usage(answer))
        yield frame("[DONE]")

    def _event(
        self,
        choices: list[CompletionChoice],
        usage: Usage | None = None,
        cacheflow: Report | None = None,
    ) -> str:
        event = self._completion(choices, usage, cacheflow)
        empty = {name for name in ("usage", "cacheflow") if getattr(event, name) is None}
        return frame(event.model_dump_json(exclude=empty))

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | None, cacheflow: Report | None
    ) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._service.model,
            choices=choices,
            usage=usage,
            system_fingerprint=self._service.fingerprint,
            cacheflow=cacheflow,
        )


def _choice(text: str, answer: Answer) -> CompletionChoice:
    cut = answer.finish_reason == "length"
    return CompletionChoice(text=text, finish_reason="length" if cut else "stop")


def _one_prompt(body: CompletionRequest) -> str | list[int]:
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise unsupported("prompt", "give one prompt a request")
        prompt = prompt[0]
    return cast("str | list[int]", prompt)
