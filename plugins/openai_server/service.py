"""What all endpoints share: the model, who asks, and the way from a request to an answer."""

from __future__ import annotations

import json
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from cacheflow.plugins.openai_server.admission import Admission
from cacheflow.plugins.openai_server.answering import Answer, Job
from cacheflow.plugins.openai_server.common_schema import Prefetched
from cacheflow.plugins.openai_server.conversations import Conversations, Scope
from cacheflow.plugins.openai_server.errors import ApiError
from cacheflow.plugins.openai_server.usage import usage_of
from cacheflow.session import Generation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from cacheflow.plugins.openai_server.common_schema import CommonFields, Usage
    from cacheflow.plugins.openai_server.metrics import ServerSeries
    from cacheflow.plugins.openai_server.settings import ServerSettings
    from cacheflow.plugins.openai_server.template import Words
    from cacheflow.session import CacheFlow

__all__ = ["Service"]


class Service:
    """One model behind one flow."""

    def __init__(
        self,
        flow: CacheFlow,
        words: Words,
        settings: ServerSettings,
        model: str,
        series: ServerSeries,
    ) -> None:
        self.flow = flow
        self.words = words
        self.settings = settings
        self.model = model
        self.series = series
        self.created = int(time.time())
        self.fingerprint = f"fp_{str(flow.engine.identity['weights'])[:16]}"
        self.admission = Admission(
            settings.max_running,
            settings.max_waiting,
            settings.queue_seconds,
            lambda why: series.rejected.labels(why).inc(),
        )
        self.conversations = Conversations(flow, settings.max_sessions, settings.max_branches)
        series.watch(self.admission, self.conversations)

    def scope(self, body: CommonFields, tenant: str) -> Scope:
        """Whose conversations ``body`` may go on with.

        Raises:
            ApiError: another model is asked for.
        """
        if body.model != self.model:
            raise ApiError(
                404,
                f"the model {body.model!r} does not exist; this server has {self.model!r}",
                code="model_not_found",
                param="model",
            )
        user = body.safety_identifier or body.user or ""
        parts = [tenant, body.cache_salt or "", user if self.settings.user_is_tenant else ""]
        return Scope(json.dumps(parts) if any(parts) else "", user, body.prompt_cache_key)

    def room_for(
        self,
        prompt: list[int],
        param: str,
        wanted: int | None,
        limit: str,
        usual: int | None = None,
    ) -> int:
        """New tokens that may be made after ``prompt``. ``param``, ``limit``: the fields that said
        the prompt and ``wanted``; ``usual``: as many, or as there is room for, where nothing is
        wanted (None: the setting says).

        Raises:
            ApiError: the prompt, or the prompt and ``wanted`` tokens, do not fit the context.
        """
        longest, held = self.flow.engine.max_tokens, len(prompt)
        room = longest - held + 1
        if not prompt:
            raise ApiError(400, f"{param}: the prompt is empty", code="invalid_value", param=param)
        if (wanted or 1) > room:
            text = f"the prompt has {held} tokens, and this model's context is {longest}"
            what = f"{text}: there is room for {room} more, not for {wanted}" if room > 0 else text
            blamed = limit if room > 0 else param
            raise ApiError(400, f"{blamed}: {what}", code="context_length_exceeded", param=blamed)
        return min(wanted or usual or self.settings.default_max_tokens or room, room)

    @asynccontextmanager
    async def answer(self, prepare: Callable[[], Awaitable[Job]]) -> AsyncIterator[Answer]:
        """The answer to what ``prepare`` says, once it is this request's turn."""
        clock = self.flow.clock
        came = clock.now()
        async with self.admission.place():
            job = await prepare()
            async with self.conversations.lend(job.scope, job.prompt) as lent:
                answer = Answer(job, lent, self.words, lambda: clock.now() - came)
                await answer.compare(self.flow.engine.layout.chunk_tokens)
                try:
                    yield answer
                finally:
                    self.series.answered(answer)

    def usage(self, answer: Answer) -> Usage:
        """Token counts of a finished answer."""
        chunk = self.flow.engine.layout.chunk_tokens
        return usage_of(answer.report, len(answer.tokens), chunk)

    async def prefetch(
        self, scope: Scope, prepare: Callable[[], Awaitable[list[int]]]
    ) -> Prefetched:
        """Restore what ``prepare`` says for the conversation that will go on with it."""
        report, began = Generation(), self.flow.clock.now()
        async with self.admission.place():
            prompt = await prepare()
            self.room_for(prompt, "messages", None, "")
            session = await self.conversations.expected(scope, prompt)
            await session.prefetch(prompt, report=report)
        if report.restoration is None:  # there was nothing to do
            report.usage.prompt_tokens = report.usage.resident_tokens = len(prompt)
        return Prefetched(
            session=session.id,
            seconds=self.flow.clock.now() - began,
            usage=usage_of(report, 0, self.flow.engine.layout.chunk_tokens),
        )
