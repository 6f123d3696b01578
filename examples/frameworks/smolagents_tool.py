"""smolagents: a tool-calling agent. ``TokenUsage`` has no cached tokens, the raw answer does."""

from __future__ import annotations

from typing import Any

from serving import HANDBOOK, MODEL, QUESTION, server, show
from serving import weather as look_outside
from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES
from smolagents.models import (
    ChatMessage,
    ChatMessageToolCall,
    ChatMessageToolCallFunction,
    MessageRole,
)


@tool  # type: ignore[untyped-decorator]
def weather(city: str) -> str:
    """Tells what the weather is like in a city.

    Args:
        city: Its name.
    """
    return look_outside(city)


class Directed(OpenAIModel):  # type: ignore[misc] # smolagents has no types
    """Calls the tool first; what it says then is the final answer. The model has no say in it."""

    def generate(self, messages: list[ChatMessage], **options: Any) -> ChatMessage:
        called = any(message.role == MessageRole.TOOL_RESPONSE for message in messages)
        choice = {"type": "function", "function": {"name": "weather"}}
        answer = super().generate(messages, tool_choice="none" if called else choice, **options)
        usage = answer.raw.usage
        cached = usage.prompt_tokens_details.cached_tokens
        show("resumed" if called else "asked", usage.prompt_tokens, cached)
        if called:
            final = ChatMessageToolCallFunction({"answer": answer.content}, "final_answer")
            answer.tool_calls = [ChatMessageToolCall(final, id="final", type="function")]
        return answer


def main(url: str) -> None:
    model = Directed(
        MODEL,
        api_base=f"{url}/v1",
        api_key="none",
        max_tokens=24,
        parallel_tool_calls=False,
        prompt_cache_key="smolagents",
    )
    # smolagents' own instructions are 1,900 tokens with examples: more than this model can follow.
    templates = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": HANDBOOK}
    agent = ToolCallingAgent([weather], model, prompt_templates=templates, max_steps=3)
    print(agent.run(QUESTION))


if __name__ == "__main__":
    with server() as address:
        main(address)
