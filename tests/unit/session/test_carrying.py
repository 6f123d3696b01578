"""A session as a folder: taken up elsewhere, under another salt, with parts missing or damaged."""

from __future__ import annotations

import asyncio
import json
import math
import os
import stat
import threading
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.errors import ConfigError, IntegrityError
from cacheflow.session import carrying
from cacheflow.testing.storage import MemoryBackend
from tests.unit.session.conftest import prompt_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.session.conftest import Opened

PROMPT = prompt_of(300)


async def export(opened: Opened, folder: Path, salt: str = "", auth_key: str = "") -> list[int]:
    """A session of one turn, exported; its history."""
    async with opened(salt=salt, auth_key=auth_key) as play:
        session = play.flow.session("s", tenant="alice")
        await play.ask(session, PROMPT)
        carried = await session.export(folder)
        assert (carried.chunks, carried.copied) == (18, 18)
        return list(session.tokens)


def spoil(folder: Path) -> None:
    """One bit of the last chunk."""
    archive = folder / "chunks.cacheflow"
    data = bytearray(archive.read_bytes())
    data[-100] ^= 1
    archive.write_bytes(data)


def rewrite(folder: Path, **changes: object) -> None:
    file = folder / "session.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("salt", ["one", "two"])
async def test_a_session_is_taken_up_elsewhere(opened: Opened, tmp_path: Path, salt: str) -> None:
    """Another flow, of another salt and tenant, has history and chunks under its own keys."""
    history = await export(opened, tmp_path / "out", salt="one")
    async with opened(salt=salt) as play:
        session = await play.flow.import_session(tmp_path / "out", "t", tenant="bob")
        assert (session.id, session.tenant, list(session.tokens)) == ("t", "bob", history)
        report = await play.ask(session, [*history, 5], policy="load")
        assert report.usage.loaded_tokens == 288
        stranger = await play.ask(play.flow.session("x"), PROMPT)
        assert stranger.cached_tokens == 0


async def test_only_its_owner_may_read_it(opened: Opened, tmp_path: Path) -> None:
    """Folder and files are private, and hold no salt."""
    folder = tmp_path / "deep" / "out"
    await export(opened, folder, salt="a secret salt")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in await asyncio.to_thread(lambda: list(folder.iterdir())):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert b"a secret salt" not in file.read_bytes()


async def test_a_damaged_chunk_is_left_out(opened: Opened, tmp_path: Path) -> None:
    """The others are taken; what is missing is recomputed."""
    history = await export(opened, tmp_path / "out")
    await asyncio.to_thread(spoil, tmp_path / "out")
    async with opened() as play:
        session = await play.flow.import_session(tmp_path / "out")
        assert len(play.store.objects) == 17
        await play.ask(session, [*history, 5])


async def test_with_a_secret_only_what_it_has_signed_is_taken(
    opened: Opened, tmp_path: Path
) -> None:
    """Under the same secret and another salt the tags are made anew, so that loads accept them."""
    secrets = ("0123456789abcdef", "fedcba9876543210")
    history = await export(opened, tmp_path / "out", "one", secrets[0])
    async with opened(salt="two", auth_key=secrets[0]) as play:
        session = await play.flow.import_session(tmp_path / "out")
        report = await play.ask(session, [*history, 5], policy="load")
        assert report.usage.loaded_tokens == 288
    async with opened(salt="two", auth_key=secrets[1]) as play:
        session = await play.flow.import_session(tmp_path / "out")
        assert play.store.objects == {}
        await play.ask(session, [*history, 5])


async def test_folders_that_cannot_be_taken(opened: Opened, tmp_path: Path) -> None:
    """Missing, of another model or version, damaged: each is said, and makes no session."""
    folder = tmp_path / "out"
    await export(opened, folder)
    async with opened() as play:
        with pytest.raises(ConfigError, match="nowhere"):
            await play.flow.import_session(tmp_path / "nowhere", "t")
        for changes, error, message in (
            ({"model": "00" * 16}, ConfigError, "another model"),
            ({"format": 99}, ConfigError, "format 99"),
            ({"tokens": "x"}, IntegrityError, "damaged"),
            ({"tokens": [math.inf]}, IntegrityError, "damaged"),
            ({"tokens": [-1]}, ConfigError, "position 0"),
        ):
            kept = json.loads((folder / "session.json").read_text())
            await asyncio.to_thread(rewrite, folder, **changes)
            with pytest.raises(error, match=message):
                await play.flow.import_session(folder, "t")
            await asyncio.to_thread(rewrite, folder, **kept)
        await play.flow.import_session(folder, "t")
        with pytest.raises(ConfigError, match="'t' already"):
            await play.flow.import_session(folder, "t")


