"""LangGraph: a tool between two turns, then branches from a checkpoint, which the server forks.

A branch's messages begin with those of the checkpoint, so its prompt begins with the same tokens:
the server takes them from the conversation's memory, or from the store, whoever made them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import SecretStr
from serving import HANDBOOK, MODEL, QUESTION, server, show
from serving import weather as look_outside

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

BRANCHES = ("And what do I wear?", "And do I need an umbrella?")


@tool
def weather(city: str) -> str:
    """Tell what the weather is like in a city."""
    return look_outside(city)


def graph_of(url: str) -> Any:
    model = ChatOpenAI(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key=SecretStr("none"),
        max_completion_tokens=24,
        use_responses_api=False,
    )

    def ask(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        first = len(state["messages"]) <= 2
        choice = "weather" if first else "none"
        bound = model.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
        key = config["configurable"]["thread_id"]
        return {"messages": bound.invoke(state["messages"], prompt_cache_key=key)}

    builder = StateGraph(MessagesState)
    builder.add_node("ask", ask)
    builder.add_node("tools", ToolNode([weather]))
    builder.add_edge(START, "ask")
    builder.add_conditional_edges("ask", tools_condition)
    builder.add_edge("tools", "ask")
    return builder.compile(checkpointer=InMemorySaver())


def tell(turn: str, message: Any) -> None:
    usage = message.usage_metadata
    show(turn, usage["input_tokens"], usage["input_token_details"]["cache_read"])


def main(url: str) -> None:
    graph = graph_of(url)
    thread = {"configurable": {"thread_id": "trip"}}
    begun = [SystemMessage(HANDBOOK), HumanMessage(QUESTION)]
    messages = graph.invoke({"messages": begun}, thread)["messages"]
    tell("asked", messages[2])
    tell("resumed", messages[-1])
    checkpoint = graph.get_state(thread).config
    for question in BRANCHES:
        ended = graph.invoke({"messages": [HumanMessage(question)]}, checkpoint)
        print(f"{question} {ended['messages'][-1].text}")
        tell("branch", ended["messages"][-1])


if __name__ == "__main__":
    with server() as address:
        main(address)
