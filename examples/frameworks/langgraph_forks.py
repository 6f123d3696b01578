"""LangGraph in process: a branch from a checkpoint is a fork of the session that belongs to it.

The graph's state names the session that has its context. Before a checkpoint is branched, its
session is forked, and the branch's first checkpoint names the fork; so branches share KV in memory
and never get into each other's way.
"""

from __future__ import annotations

import asyncio
import inspect
import tempfile
import textwrap
from typing import Any

from langchain_core.messages import (
    AIMessage,
    HumanMessage,
    SystemMessage,
    convert_to_openai_messages,
)
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from serving import show

from cacheflow.plugins.transformers import TransformersEngine, prepare_smollm2
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings, TierSettings

HANDBOOK = "You answer briefly. You work on this code:\n\n" + inspect.getsource(textwrap)[:2000]
QUESTION = "In one sentence, what is it for?"
PLANS = ("Name one class of it.", "Name one function of it.", "Name one module that it imports.")


class State(MessagesState):
    session: str
    """Which session has the KV of these messages."""


def graph_of(flow: CacheFlow) -> Any:
    chat = flow.engine.chat
    assert chat is not None

    async def answer(state: State) -> dict[str, Any]:
        session, report = flow.session(state["session"]), Generation()
        messages = convert_to_openai_messages(state["messages"])
        made = session.generate(messages, max_new_tokens=24, report=report)
        text = chat.decode([token async for token in made])
        show(session.id, report.usage.prompt_tokens, report.usage.cached_tokens)
        return {"messages": AIMessage(text)}

    builder = StateGraph(State)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    return builder.compile(checkpointer=InMemorySaver())


async def branch(flow: CacheFlow, graph: Any, checkpoint: Any) -> Any:
    """A checkpoint like ``checkpoint``, whose session is a fork of that one's."""
    state = await graph.aget_state(checkpoint)
    fork = await flow.session(state.values["session"]).fork()
    return await graph.aupdate_state(checkpoint, {"session": fork.id})


async def main(store: str) -> None:
    engine = await TransformersEngine.open_model(prepare_smollm2(), dtype="float32")
    tier = TierSettings(name="disk", backend="nvme", options={"path": store})
    async with CacheFlow.open(Settings(tiers=(tier,)), engine=engine) as flow:
        graph, trunk = graph_of(flow), flow.session("trunk")
        thread = {"configurable": {"thread_id": "trunk"}}
        begun = [SystemMessage(HANDBOOK), HumanMessage(QUESTION)]
        await graph.ainvoke({"messages": begun, "session": trunk.id}, thread)
        checkpoint = (await graph.aget_state(thread)).config

        await flow.flush()
        await flow.forget()  # the user thinks, the server serves others ...
        await trunk.prefetch()  # ... and brings back what all branches begin with

        branches = [await branch(flow, graph, checkpoint) for _ in PLANS]
        for config, plan in zip(branches, PLANS, strict=True):
            ended = await graph.ainvoke({"messages": [HumanMessage(plan)]}, config)
            print(f"  {plan} {ended['messages'][-1].text}")
    await engine.aclose()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(folder))
