"""Names that reach storage, and the files that are made there."""

from __future__ import annotations

import os
import shutil
import stat
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.costs import COSTS_FILE, ChannelProfile, CostStore
from cacheflow.errors import ConfigError
from cacheflow.kv import format_name, parse_name
from cacheflow.registry import load_backend
from cacheflow.storage_backends.object_store.names import key_of, path_of
from cacheflow.testing.objects import make_object, object_key
from cacheflow.types import ChunkKey, ObjectKey, ObjectKind, Span, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GOOD, OTHER = (format_name(object_key(number)) for number in (0, 1))
HOSTILE = [
    "",
    ".",
    "..",
    "../" + GOOD,
    "/" + GOOD,
    "..\\" + GOOD,
    GOOD + "/..",
    GOOD + "\n",
    GOOD + "\0",
    GOOD + ".tmp",
    GOOD.upper(),
    GOOD.replace(".kv.", ".kv./../"),
    GOOD.replace(".kv.", ".exe."),
    GOOD.replace("l0-3", "l-1-3"),
    GOOD.replace("l0-3", "l00-3"),
    GOOD.replace("l0-3", "l\u0660-3"),
    GOOD.replace("l0-3", "l0-99999999999999999999"),
    GOOD[1:],
    "\uff41" + GOOD[1:],
    "%2e%2e%2f" + GOOD,
    "file:///etc/passwd",
    "x" * 5000,
]
"""Ways out of a folder, look-alikes, and what other systems would read as the same name."""


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_no_names(name: str) -> None:
    """A name is either one that we write, to the letter, or a ValueError."""
    with pytest.raises(ValueError, match="not an object name"):
        parse_name(name)


@given(
    digest=st.binary(min_size=32, max_size=32),
    edges=st.tuples(*[st.integers(0, 2**32 - 1)] * 4),
    kind=st.sampled_from(ObjectKind),
)
def test_names_stay_where_they_are_put(
    digest: bytes, edges: tuple[int, int, int, int], kind: ObjectKind
) -> None:
    """Whatever is stored: one plain component of a path, different for different keys."""
    layers, heads = (Span(*sorted(pair)) for pair in (edges[:2], edges[2:]))
    key = ObjectKey(ChunkKey(digest), layers, heads, kind)
    name = format_name(key)
    assert parse_name(name) == key
    assert name == os.path.basename(os.path.normpath(name))  # noqa: PTH119
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-")
    assert not name.startswith(".")
    assert len(name) < 200


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_paths_of_a_bucket_are_no_objects(name: str) -> None:
    """What lies in a bucket under another name than ours, or in another chunk's folder, is none."""
    assert key_of(path_of(object_key(0))) == object_key(0)
    for path in (name, f"{GOOD[:64]}/{name}", f"{name}/{GOOD}", f"{OTHER[:64]}/{GOOD}"):
        assert key_of(path) is None


@given(st.text(max_size=200))
def test_text_is_a_name_only_if_we_wrote_it(text: str) -> None:
    """Nothing else parses."""
    try:
        key = parse_name(text)
    except ValueError:
        return
    assert format_name(key) == text


@pytest.fixture
def _no_umask() -> Iterator[None]:
    """Nothing is taken away from the modes that we ask for."""
    old = os.umask(0)
    yield
    os.umask(old)


def modes(folder: Path) -> dict[str, int]:
    found = {str(path): path.lstat().st_mode for path in [folder, *folder.rglob("*")]}
    return {path: mode for path, mode in found.items() if not stat.S_ISLNK(mode)}


@pytest.mark.allow_blocking  # the test itself looks at files
@pytest.mark.usefixtures("_no_umask")
async def test_a_store_is_its_owners_only(tmp_path: Path) -> None:
    """With a umask of 0: every file of an nvme store, and an archive of its objects, 0600, every
    folder 0700."""
    root, archive = tmp_path / "deep" / "store", tmp_path / "archive"
    backend: Any = await load_backend("nvme").open({"path": str(root), "create": True})
    try:
        objects = [make_object(n) for n in range(3)]
        results = await backend.store([each.write() for each in objects])
        assert [result.status for result in results] == [TransferStatus.OK] * 3
        assert await backend.export_objects(archive, [each.info for each in objects]) == 3
        found = modes(root)
        assert len(found) > 6
        for path, mode in (found | modes(archive)).items():
            wanted = 0o700 if stat.S_ISDIR(mode) else 0o600
            assert stat.S_IMODE(mode) == wanted, path
    finally:
        await backend.aclose()


@pytest.mark.usefixtures("_no_umask")
def test_learned_costs_are_the_owners_only(tmp_path: Path) -> None:
    """They tell which models are run, and how much."""
    folder = tmp_path / "cache"
    CostStore(folder / COSTS_FILE).save({}, {"link": ChannelProfile(1e-3, 1e-9, 1e6)})
    found = modes(folder)
    assert len(found) == 2
    for path, mode in found.items():
        assert stat.S_IMODE(mode) == (0o700 if stat.S_ISDIR(mode) else 0o600), path


@pytest.mark.allow_blocking  # the test itself makes files
async def test_files_that_are_no_objects_are_left_alone(tmp_path: Path) -> None:
    """Hostile names and links among the objects of a store: neither listed, nor read through, nor
    removed with the others."""
    root, secret = tmp_path / "store", tmp_path / "secret"
    secret.write_bytes(make_object(1).data)
    backend = await load_backend("nvme").open({"path": str(root), "create": True})
    try:
        stored = make_object(0)
        await backend.store([stored.write()])
        [where] = [path for path in root.rglob("*") if path.name == format_name(stored.key)]
        link = where.parent.parent / OTHER[:2] / OTHER
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(secret)
        names = [name for name in HOSTILE if name and "/" not in name and "\0" not in name]
        for name in names:
            if name not in (".", "..") and len(name) < 200:
                (where.parent / name).write_bytes(b"x")
        assert [info.key async for info in backend.scan()] == [stored.key]
        [found] = await backend.lookup([make_object(1).key.chunk])
        assert found == []
        assert await backend.delete([stored.key]) == [True]
        assert secret.read_bytes() == make_object(1).data
    finally:
        await backend.aclose()


@pytest.mark.allow_blocking  # the test itself makes files
async def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    """Somebody else's: the store is not opened."""
    kind = load_backend("nvme")
    await (await kind.open({"path": str(tmp_path / "store"), "create": True})).aclose()
    objects = tmp_path / "store" / "objects"
    shutil.rmtree(objects)
    objects.write_text("")
    with pytest.raises(ConfigError, match="objects is no folder"):
        await kind.open({"path": str(tmp_path / "store")})


@pytest.mark.allow_blocking  # the test itself makes files
async def test_linked_folders_of_a_store_are_not_followed(tmp_path: Path) -> None:
    """A folder of objects that is a link is refused at open; one that becomes a link later is
    neither listed nor emptied."""
    root, outside, stored = tmp_path / "store", tmp_path / "outside", make_object(0)
    kind = load_backend("nvme")
    backend = await kind.open({"path": str(root), "create": True})
    try:
        await backend.store([stored.write()])
        [where] = [path for path in root.rglob("*") if path.name == format_name(stored.key)]
        where.parent.rename(outside)
        where.parent.symlink_to(outside)
        assert [info.key async for info in backend.scan()] == []
        assert await backend.lookup([stored.key.chunk]) == [[]]
        assert (outside / where.name).exists()
    finally:
        await backend.aclose()
    with pytest.raises(ConfigError, match="is a link"):
        await kind.open({"path": str(root)})
