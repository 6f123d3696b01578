"""``cacheflow store verify``: read everything, compare all checksums, and repair if asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from cacheflow.cli.output import AsJson, figures, human_bytes, print_json, progress, run
from cacheflow.cli.store.opening import Folder, Yes, collect, confirm, opened, remove
from cacheflow.cli.store.verifying import Finding, verify_object
from cacheflow.errors import ConfigError
from cacheflow.kv import ChunkAuth
from cacheflow.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from cacheflow.types import ObjectKey

__all__ = ["verify"]


@dataclass(frozen=True, slots=True)
class _Checked:
    findings: list[Finding]
    bad: list[ObjectKey]
    """Objects that are listed, but whose bytes are wrong."""
    invalid: list[ObjectKey]
    """Files with an object's name that are none: never served."""
    foreign: list[Path]
    """Files that are nothing of ours: left alone."""
    stray: int
    """Bytes of the two."""


def verify(
    folder: Folder,
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove bad objects and files that are none any more.")
    ] = False,
    auth: Annotated[
        bool, typer.Option("--auth", help="Check tags too, with the secret CACHEFLOW_AUTH_KEY.")
    ] = False,
    yes: Yes = False,
    json: AsJson = False,
) -> None:
    """Read every object whole and compare all checksums. Exits with 1 when one is bad.

    With --auth an object that was not written by who has the secret is bad as well.

    Files that are no objects any more (truncated, say) are never served, only reported. With
    --repair both are removed: they are recomputed when they are needed again. Files that never were
    objects are reported and left alone.
    """
    found = run(_verify(folder, _checker() if auth else None))
    damaged = [*found.bad, *found.invalid]
    removed = 0
    if repair and damaged:
        confirm(f"remove {len(damaged)} damaged objects?", yes=yes)
        removed = run(_remove(folder, damaged))
    if json:
        bad = [finding for finding in found.findings if finding.error]
        print_json(
            {
                "objects": len(found.findings),
                "bytes": sum(finding.nbytes for finding in found.findings),
                "bad": [{"name": finding.name, "error": finding.error} for finding in bad],
                "invalid": len(found.invalid),
                "foreign": [str(path) for path in found.foreign],
                "stray_bytes": found.stray,
                "removed": removed,
            }
        )
    else:
        _show(found, removed)
    if len(damaged) > removed or found.foreign:
        raise typer.Exit(1)


def _show(found: _Checked, removed: int) -> None:
    out = figures()
    for finding in found.findings:
        if finding.error:
            out.print(f"{finding.name}: {finding.error}", markup=False, soft_wrap=True)
    for path in found.foreign:
        out.print(f"not ours, left alone: {path}", markup=False, soft_wrap=True)
    out.print(f"{len(found.findings)} objects read, {len(found.bad)} bad", highlight=False)
    if found.stray:
        out.print(f"{human_bytes(found.stray)} in files that are no valid objects (see above)")
    if removed:
        out.print(f"{removed} damaged objects removed", highlight=False)


def _checker() -> ChunkAuth:
    secret = Settings().auth_bytes
    if not secret:
        raise ConfigError("--auth: set CACHEFLOW_AUTH_KEY to the secret of the store's writers")
    return ChunkAuth(secret)


async def _verify(folder: Path, auth: ChunkAuth | None) -> _Checked:
    async with opened(folder) as backend:
        infos = await collect(backend)
        valid = {info.key for info in infos}
        stray = [file for file in await backend.files() if file.key not in valid]
        findings, bad = [], []
        with progress(in_bytes=True) as bar:
            task = bar.add_task("verifying", total=sum(info.nbytes for info in infos))
            for info in infos:
                findings.append(await verify_object(backend, info, auth))
                if findings[-1].error:
                    bad.append(info.key)
                bar.advance(task, info.nbytes)
    invalid = [file.key for file in stray if file.key is not None]
    foreign = [file.path for file in stray if file.key is None]
    return _Checked(findings, bad, invalid, foreign, sum(file.nbytes for file in stray))


async def _remove(folder: Path, keys: list[ObjectKey]) -> int:
    async with opened(folder) as backend:
        return await remove(backend, keys)