@pytest.mark.parametrize("file", ["session.json", "chunks.cacheflow"])
async def test_only_files_are_read(opened: Opened, tmp_path: Path, file: str) -> None:
    """A pipe without a writer, a device without an end and a folder are refused, not waited for."""
    folder = tmp_path / "out"
    await export(opened, folder)
    await asyncio.to_thread((folder / file).unlink)
    async with opened() as play:
        for make in (
            os.mkfifo,
            lambda path: path.symlink_to("/dev/zero"),
            lambda path: path.mkdir(),
        ):
            await asyncio.to_thread(make, folder / file)
            async with asyncio.timeout(30):
                with pytest.raises(ConfigError, match=r"regular file|directory"):
                    await play.flow.import_session(folder, "t")
            is_folder = (folder / file).is_dir()
            await asyncio.to_thread((folder / file).rmdir if is_folder else (folder / file).unlink)


async def test_an_archive_that_claims_too_much(opened: Opened, tmp_path: Path) -> None:
    """A file with a hole of 2 TiB is no object: no memory is taken for it, the history comes. One
    that is cut short is said, and leaves the session's id free."""
    folder = tmp_path / "out"
    await export(opened, folder)
    archive = folder / "chunks.cacheflow"
    whole = await asyncio.to_thread(archive.read_bytes)

    def inflate() -> None:
        at = len(b"CFLWAR1\n")
        at += 2 + int.from_bytes(whole[at : at + 2], "little")
        archive.write_bytes(whole[:at] + (2 << 40).to_bytes(8, "little") + whole[at + 8 :])
        os.truncate(archive, at + 8 + (2 << 40))

    await asyncio.to_thread(inflate)
    async with opened() as play:
        with pytest.raises(IntegrityError, match="cut short after 1 ") as caught:
            await play.flow.import_session(folder, "t")
        await asyncio.to_thread(archive.write_bytes, whole)
        session = await play.flow.import_session(folder, "t")
        assert session.id == "t"
        assert caught.traceback  # and with it the frames that know the session that was not made


async def test_an_export_never_overwrites(opened: Opened, tmp_path: Path) -> None:
    """A folder that exists is refused and left alone."""
    (tmp_path / "thesis").mkdir()
    async with opened() as play:
        session = play.flow.session("s")
        await play.ask(session, PROMPT)
        with pytest.raises(ConfigError, match="thesis"):
            await session.export(tmp_path / "thesis")
        assert await asyncio.to_thread(lambda: list((tmp_path / "thesis").iterdir())) == []


async def test_each_chunk_comes_from_whichever_tier_has_it(opened: Opened, tmp_path: Path) -> None:
    """Tiers with holes complete each other, and one that fails is done without."""

    class Failing(MemoryBackend):
        async def lookup(self, keys: object) -> list:  # type: ignore[type-arg]
            raise OSError("gone")

    tiers = {"a": MemoryBackend(), "bad": Failing(), "b": MemoryBackend()}
    async with opened(backends=tiers) as play:
        session = play.flow.session("s")
        await play.ask(session, PROMPT)
        await play.flow.flush()
        keys = play.flow.keys(PROMPT)
        for name, half in (("a", keys[::2]), ("b", keys[1::2])):
            for key in [key for key in tiers[name].objects if key.chunk in half]:
                del tiers[name].objects[key]
        carried = await session.export(tmp_path / "out")
        assert carried.copied == 18


async def test_an_export_cancelled_while_its_folder_is_made_leaves_none(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it can be tried again under the same name."""
    began, go, ended = threading.Event(), threading.Event(), threading.Event()
    write = carrying._write

    def slow(*arguments: Any) -> None:
        began.set()
        assert go.wait(20)
        write(*arguments)
        ended.set()

    monkeypatch.setattr(carrying, "_write", slow)
    async with opened() as play:
        session = play.flow.session("s")
        await play.ask(session, prompt_of(50))
        export = asyncio.create_task(session.export(tmp_path / "out"))
        assert await asyncio.to_thread(began.wait, 20)
        export.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await export
        assert await asyncio.to_thread(ended.wait, 20)
        assert not (tmp_path / "out").exists()
        await session.export(tmp_path / "out")
