"""Agent frameworks in the server's own process: their client's transport is the application.

The engine is the real one on a tiny model, and says what it is told to; KV, store and restores are
real. While a tool runs the whole KV memory is dropped, so what is cached afterwards was loaded.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from openai import OpenAI
from pydantic import SecretStr

from cacheflow.plugins.openai_server import create_app
from tests.unit.openai_server.conftest import MODEL, client_of, openai_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from cacheflow.plugins.openai_server.service import Service

    Serving = Callable[..., AbstractAsyncContextManager[Service]]

pytestmark = pytest.mark.filterwarnings("default")  # the frameworks' own

INSTRUCTIONS = "you are the cat and the dog on the mat " * 4
QUESTION = "the cat and the weather"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = "the dog sat on the mat"
RESULT = "rain in Paris"


async def forget(service: Service) -> None:
    """What a busy server does while a tool runs."""
    await service.flow.flush()
    await service.flow.forget()


async def test_openai_agents_sdk(serving: Serving) -> None:
    """The model asks for the tool, the SDK runs it, and the resumed turn's usage says cached."""
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    async with serving(CALL, ANSWER) as service, openai_of(service) as client:

        @function_tool
        async def weather(city: str) -> str:
            await forget(service)
            return RESULT.replace("Paris", city)

        model = OpenAIChatCompletionsModel(MODEL, client)
        agent = Agent(name="a", instructions=INSTRUCTIONS, tools=[weather], model=model)
        result = await Runner.run(agent, QUESTION)
    assert result.final_output == ANSWER
    asked, resumed = (each.usage for each in result.raw_responses)
    assert asked.input_tokens_details.cached_tokens == 0
    assert 0 < resumed.input_tokens_details.cached_tokens < resumed.input_tokens


async def test_pydantic_ai(serving: Serving) -> None:
    """The same with pydantic-ai."""
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelResponse
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async with serving(CALL, ANSWER) as service, openai_of(service) as client:

        async def weather(city: str) -> str:
            await forget(service)
            return RESULT.replace("Paris", city)

        model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
        agent = Agent(model, instructions=INSTRUCTIONS, tools=[weather])
        result = await agent.run(QUESTION)
    assert result.output == ANSWER
    asked, resumed = (m.usage for m in result.all_messages() if isinstance(m, ModelResponse))
    assert asked.cache_read_tokens == 0
    assert 0 < resumed.cache_read_tokens < resumed.input_tokens


async def test_langgraph(serving: Serving) -> None:
    """The same with LangGraph; then two branches from the checkpoint, at the same time."""
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    async with serving(CALL, ANSWER) as service, client_of(service) as http:

        @tool
        async def weather(city: str) -> str:
            """Tell the weather."""
            await forget(service)
            return RESULT.replace("Paris", city)

        model = ChatOpenAI(
            model=MODEL,
            base_url="http://server/v1",
            api_key=SecretStr("none"),
            http_async_client=http,
            max_completion_tokens=96,
        ).bind_tools([weather])

        async def ask(state: MessagesState) -> dict[str, Any]:
            return {"messages": await model.ainvoke(state["messages"], prompt_cache_key="t")}

        builder = StateGraph(MessagesState)
        builder.add_node("ask", ask)
        builder.add_node("tools", ToolNode([weather]))
        builder.add_edge(START, "ask")
        builder.add_conditional_edges("ask", tools_condition)
        builder.add_edge("tools", "ask")
        graph: Any = builder.compile(checkpointer=InMemorySaver())
        begun = [SystemMessage(INSTRUCTIONS), HumanMessage(QUESTION)]
        thread: Any = {"configurable": {"thread_id": "t"}}
        messages = (await graph.ainvoke({"messages": begun}, thread))["messages"]
        checkpoint = (await graph.aget_state(thread)).config
        await forget(service)
        branches = await asyncio.gather(
            *(
                graph.ainvoke({"messages": [HumanMessage(text)]}, checkpoint)
                for text in ("the cat", "the dog")
            )
        )
    assert messages[-1].text == ANSWER
    for message in (messages[-1], *(branch["messages"][-1] for branch in branches)):
        usage = message.usage_metadata
        assert 0 < usage["input_token_details"]["cache_read"] < usage["input_tokens"]


class InLoop(httpx2.BaseTransport):
    """Lets a client in another thread talk to the application in the loop's."""

    def __init__(self, service: Service) -> None:
        self._asgi = httpx2.ASGITransport(create_app(service))
        self._loop = asyncio.get_running_loop()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        return asyncio.run_coroutine_threadsafe(self._ask(request), self._loop).result(60)

    async def _ask(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._asgi.handle_async_request(request)
        body = await response.aread()
        return httpx2.Response(response.status_code, headers=response.headers, content=body)


async def test_smolagents(serving: Serving) -> None:
    """The same with smolagents, which is synchronous and so runs beside the loop."""
    from smolagents import OpenAIModel, ToolCallingAgent, tool
    from smolagents.agents import EMPTY_PROMPT_TEMPLATES

    final = CALL.replace("weather", "final_answer").replace('"city": "Paris"', '"answer": "rain"')
    loop = asyncio.get_running_loop()
    cached: list[int] = []
    async with serving(CALL, final) as service:

        @tool  # type: ignore[untyped-decorator]
        def weather(city: str) -> str:
            """Tells the weather.

            Args:
                city: Its name.
            """
            asyncio.run_coroutine_threadsafe(forget(service), loop).result(60)
            return RESULT.replace("Paris", city)

        class Counting(OpenAIModel):  # type: ignore[misc] # smolagents has no types
            def generate(self, *messages: Any, **options: Any) -> Any:
                answer = super().generate(*messages, tool_choice="auto", **options)
                cached.append(answer.raw.usage.prompt_tokens_details.cached_tokens)
                return answer

            def create_client(self) -> OpenAI:
                client = httpx2.Client(transport=InLoop(service))
                return OpenAI(api_key="none", base_url="http://server/v1", http_client=client)

        templates = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": INSTRUCTIONS}
        agent = ToolCallingAgent(
            [weather], Counting(MODEL, max_tokens=96), prompt_templates=templates, max_steps=2
        )
        said = await asyncio.to_thread(agent.run, QUESTION)
    assert said == "rain"
    asked, resumed = cached
    assert asked == 0 < resumed
