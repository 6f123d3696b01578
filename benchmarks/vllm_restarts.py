"""A server that is started again and again over one folder: what its clients see.

``vllm serve`` with CacheFlow and the openai client. The first life computes and stores; each later
one has to restore every whole block, say in ``cached_tokens`` how many it loaded (the others it may
compute meanwhile, from the front), and answer the same, word for word.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.parser import text_string_to_metric_families
from vllm_engine import BLOCK, cacheflow_options, smollm2

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["add_arguments", "report", "run"]

START_SECONDS: Final = 900.0
"""A busy machine takes minutes."""
QUESTIONS: Final = ("What is this about?", "Who is meant?", "How does it end?")
NEW_TOKENS: Final = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes."""
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--words", type=int, default=1000, help="of the text that is asked about")


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All lives."""
    if options.quick:
        options.restarts, options.words = 1, 600
    text = " ".join(f"Sentence {n} says that {n * 37 % 101} follows." for n in range(options.words))
    text = " ".join(text.split()[: options.words])
    model, lives = options.model or smollm2(), []
    for life in range(options.restarts + 1):
        with _server(model, folder / "store", folder / f"server-{life}.log") as port:
            lives.append(_ask(port, model, text) | {"restored": _restored(port)})
            if not life:
                _wait_for_store(folder / "store", lives[0])
        print(f"life {life + 1}: {lives[-1]}", file=sys.stderr, flush=True)
    return {"lives": lives}


def report(result: dict[str, Any]) -> list[str]:
    """The verdicts."""
    first, *later = result["lives"]
    answers = all(life["answers"] == first["answers"] for life in later)
    cached = all(sum(life["cached"]) == life["restored"].get("load", 0) for life in later)
    whole = all(sum(life["restored"].values()) == sum(first["whole"]) for life in later)
    loaded = [f"{sum(life['cached'])} of {sum(first['whole'])}" for life in later]
    return [
        f"answers after {len(later)} restarts are those before: {'yes' if answers else 'NO'}",
        f"every whole block was restored: {'yes' if whole else 'NO'}",
        f"cached_tokens ({', '.join(loaded)}) are the tokens loaded: {'yes' if cached else 'NO'}",
    ]


def _ask(port: int, model: str, text: str) -> dict[str, Any]:
    import openai

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600.0)
    answers, cached, whole, seconds = [], [], [], []
    for question in QUESTIONS:
        start = time.perf_counter()
        answer = client.completions.create(
            model=model,
            prompt=f"{question} {text}\n{question}",
            max_tokens=NEW_TOKENS,
            temperature=0.0,
        )
        seconds.append(round(time.perf_counter() - start, 3))
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        answers.append(answer.choices[0].text)
        cached.append(0 if details is None else details.cached_tokens or 0)
        whole.append((answer.usage.prompt_tokens - 1) // BLOCK * BLOCK)
    return {"answers": answers, "cached": cached, "whole": whole, "seconds": seconds}


def _restored(port: int) -> dict[str, int]:
    """Prefix tokens of this life's restores, by who made them, from the server's own metrics."""
    import httpx

    page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    found: dict[str, int] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "vllm:cacheflow_restore_tokens_total":
                source = sample.labels["source"]
                found[source] = found.get(source, 0) + int(sample.value)
    return found


def _wait_for_store(store: Path, life: dict[str, Any], seconds: float = 120.0) -> None:
    """Blocks are stored behind the answers; a server that is stopped too soon loses the last."""
    blocks, end = sum(life["whole"]) // BLOCK, time.monotonic() + seconds
    while sum(path.is_file() for path in (store / "objects").rglob("*.kv.*")) < blocks:
        if time.monotonic() > end:
            raise SystemExit(f"{blocks} blocks are not stored after {seconds:g} s")
        time.sleep(0.2)


@contextmanager
def _server(model: str, store: Path, log: Path) -> Iterator[int]:
    """One life of the server; its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    tier = {"name": "disk", "backend": "nvme", "options": {"path": str(store)}}
    options = cacheflow_options([tier], lookup_patience=10.0)
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
        *("--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--no-enable-prefix-caching", "--enable-prompt-tokens-details"),
        *("--scheduler-cls", options["scheduler_cls"]),
        *("--kv-transfer-config", json.dumps(options["kv_transfer_config"])),
    ]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", **os.environ}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            _wait_until_up(port, process, log)
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)


def _wait_until_up(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    import httpx

    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise SystemExit(f"the server does not start:\n{log.read_text()[-3000:]}")
