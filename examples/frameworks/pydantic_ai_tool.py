"""pydantic-ai: an agent with a tool, whose use is forced in the first step only."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openai import AsyncOpenAI
from pydantic_ai import Agent, RunContext
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import ModelResponse
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings
from pydantic_ai.providers.openai import OpenAIProvider
from serving import HANDBOOK, MODEL, QUESTION, server, show
from serving import weather as look_outside

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic_ai.settings import ModelSettings


@dataclass
class ToolFirst(AbstractCapability[None]):
    """The tool in the first step, words in the next: the small model has no say in it."""

    def get_model_settings(self) -> Callable[[RunContext[None]], ModelSettings]:
        def settings(context: RunContext[None]) -> ModelSettings:
            return {"tool_choice": ["weather"] if context.run_step <= 1 else "none"}

        return settings


async def weather(city: str) -> str:
    """Tell what the weather is like in a city."""
    return await asyncio.to_thread(look_outside, city)


async def main(url: str) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
        agent = Agent(
            model,
            instructions=HANDBOOK,
            tools=[weather],
            capabilities=[ToolFirst()],
            model_settings=OpenAIChatModelSettings(
                max_tokens=24, parallel_tool_calls=False, openai_prompt_cache_key="pydantic-ai"
            ),
        )
        result = await agent.run(QUESTION)
    print(result.output)
    turns = [message for message in result.all_messages() if isinstance(message, ModelResponse)]
    for name, turn in zip(("asked", "resumed"), turns, strict=False):
        show(name, turn.usage.input_tokens, turn.usage.cache_read_tokens)


if __name__ == "__main__":
    with server() as address:
        asyncio.run(main(address))
