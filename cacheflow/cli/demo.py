"""``cacheflow demo``: a conversation loses its KV cache and gets it back, three ways."""

from __future__ import annotations

import asyncio
import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from cacheflow.cli.demo_report import Link, Row, parse_links, results_table
from cacheflow.cli.demo_screen import Screen
from cacheflow.cli.output import AsJson, human_bytes, print_json, run
from cacheflow.cores import usable_cores
from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from cacheflow.cli.demo_run import Demo
    from cacheflow.metrics.timeline import Timeline

__all__ = ["demo"]

_TOKENS: Final = 4096
_QUICK_TOKENS: Final = 1024
_LEAST_TOKENS: Final = 512
_RESERVE: Final = 256
"""Tokens of the context kept free for the last turn and its answer."""
_DRIFT: Final = 0.25
"""Loads beside compute slow it down by a tenth on a small machine: that is the way's own cost."""
_DRAWN: Final = "1:1"
"""The link whose run is drawn, if it is among those tried; else the last one."""


@dataclass
class _Options:
    tokens: int
    links: tuple[Link, ...]
    threads: int
    model: Path | None
    output: Path
    rows: list[Row] = field(default_factory=list)
    drawn: list[Path] = field(default_factory=list)


def demo(
    store: Annotated[
        Path | None,
        typer.Option(help="Folder for the stored KV (default: a temporary one)."),
    ] = None,
    links: Annotated[
        str,
        typer.Option(help="compute:I/O of each link, or 'raw' for the disk itself."),
    ] = "raw,3:1,1:1,1:3",
    tokens: Annotated[
        int | None,
        typer.Option(help=f"Length of the history in tokens (default: {_TOKENS}).", min=1),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"A history of {_QUICK_TOKENS} tokens.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Compute threads on a CPU (default: half the cores, 2 on 2 to 4).", min=1
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of another chat model (default: SmolLM2-135M-Instruct)."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for timeline.json and timeline.png.")] = Path(
        "demo-output"
    ),
    json: AsJson = False,
) -> None:
    """Let an agent's conversation lose its KV cache, and bring it back three ways.

    A trained model reads source files over several turns; its KV cache goes to disk and is freed.
    The next turn arrives: recompute only, load only, and CacheFlow from both ends at once, from the
    disk itself and over links as slow, compared to compute, as a GPU server's. Answers are compared
    with the run that never forgot. Exits with 1 if any of them differs.
    """
    length = tokens or (_QUICK_TOKENS if quick else _TOKENS)
    if length < _LEAST_TOKENS:
        raise ConfigError(f"--tokens {length}: the conversation needs at least {_LEAST_TOKENS}")
    options = _Options(length, parse_links(links), threads or _threads(), model, output)
    # Threads that spin while they wait would take the cores that loads need.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    with ExitStack() as stack:
        folder = store or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheflow-"))
        )
        screen = stack.enter_context(Screen(quiet=json))
        result = run(_demo(options, folder, screen))
    if json:
        print_json(result)
    if not result["identical"]:
        raise typer.Exit(1)


def _threads() -> int:
    cores = usable_cores()
    return min(cores, 2) if cores <= 4 else cores // 2


async def _demo(options: _Options, store: Path, screen: Screen) -> dict[str, Any]:
    from cacheflow.cli.demo_run import Demo

    engine = await _open_engine(options, screen)
    try:
        if options.tokens + _RESERVE > engine.max_tokens:
            raise ConfigError(
                f"--tokens {options.tokens}: the model's context of {engine.max_tokens} tokens has "
                f"room for {engine.max_tokens - _RESERVE}"
            )
        demo = Demo(engine, store, screen)
        await _history(demo, options, screen)
        for link in options.links:
            await _one_link(demo, link, options, screen)
        answer, identical = await _resume(demo, options.links[0], screen)
        result = _result(demo, options, answer, identical)
        _conclude(result, screen)
        return result
    finally:
        await engine.aclose()


async def _open_engine(options: _Options, screen: Screen) -> Any:
    from cacheflow.registry import load_engine
    from cacheflow.settings import Settings

    factory = cast("Any", await asyncio.to_thread(load_engine, "transformers"))
    folder = options.model
    if folder is None:
        folder = await _small_model(factory, Settings().cache_dir, screen)
    with screen.step(f"loading {folder.name}", 1):
        return await factory.open_model(folder, dtype="float32", threads=options.threads)


