"""What the examples of this folder share: a server, a tool, and something to talk about.

The server is the one at ``CACHEFLOW_URL`` (its model called ``smollm2``), or one of the example's
own for as long as it runs, on SmolLM2-135M-Instruct. That model is far too small to see for itself
when a tool is of use. So the examples make it call one (``tool_choice``) and show it how; what they
are about is what happens around the call.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from openai import OpenAI

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["HANDBOOK", "MODEL", "QUESTION", "server", "show", "started", "weather"]

MODEL: Final = "smollm2"
HANDBOOK: Final = (
    "You answer briefly, in one sentence. You work on this code, and know it by heart:\n\n"
    + inspect.getsource(textwrap)[:450]
)
"""Instructions as agents have them, the same in every turn: with the tool, one whole chunk."""
QUESTION: Final = (
    "What is the weather in Paris? Call the tool like this: "
    '{"name": "weather", "arguments": {"city": "Paris"}}'
)


def weather(city: str) -> str:
    """Tell what the weather is like in a city."""
    others_are_served(os.environ["CACHEFLOW_URL"])
    return f"{city}: 18 degrees, light rain"


def others_are_served(url: str) -> None:
    """While a tool runs, a server needs its memory for others. The example's own server keeps one
    conversation in memory, so that the agent's leaves it now; what was stored stays."""
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hello!"}],
            max_completion_tokens=1,
            prompt_cache_key="somebody else",
        )


def show(turn: str, prompt_tokens: int, cached_tokens: int) -> None:
    """What a framework says of a turn's prompt."""
    print(f"{turn}: {prompt_tokens} prompt tokens, {cached_tokens} of them cached")


@contextmanager
def server() -> Iterator[str]:
    """The address of a server."""
    if url := os.environ.get("CACHEFLOW_URL"):
        yield url
        return
    from cacheflow.plugins.transformers import prepare_smollm2

    with tempfile.TemporaryDirectory() as store, started(prepare_smollm2(), Path(store)) as url:
        os.environ["CACHEFLOW_URL"] = url
        yield url


@contextmanager
def started(model: Path, store: Path) -> Iterator[str]:
    """The address of a server of our own, which ends with the block."""
    command = Path(sys.executable).with_name("cacheflow")
    options = ("--model", model, "--name", MODEL, "--store", store, "--port", "0")
    process = subprocess.Popen(
        [command, "serve", *options],
        env=os.environ | {"CACHEFLOW_SERVER_MAX_SESSIONS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        yield address_in(process.stderr)
    finally:
        process.terminate()  # it stores what is still to be stored, and ends
        process.communicate()


def address_in(log: IO[str]) -> str:
    """What the server says when it listens."""
    said = ""
    for line in log:
        said += line
        if found := re.search(r"running on (http://\S+)", line):
            return found[1]
    raise SystemExit(f"the server did not start:\n{said}")
