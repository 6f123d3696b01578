"""``cacheflow store export`` and ``import``: objects in one archive file, for another machine."""

from __future__ import annotations

import asyncio
import json as json_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from cacheflow.cli.output import AsJson, figures, human_bytes, print_json, progress, run
from cacheflow.cli.store.opening import Folder, choose, collect, opened
from cacheflow.errors import ConfigError
from cacheflow.kv import chunk_keys, key_root
from cacheflow.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.cli.store.opening import DiskStore, Imported
    from cacheflow.types import ChunkInfo, ChunkKey

__all__ = ["export", "import_"]

Archive = Annotated[Path, typer.Argument(help="The archive file.", show_default=False)]


def export(
    folder: Folder,
    archive: Archive,
    keys: Annotated[
        list[str] | None,
        typer.Argument(help="Names of objects, or keys of chunks (4 digits or more)."),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option("--keys", help="File with such names, one a line.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--tokens", help="File with a session's token ids: a JSON list, or words."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Folder of the model that --tokens are of.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="What the model was run in, with --tokens.")] = "auto",
    everything: Annotated[bool, typer.Option("--all", help="All objects.")] = False,
    json: AsJson = False,
) -> None:
    """Copy objects into a new archive file, each verified; another store imports it.

    Choose them by key, or by the tokens of a session: those need the model (--model) and the
    tenant's salt (CACHEFLOW_SALT), which decide the keys.
    """
    named = [*(keys or []), *(_words(key_file) if key_file is not None else [])]
    if (bool(named), token_file is not None, everything).count(True) != 1:
        raise ConfigError("say what to export: keys, --keys FILE, --tokens FILE or --all (one)")
    chunks = None
    if token_file is not None:
        if model is None:
            raise ConfigError("--tokens needs --model: the model is part of every key")
        chunks = run(_keys_of(_tokens(token_file), model, dtype))
    count, nbytes = run(_export(folder, archive, named, chunks))
    if json:
        print_json({"exported": count, "bytes": nbytes, "archive": str(archive)})
    else:
        figures().print(
            f"{count} objects exported ({human_bytes(nbytes)}) to {archive}", highlight=False
        )


def import_(folder: Folder, archive: Archive, json: AsJson = False) -> None:
    """Store the objects of an archive, each verified whole first. Exits with 1 if one is refused.

    What the store has already is kept, unless the archive has a canonical copy of it and the store
    has not.
    """
    done = run(_import(folder, archive))
    if json:
        refused = [{"name": name, "error": error} for name, error in done.refused]
        print_json({"stored": done.stored, "kept": done.kept, "refused": refused})
    else:
        for name, error in done.refused:
            figures().print(f"refused {name}: {error}", markup=False, soft_wrap=True)
        figures().print(
            f"{done.stored} objects stored, {done.kept} were there, {len(done.refused)} refused",
            highlight=False,
        )
    if done.refused:
        raise typer.Exit(1)


async def _export(
    folder: Path, archive: Path, named: Sequence[str], chunks: Sequence[ChunkKey] | None
) -> tuple[int, int]:
    async with opened(folder) as backend:
        infos = await _chosen(backend, named, chunks)
        nbytes = sum(info.nbytes for info in infos)
        with progress(in_bytes=True) as bar:
            task = bar.add_task("exporting", total=nbytes)
            count = await backend.export_objects(
                archive, infos, lambda copied: bar.advance(task, copied)
            )
    return count, nbytes


async def _chosen(
    backend: DiskStore, named: Sequence[str], chunks: Sequence[ChunkKey] | None
) -> list[ChunkInfo]:
    if chunks is not None:
        infos = [info for found in await backend.lookup(chunks) for info in found]
        if not infos:
            raise ConfigError(
                f"none of the {len(chunks)} chunks of these tokens is stored: are model, dtype and "
                f"CACHEFLOW_SALT those of the session?"
            )
        return infos
    infos = await collect(backend)
    return choose(infos, named) if named else infos


async def _import(folder: Path, archive: Path) -> Imported:
    async with opened(folder) as backend:
        size = await asyncio.to_thread(_size, archive)
        with progress(in_bytes=True) as bar:
            task = bar.add_task("importing", total=size)
            return await backend.import_objects(archive, lambda copied: bar.advance(task, copied))


def _size(archive: Path) -> int:
    try:
        return archive.stat().st_size
    except OSError:  # the import says what is wrong
        return 0


async def _keys_of(tokens: list[int], model: Path, dtype: str) -> tuple[ChunkKey, ...]:
    from cacheflow.registry import load_engine

    factory = cast("Any", await asyncio.to_thread(load_engine, "transformers"))
    engine = await factory.open_model(model, dtype=dtype)
    try:
        root = key_root(engine.identity, Settings().salt_bytes)
        return chunk_keys(root, tokens, engine.layout.chunk_tokens)
    finally:
        await engine.aclose()


def _tokens(file: Path) -> list[int]:
    text = " ".join(_words(file))
    try:
        found = json_.loads(text) if text.startswith("[") else [int(word) for word in text.split()]
    except ValueError as error:
        raise ConfigError(f"--tokens {file}: not token ids ({error})") from None
    if not isinstance(found, list):
        raise ConfigError(f"--tokens {file}: not a list of token ids")
    return found


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
