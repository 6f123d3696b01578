"""Time to first token of an agent's turns, with and without CacheFlow, as a picture.

    python examples/agent_ttft.py            # agent-ttft.png; some minutes on a laptop's CPU
    TURNS=6 python examples/agent_ttft.py    # a quick look

Cells begin with ``# %%``: editors run them one by one, and jupytext makes a notebook of them.
"""

# %% What it takes: a model, a store, and a link to it that is as slow, next to a CPU, as a network
# is next to a GPU.
import asyncio
import inspect
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cacheflow.plugins.transformers import TransformersEngine, prepare_smollm2
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings, TierSettings

TURNS = int(os.environ.get("TURNS", "20"))
PICTURE = Path(os.environ.get("PICTURE", "agent-ttft.png"))
LINK_BYTES_A_SECOND = 20e6
ANSWER_TOKENS = 12
RESULT_CHARACTERS = 900
"""Of a tool's result: some 250 tokens of source code."""


# %% The agent: each turn its tool returns a piece of source code, and it is asked about that. While
# the tool runs, the server forgets. One with CacheFlow has stored what it forgets; one that is told
# of the pause brings it back before the tool is done.
def tool_result(turn: int) -> str:
    source = inspect.getsource(json.decoder) + inspect.getsource(inspect)
    return source[turn * RESULT_CHARACTERS :][:RESULT_CHARACTERS]


async def turns_of(
    flow: CacheFlow, *, forgets: bool, prefetches: bool
) -> tuple[list[float], list[str]]:
    """TTFT and answer of each turn."""
    session = flow.session("agent")
    messages = [{"role": "system", "content": "You read source code and say briefly what it does."}]
    seconds, answers = [], []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": tool_result(turn)})
        report = Generation()
        answer = session.generate(messages, max_new_tokens=ANSWER_TOKENS, report=report)
        tokens = [token async for token in answer]
        assert flow.engine.chat is not None
        answers.append(flow.engine.chat.decode(tokens))
        messages.append({"role": "assistant", "content": answers[-1]})
        seconds.append(report.ttft_seconds or 0.0)
        print(f"  turn {turn + 1:2}: {report.usage.prompt_tokens:5} tokens {seconds[-1]:6.2f} s")
        if forgets:
            await flow.flush()
            await session.forget()
        if prefetches:
            await session.prefetch()  # for as long as the tool takes, or longer
    return seconds, answers


# %% Four servers: one with memory for every session, one that forgets, and two with CacheFlow.
async def four_servers(store: str) -> dict[str, tuple[list[float], list[str]]]:
    link: dict[str, Any] = {
        "inner": "nvme",
        "inner_options": {"path": store},
        "bandwidth": LINK_BYTES_A_SECOND,
    }
    stored = Settings(tiers=(TierSettings(name="disk", backend="throttled", options=link),))
    servers = {
        "never forgets": (Settings(), False, False),
        "forgets": (Settings(), True, False),
        "forgets, with CacheFlow": (stored, True, False),
        "the same, and prefetches while the tool runs": (stored, True, True),
    }
    engine = await TransformersEngine.open_model(prepare_smollm2(), dtype="float32")
    found = {}
    for name, (settings, forgets, prefetches) in servers.items():
        print(f"{name}:")
        async with CacheFlow.open(settings, engine=engine) as flow:
            found[name] = await turns_of(flow, forgets=forgets, prefetches=prefetches)
    await engine.aclose()
    return found


with tempfile.TemporaryDirectory() as folder:
    results = asyncio.run(four_servers(folder))

# %% The picture: what is forgotten and recomputed makes every turn slower than the one before.
figure = Figure(figsize=(8, 4.5), layout="constrained")
axes = figure.add_subplot(xlabel="turn", ylabel="seconds to the first token")
for name, (ttft, _) in results.items():
    axes.plot(range(1, TURNS + 1), ttft, marker="o", markersize=3, label=name)
axes.set_xticks(range(1, TURNS + 1))
axes.set_ylim(bottom=0)
axes.legend(frameon=False)
FigureCanvasAgg(figure).print_png(PICTURE)

same = len({tuple(said) for _, said in results.values()}) == 1
print(f"{PICTURE}; the answers of all are {'the same' if same else 'NOT THE SAME'}")
