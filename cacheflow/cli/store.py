"""``cacheflow store``: look into an nvme folder, check it, and remove from it.

Works through the storage contract only; it knows no file of the folder's layout. Opening never
creates or repairs anything.
"""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from cacheflow.cli.output import AsJson, figures, human_bytes, print_json, progress, run
from cacheflow.cli.verifying import Finding, verify_object
from cacheflow.errors import ConfigError
from cacheflow.kv import format_name
from cacheflow.registry import load_backend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.types import ChunkInfo

__all__ = ["app"]

app = typer.Typer(help="Look into a store on disk, check it, and remove from it.")

Folder = Annotated[Path, typer.Argument(help="Folder of the store.", show_default=False)]

_MIN_PREFIX = 4
"""Hex digits of a key that `rm` wants at least: fewer are a typing error, not a wish."""


@app.command("ls")
def ls(folder: Folder, json: AsJson = False) -> None:
    """List the stored objects."""
    rows = sorted((_row(info) for info in run(_scan(folder))), key=lambda row: str(row["name"]))
    if json:
        print_json({"objects": rows})
        return
    table = Table()
    table.add_column("key", no_wrap=True, min_width=12)
    for column in ("kind", "layers", "heads", "tokens", "dtype", "canonical", "size"):
        table.add_column(column, justify="right" if column in ("tokens", "size") else "left")
    for row in rows:
        table.add_row(
            row["chunk"][:12],
            row["kind"],
            "{}-{}".format(*row["layers"]),
            "{}-{}".format(*row["heads"]),
            str(row["tokens"]),
            row["dtype"],
            "yes" if row["canonical"] else "no",
            human_bytes(row["nbytes"]),
        )
    figures().print(table)


@app.command("stat")
def stat(folder: Folder, json: AsJson = False) -> None:
    """Show totals: chunks, bytes, and which models and grids they come from."""
    infos, used = run(_stat(folder))
    totals = _totals(infos, used)
    if json:
        print_json(totals)
        return
    table = Table(show_header=False)
    for name, value in totals.items():
        if isinstance(value, dict):
            text = "\n".join(f"{count} x {what}" for what, count in value.items()) or "-"
        else:
            text = human_bytes(value) if name.endswith("bytes") else str(value)
        table.add_row(name.replace("_", " "), text)
    figures().print(table)


@app.command("verify")
def verify(folder: Folder, json: AsJson = False) -> None:
    """Read every object whole and compare all checksums. Exits with 1 when one is bad.

    Files that are no objects any more (truncated, say) are never served; the log names them.
    """
    findings, stray = run(_verify(folder))
    bad = [finding for finding in findings if finding.error]
    if json:
        listed = [{"name": finding.name, "error": finding.error} for finding in bad]
        total = sum(finding.nbytes for finding in findings)
        print_json({"objects": len(findings), "bytes": total, "bad": listed, "stray_bytes": stray})
    else:
        for finding in bad:
            figures().print(f"{finding.name}: {finding.error}", markup=False, soft_wrap=True)
        figures().print(f"{len(findings)} objects read, {len(bad)} bad", highlight=False)
        if stray:
            figures().print(f"{human_bytes(stray)} in files that are no valid objects (see above)")
    if bad or stray:
        raise typer.Exit(1)


