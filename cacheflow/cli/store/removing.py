"""``cacheflow store rm``, ``gc`` and ``invalidate``: what removes objects.

What is removed is recomputed when it is needed again: nothing but time is lost.
"""

from __future__ import annotations

import time
from pathlib import Path  # noqa: TC003 - typer looks at it
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheflow.cli.output import AsJson, figures, human_bytes, print_json, run
from cacheflow.cli.store.opening import (
    Folder,
    Yes,
    choose,
    confirm,
    opened,
    parse_bytes,
    parse_seconds,
    remove,
    scan,
    tier_of,
)
from cacheflow.errors import ConfigError
from cacheflow.kv import tenant_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.cli.store.opening import StoredFile
    from cacheflow.types import ChunkInfo, ObjectKey

__all__ = ["gc", "invalidate", "rm"]


def rm(
    folder: Folder,
    keys: Annotated[
        list[str] | None,
        typer.Argument(help="Names of objects, or keys of chunks (4 digits or more)."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all objects.")] = False,
    yes: Yes = False,
    json: AsJson = False,
) -> None:
    """Remove objects. What is removed is recomputed when it is needed again."""
    if everything == bool(keys):
        raise ConfigError("say what to remove: some keys, or --all (not both)")
    infos = run(scan(folder))
    _remove_infos(folder, choose(infos, keys) if keys else infos, yes=yes, json=json)


def invalidate(
    folder: Folder,
    model: Annotated[
        str | None,
        typer.Option(help="Model id as `store stat` lists it (4 digits or more).", metavar="ID"),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(help="Tenant id as `store stat` lists it (4 digits or more).", metavar="ID"),
    ] = None,
    salt: Annotated[
        Path | None,
        typer.Option(help="File with a tenant's salt: removes what was stored under it."),
    ] = None,
    yes: Yes = False,
    json: AsJson = False,
) -> None:
    """Remove all objects of a model, of a tenant, or of one tenant's with one model.

    The salt is read from a file: on a command line other users of the machine could see it.
    """
    if model is None and tenant is None and salt is None:
        raise ConfigError("say whose objects: --model ID, --tenant ID or --salt FILE")
    if tenant is not None and salt is not None:
        raise ConfigError("--tenant and --salt both name a tenant: give one of them")
    wanted = _salt_id(salt) if salt is not None else tenant
    infos = run(scan(folder))
    chosen = [
        info
        for info in infos
        if _is(info.model_id, model, "--model") and _is(info.tenant_id, wanted, "--tenant")
    ]
    _remove_infos(folder, chosen, yes=yes, json=json)


def gc(
    folder: Folder,
    to: Annotated[
        int | None,
        typer.Option(parser=parse_bytes, metavar="BYTES", help="Remove the oldest down to this."),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(parser=parse_seconds, metavar="AGE", help="Remove what is older: 12h, 7d."),
    ] = None,
    yes: Yes = False,
    json: AsJson = False,
) -> None:
    """Tidy up: what is too old, then the oldest until the store is within its cap or --to.

    Cap and age are those of the tier that CACHEFLOW_TIERS has for this folder, else the default cap
    and no age. What dead processes left unfinished is removed too, by opening the store.
    """
    tier = tier_of(folder)
    ttl = tier.ttl if tier is not None and older_than is None else older_than
    chosen, used, limit = run(_surplus(folder, to, ttl))
    nbytes = sum(file.nbytes for file in chosen)
    if chosen:
        confirm(f"remove {len(chosen)} objects ({human_bytes(nbytes)})?", yes=yes)
    keys = [file.key for file in chosen if file.key is not None]
    removed = run(_remove(folder, keys))
    left = run(_used(folder))
    if json:
        print_json(
            {"removed": removed, "bytes": used - left, "used_bytes": left, "limit_bytes": limit}
        )
    else:
        figures().print(
            f"{removed} objects removed ({human_bytes(nbytes)}); {human_bytes(left)} are used, "
            f"the limit is {human_bytes(limit)}",
            highlight=False,
        )


async def _surplus(
    folder: Path, to: int | None, older_than: float | None
) -> tuple[list[StoredFile], int, int]:
    async with opened(folder) as backend:
        room = await backend.room()
        files = [file for file in await backend.files() if file.key is not None]
    tier = tier_of(folder)
    capacity = tier.capacity_bytes if tier is not None else None
    cap = room.cap if capacity is None else min(room.cap, capacity)
    limit = cap if to is None else to
    oldest = time.time() - older_than if older_than is not None else float("-inf")
    chosen, left = [], room.used
    for file in sorted(files, key=lambda file: file.modified):
        if file.modified >= oldest and left <= limit:
            break
        chosen.append(file)
        left -= file.nbytes
    return chosen, room.used, limit


async def _used(folder: Path) -> int:
    async with opened(folder) as backend:
        return await backend.used_bytes()


async def _remove(folder: Path, keys: Sequence[ObjectKey]) -> int:
    async with opened(folder) as backend:
        return await remove(backend, keys)


def _remove_infos(folder: Path, infos: Sequence[ChunkInfo], *, yes: bool, json: bool) -> None:
    size = human_bytes(sum(info.nbytes for info in infos))
    if infos:
        confirm(f"remove {len(infos)} objects ({size})?", yes=yes)
    removed = run(_remove(folder, [info.key for info in infos])) if infos else 0
    document: dict[str, Any] = {"removed": removed}
    if json:
        print_json(document)
    else:
        figures().print(f"{removed} objects removed ({size})", highlight=False)


def _salt_id(file: Path) -> str:
    try:
        salt = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"--salt {file}: {error.strerror}") from error
    return tenant_id(salt.removesuffix(b"\n")).hex()


def _is(found: bytes, wanted: str | None, option: str) -> bool:
    if wanted is None:
        return True
    if len(wanted) < 4 or set(wanted.lower()) - set("0123456789abcdef"):
        raise ConfigError(f"{option} {wanted!r} is not an id: 4 hex digits or more, from `stat`")
    return found.hex().startswith(wanted.lower())
