"""``cacheflow store serve``: a memory pool for a fleet (docs/pool.md)."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path  # noqa: TC003 - typer evaluates the annotations
from typing import Annotated, Any

import typer

__all__ = ["serve"]


def serve(
    arena: Annotated[str | None, typer.Option(help="Memory for objects: 4GiB.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen at.")] = None,
    port: Annotated[int | None, typer.Option(help="Of the side channel.")] = None,
    data_port: Annotated[int | None, typer.Option(help="Of the tcp transport.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Of /metrics.")] = None,
    transports: Annotated[str | None, typer.Option(help="Those offered: nixl,tcp.")] = None,
    spill: Annotated[Path | None, typer.Option(help="Folder of the disk tier.")] = None,
    spill_bytes: Annotated[str | None, typer.Option(help="Cap of that folder.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token clients must say.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="Clients must have a certificate of it.")
    ] = None,
    eviction: Annotated[str | None, typer.Option(help="lru, s3fifo or cost-aware.")] = None,
    ttl: Annotated[float | None, typer.Option(help="Seconds an object lives.")] = None,
    tenant_quota: Annotated[str | None, typer.Option(help="Most bytes a tenant.")] = None,
    lease_seconds: Annotated[float | None, typer.Option(help="Length of a lease.")] = None,
    drain_seconds: Annotated[
        float | None, typer.Option(help="For clients and disk to finish after SIGTERM.")
    ] = None,
    etcd: Annotated[str | None, typer.Option(help="Announce the store: http://host:2379.")] = None,
    advertise: Annotated[
        str | None, typer.Option(help="host:port that clients reach it at.")
    ] = None,
) -> None:
    """Serve memory to a fleet, until SIGTERM or Ctrl-C.

    Every option can also be set in the environment: CACHEFLOW_STORE_ARENA=4GiB.
    """
    given: dict[str, Any] = {name: value for name, value in locals().items() if value is not None}
    if (path := given.pop("token_file", None)) is not None:
        given["token"] = _read_token(path)
    if transports is not None:
        given["transports"] = tuple(name.strip() for name in transports.split(","))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    import uvloop

    uvloop.run(_serve(given))


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise typer.BadParameter(f"{path}: {reason}") from None
    if not token:  # a store without one takes everybody: nobody means that who names a file
        raise typer.BadParameter(f"{path}: there is no token in it")
    return token


async def _serve(given: dict[str, Any]) -> None:
    from cacheflow.pool import StoreSettings, running

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(StoreSettings(**given)) as server:
        typer.echo(f"ready on {server.settings.host}:{server.port}")
        await stop.wait()
        await server.drain()