@app.command("rm")
def rm(
    folder: Folder,
    keys: Annotated[
        list[str] | None,
        typer.Argument(help="Names of objects, or keys of chunks (4 digits or more)."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all objects.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: AsJson = False,
) -> None:
    """Remove objects. What is removed is recomputed when it is needed again."""
    if everything == bool(keys):
        raise ConfigError("say what to remove: some keys, or --all (not both)")
    chosen = _choose(run(_scan(folder)), keys or [])
    size = human_bytes(sum(info.nbytes for info in chosen))
    if (
        chosen
        and not yes
        and not typer.confirm(f"remove {len(chosen)} objects ({size})?", err=True)
    ):
        raise typer.Exit(1)
    removed = run(_remove(folder, chosen))
    if json:
        print_json({"removed": removed})
    else:
        figures().print(f"{removed} objects removed ({size})", highlight=False)


@asynccontextmanager
async def _opened(folder: Path) -> AsyncIterator[StorageBackend]:
    backend = await load_backend("nvme").open({"path": str(folder), "create": False})
    try:
        yield backend
    finally:
        await backend.aclose()


async def _scan(folder: Path) -> list[ChunkInfo]:
    async with _opened(folder) as backend:
        return await _collect(backend)


async def _collect(backend: StorageBackend) -> list[ChunkInfo]:
    infos = []
    with progress() as bar:
        task = bar.add_task("reading headers", total=None)
        async for info in backend.scan():
            infos.append(info)
            bar.advance(task)
    return infos


async def _stat(folder: Path) -> tuple[list[ChunkInfo], int]:
    async with _opened(folder) as backend:
        return await _collect(backend), await backend.used_bytes()


async def _verify(folder: Path) -> tuple[list[Finding], int]:
    """Findings, and the bytes that the store uses for files that are no valid objects."""
    async with _opened(folder) as backend:
        infos = await _collect(backend)
        stray = await backend.used_bytes() - sum(info.nbytes for info in infos)
        with progress(in_bytes=True) as bar:
            task = bar.add_task("verifying", total=sum(info.nbytes for info in infos))
            findings = []
            for info in infos:
                findings.append(await verify_object(backend, info))
                bar.advance(task, info.nbytes)
    return findings, stray


async def _remove(folder: Path, infos: Sequence[ChunkInfo]) -> int:
    if not infos:
        return 0
    async with _opened(folder) as backend:
        return sum(await backend.delete([info.key for info in infos]))


def _choose(infos: Sequence[ChunkInfo], keys: Sequence[str]) -> list[ChunkInfo]:
    """The objects that ``keys`` name; all of them when there are none."""
    if not keys:
        return list(infos)
    chosen: dict[str, ChunkInfo] = {}
    for key in keys:
        found = {format_name(info.key): info for info in infos if _is_named(info, key.lower())}
        if not found:
            raise ConfigError(f"no stored object is named {key!r}: `cacheflow store ls` lists them")
        chosen |= found
    return list(chosen.values())


def _is_named(info: ChunkInfo, key: str) -> bool:
    if key == format_name(info.key):
        return True
    return len(key) >= _MIN_PREFIX and info.key.chunk.digest.hex().startswith(key)


def _row(info: ChunkInfo) -> dict[str, Any]:
    return {
        "name": format_name(info.key),
        "chunk": info.key.chunk.digest.hex(),
        "kind": str(info.key.kind),
        "layers": [info.key.layers.start, info.key.layers.stop],
        "heads": [info.key.heads.start, info.key.heads.stop],
        "tokens": info.layout.chunk_tokens,
        "dtype": info.layout.dtype,
        "canonical": info.canonical,
        "grid_id": info.grid_id,
        "layout_id": info.layout_id,
        "checksum": str(info.checksum_kind),
        "nbytes": info.nbytes,
    }


def _totals(infos: Sequence[ChunkInfo], used: int) -> dict[str, Any]:
    shapes = Counter(
        f"{info.layout.num_layers} layers, {info.layout.num_kv_heads} heads of "
        f"{info.layout.head_dim}, {info.layout.dtype}, {info.layout.chunk_tokens} tokens"
        for info in infos
    )
    return {
        "objects": len(infos),
        "chunks": len({info.key.chunk for info in infos}),
        "canonical_objects": sum(info.canonical for info in infos),
        "object_bytes": sum(info.nbytes for info in infos),
        "used_bytes": used,
        "shapes": dict(shapes),
        "grids": dict(Counter(info.grid_id for info in infos)),
    }
