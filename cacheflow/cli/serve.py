"""``cacheflow serve``: a model behind an OpenAI-compatible API."""

from __future__ import annotations

import logging
from pathlib import Path  # noqa: TC003 - typer evaluates the annotations
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from cacheflow.cli.output import run
from cacheflow.cli.store.opening import parse_bytes
from cacheflow.registry import load_server

if TYPE_CHECKING:
    from cacheflow.settings import Settings

__all__ = ["serve"]


def serve(
    model: Annotated[
        Path | None, typer.Option(help="Folder of the model (default: SmolLM2-135M-Instruct).")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0: any.")] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    store: Annotated[
        Path | None,
        typer.Option(help="Folder for stored KV: one nvme tier, instead of CACHEFLOW_TIERS."),
    ] = None,
    engine: Annotated[str, typer.Option(help="Registered name of the engine.")] = "transformers",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    threads: Annotated[int, typer.Option(help="Compute threads on a CPU.", min=1)] = 1,
    kv_bytes: Annotated[
        int, typer.Option(parser=parse_bytes, metavar="BYTES", help="Memory for KV, as 4GiB.")
    ] = 4 << 30,
) -> None:
    """Serve a model to OpenAI clients; what their prompts share with earlier ones is restored.

    Everything else is set by environment variables: CACHEFLOW_SERVER_* for the server (keys,
    limits, timeouts), CACHEFLOW_* for tiers and memory. docs/server.md lists them. SIGTERM drains.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    server = cast("Any", load_server("openai"))
    given = {"host": host, "port": port, "model_name": name}
    run(
        server(
            model,
            engine=engine,
            engine_options={
                "dtype": dtype,
                "device": device,
                "threads": threads,
                "kv_bytes": kv_bytes,
            },
            settings=_settings(store),
            server={key: value for key, value in given.items() if value is not None},
        )
    )


def _settings(store: Path | None) -> Settings:
    from cacheflow.settings import Settings, TierSettings

    if store is None:
        return Settings()
    tier = TierSettings(name="disk", backend="nvme", options={"path": str(store.expanduser())})
    return Settings(tiers=(tier,))
