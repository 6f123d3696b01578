"""The OpenAI Agents SDK: an agent with a function tool, over ``/v1/responses``."""

from __future__ import annotations

import asyncio

import serving
from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from serving import HANDBOOK, MODEL, QUESTION, server, show


@function_tool
async def weather(city: str) -> str:
    """Tell what the weather is like in a city."""
    return await asyncio.to_thread(serving.weather, city)


async def main(url: str) -> None:
    set_tracing_disabled(True)  # else runs are reported to OpenAI
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        agent = Agent(
            name="guide",
            instructions=HANDBOOK,
            tools=[weather],
            model=OpenAIResponsesModel(MODEL, client),
            # Once: after a call the SDK leaves the choice to the model again.
            model_settings=ModelSettings(
                tool_choice="weather",
                parallel_tool_calls=False,
                max_tokens=24,
                extra_args={"prompt_cache_key": "agents"},
            ),
        )
        result = await Runner.run(agent, QUESTION, max_turns=4)
    print(result.final_output)
    for turn, response in zip(("asked", "resumed"), result.raw_responses, strict=False):
        usage = response.usage
        show(turn, usage.input_tokens, usage.input_tokens_details.cached_tokens)


if __name__ == "__main__":
    with server() as address:
        asyncio.run(main(address))