async def _small_model(factory: Any, cache_dir: Path, screen: Screen) -> Path:
    done = 0.0
    with screen.step("SmolLM2-135M-Instruct: getting the model ready", 1.0) as advance:

        def tell(_: str, share: float) -> None:
            nonlocal done
            advance(share - done)
            done = share

        return cast("Path", await asyncio.to_thread(factory.small_model, cache_dir, tell))


async def _history(demo: Demo, options: _Options, screen: Screen) -> None:
    await demo.converse(options.tokens)
    assert demo.reference is not None
    assert demo.proof is not None
    chunks, canonical = len(demo.proof.canonical), sum(demo.proof.canonical)
    screen.note(
        f"{len(demo.prompt)} tokens of conversation; {human_bytes(demo.prefix_bytes)} of KV stored "
        f"in {chunks} chunks,\n{canonical} of them computed on grid tiles, which recompute repeats "
        f"bit for bit.\n"
        f"With nothing forgotten the next turn's first token takes {demo.reference.ttft:.2f} s.\n"
        f"Now the KV is freed (same process; the engine holds "
        f"{human_bytes(demo.engine.kv_used_bytes)} of it) and the turn arrives again:\n"
    )


async def _one_link(demo: Demo, link: Link, options: _Options, screen: Screen) -> None:
    def tell(row: Row) -> None:
        options.rows.append(row)
        screen.show(results_table(options.rows, f"{options.tokens} tokens forgotten"))

    timeline = await demo.three_ways(link, tell)
    if link.name == _DRAWN or not options.drawn:
        options.drawn = await asyncio.to_thread(_draw, timeline, options.output, link, screen)


def _draw(timeline: Timeline, folder: Path, link: Link, screen: Screen) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    trace, picture = folder / "timeline.json", folder / "timeline.png"
    timeline.write_trace(trace)
    over = f"compute:I/O {link.name}" if link.ratio else "raw disk"
    try:
        timeline.write_png(picture, f"{over}: recompute from the front, load from the back")
    except ConfigError as error:  # the picture is an extra: say what it needs and go on
        screen.note(str(error))
        return [trace]
    return [trace, picture]


async def _resume(demo: Demo, link: Link, screen: Screen) -> tuple[str, bool]:
    """The answer, streamed after one more restore from both ends, and whether it is the same."""
    from cacheflow.cli.demo_talk import FINAL_QUESTION

    screen.freeze()
    screen.note(f"\nuser:      {FINAL_QUESTION}")
    screen.write("assistant: ")
    said: list[str] = []

    def tell(text: str) -> None:
        said.append(text)
        screen.write(text)

    identical = await demo.stream(link, tell)
    screen.note("\n")
    return "".join(said), identical


def _result(demo: Demo, options: _Options, answer: str, identical: bool) -> dict[str, Any]:
    assert demo.reference is not None
    assert demo.proof is not None
    return {
        "model": demo.engine.identity,
        "tokens": options.tokens,
        "prompt_tokens": len(demo.prompt),
        "prefix_bytes": demo.prefix_bytes,
        "threads": options.threads,
        "never_forgot_ttft": demo.reference.ttft,
        "rows": [row.as_json() for row in options.rows],
        "answer": answer,
        "identical": identical and all(row.sound for row in options.rows),
        "canonical_chunks": sum(demo.proof.canonical),
        "files": [str(path) for path in options.drawn],
    }


def _conclude(result: dict[str, Any], screen: Screen) -> None:
    """What was compared, in words, and where to look further."""
    compared = "every way and this answer, against the run that never forgot"
    if result["identical"]:
        screen.note(f"tokens identical: yes ({compared}; float32, greedy)")
    else:
        screen.note("tokens identical: NO - see the table; this must not happen, please report it")
    screen.note(
        "speed-up: over the better single way. fluid / measured: the bound from recompute alone "
        "and load\nalone in this run. KV cells exact: byte for byte those of the run that never "
        "forgot (loaded) or of\na cold recompute (recomputed)."
    )
    drifts = [row["drift"] for row in result["rows"] if row["drift"] is not None]
    if any(abs(drift - 1) > _DRIFT for drift in drifts):
        worst = max(drifts, key=lambda drift: abs(drift - 1))
        screen.note(
            f"The machine's speed changed meanwhile: the same tiles took {worst:.2f} times as long "
            "as when\nrecompute was measured. Do not read the speed-ups; run it again when the "
            "machine is quiet."
        )
    if result["files"]:
        files = " and ".join(result["files"])
        screen.note(f"timeline: {files} (open the JSON at ui.perfetto.dev)")
