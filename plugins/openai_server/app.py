"""The application: endpoints, and errors in OpenAI's shape. Serves one :class:`Service`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from cacheflow import __version__
from cacheflow.metrics import Exposition
from cacheflow.plugins.openai_server.chat import ChatTurn
from cacheflow.plugins.openai_server.chat_schema import ChatCompletion, ChatRequest
from cacheflow.plugins.openai_server.common_schema import ErrorBody, Model, ModelList, Prefetched
from cacheflow.plugins.openai_server.completion_schema import Completion, CompletionRequest
from cacheflow.plugins.openai_server.completions import CompletionTurn
from cacheflow.plugins.openai_server.errors import (
    ApiError,
    error_response,
    from_validation,
    unreadable,
)
from cacheflow.plugins.openai_server.exchange import Events, Whole
from cacheflow.plugins.openai_server.gatekeeper import Gatekeeper
from cacheflow.plugins.openai_server.response_schema import Response as Answered
from cacheflow.plugins.openai_server.response_schema import ResponseRequest
from cacheflow.plugins.openai_server.responses import ResponseTurn

if TYPE_CHECKING:
    from cacheflow.plugins.openai_server.service import Service

__all__ = ["create_app"]

_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "The request cannot be answered as it is",
        401: "No such API key",
        404: "No such model",
        408: "The body did not arrive in time",
        413: "The body is too large",
        429: "Too many requests wait; Retry-After says when to come again",
        500: "The server failed",
        503: "The server drains, or has no memory left; Retry-After says when to come again",
        504: "The request took too long",
    }.items()
}
_TEXT: Final = {"schema": {"type": "string"}}
_EVENT: Final = {
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
_STREAMED: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/event-stream": {"schema": _EVENT}}}
}


def create_app(service: Service) -> FastAPI:
    """An ASGI application over ``service``, whose life is the caller's."""
    app = FastAPI(title="CacheFlow", version=__version__, redoc_url=None, strict_content_type=False)
    _turns(app, service)
    _about(app, service)
    _shape_errors(app)
    paths = [route.path for route in app.routes if hasattr(route, "path")]
    app.add_middleware(
        Gatekeeper,
        settings=service.settings,
        series=service.series,
        paths=paths,
        context=service.flow.engine.max_tokens,
    )
    return app


def _turns(app: FastAPI, service: Service) -> None:
    """What uses the model."""
    seconds = service.settings.request_seconds

    @app.post(
        "/v1/chat/completions", response_model=ChatCompletion, responses={**_ERRORS, **_STREAMED}
    )
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        turn = ChatTurn(service, body, request.state.tenant)
        return Events(turn.events, seconds) if body.stream else Whole(turn.whole, seconds)

    @app.post("/v1/cacheflow/prefetch", response_model=Prefetched, responses=_ERRORS)
    async def prefetch(body: ChatRequest, request: Request) -> Response:
        return Whole(ChatTurn(service, body, request.state.tenant).prefetch, seconds)

    @app.post("/v1/completions", response_model=Completion, responses={**_ERRORS, **_STREAMED})
    async def completions(body: CompletionRequest, request: Request) -> Response:
        turn = CompletionTurn(service, body, request.state.tenant)
        return Events(turn.events, seconds) if body.stream else Whole(turn.whole, seconds)

    @app.post("/v1/responses", response_model=Answered, responses={**_ERRORS, **_STREAMED})
    async def responses(body: ResponseRequest, request: Request) -> Response:
        turn = ResponseTurn(service, body, request.state.tenant)
        return Events(turn.events, seconds) if body.stream else Whole(turn.whole, seconds)


def _about(app: FastAPI, service: Service) -> None:
    """What says how things stand."""

    @app.get("/v1/models", responses={401: _ERRORS[401]})
    async def models() -> ModelList:
        return ModelList(data=[_model(service)])

    @app.get("/v1/models/{model:path}", responses={401: _ERRORS[401], 404: _ERRORS[404]})
    async def model(model: str) -> Model:
        if model != service.model:
            raise ApiError(404, f"the model {model!r} does not exist", code="model_not_found")
        return _model(service)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"model": dict[str, str]}})
    async def ready() -> Response:
        if service.admission.draining:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ready"})

    page = Exposition(service.series.registry)

    @app.get("/metrics", responses={200: {"content": {"text/plain": _TEXT}}})
    async def metrics(request: Request) -> Response:
        accepted = request.headers.get("accept-encoding", "")
        text, headers = await asyncio.to_thread(page.answer, accepted)
        return Response(text, headers=headers)


def _model(service: Service) -> Model:
    longest = service.flow.engine.max_tokens
    return Model(id=service.model, created=service.created, max_model_len=longest)


def _shape_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def told(_request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        return error_response(from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 400 and error.__cause__ is not None:  # FastAPI's, of a body
            return error_response(unreadable(error.__cause__))
        message = f"{error.detail}: {request.method} {request.url.path}"
        return error_response(
            ApiError(error.status_code, message, headers=error.headers, code="invalid_request")
        )
