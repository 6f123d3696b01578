"""``cacheflow store ls`` and ``stat``: what is in a store."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.table import Table

from cacheflow.cli.output import AsJson, figures, human_bytes, print_json, run
from cacheflow.cli.store.opening import Folder, collect, opened, scan
from cacheflow.kv import format_name, tenant_id

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cacheflow.cli.store.opening import Room
    from cacheflow.types import ChunkInfo

__all__ = ["ls", "stat"]


def ls(folder: Folder, json: AsJson = False) -> None:
    """List the stored objects. Ranges are without their end: layers 0:30 are thirty.

    Canonical: computed in whole tiles from the first token on, so that recompute gives its bits.
    """
    rows = sorted((_row(info) for info in run(scan(folder))), key=lambda row: str(row["name"]))
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
            "{}:{}".format(*row["layers"]),
            "{}:{}".format(*row["heads"]),
            str(row["tokens"]),
            row["dtype"],
            "yes" if row["canonical"] else "no",
            human_bytes(row["nbytes"]),
        )
    figures().print(table)


def stat(folder: Folder, json: AsJson = False) -> None:
    """Show totals: chunks, bytes and limits, and which models, tenants and grids they come from.

    The limits are those that CACHEFLOW_TIERS has for this folder, else the defaults.
    """
    infos, room = run(_stat(folder))
    totals = _totals(infos, room)
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


async def _stat(folder: Path) -> tuple[list[ChunkInfo], Room]:
    async with opened(folder) as backend:
        return await collect(backend), await backend.room()


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
        "codec": str(info.codec),
        "lossy": info.lossy,
        "authenticated": bool(info.mac),
        "model": info.model_id.hex(),
        "tenant": info.tenant_id.hex(),
        "nbytes": info.nbytes,
    }


def _totals(infos: Sequence[ChunkInfo], room: Room) -> dict[str, Any]:
    shapes = Counter(
        f"{info.layout.num_layers} layers, {info.layout.num_kv_heads} heads of "
        f"{info.layout.head_dim}, {info.layout.dtype}, {info.layout.chunk_tokens} tokens"
        for info in infos
    )
    nobody = tenant_id()
    tenants = Counter(
        info.tenant_id.hex() + (" (no salt)" if info.tenant_id == nobody else "") for info in infos
    )
    return {
        "objects": len(infos),
        "chunks": len({info.key.chunk for info in infos}),
        "canonical_objects": sum(info.canonical for info in infos),
        "object_bytes": sum(info.nbytes for info in infos),
        "used_bytes": room.used,
        "cap_bytes": room.cap,
        "free_bytes": room.free,
        "floor_bytes": room.floor,
        "shapes": dict(shapes),
        "models": dict(Counter(info.model_id.hex() for info in infos)),
        "tenants": dict(tenants),
        "grids": dict(Counter(info.grid_id for info in infos)),
    }
