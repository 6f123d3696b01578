"""Stored bytes are data: nothing that reads them can be made to run them."""

from __future__ import annotations

import ast
import random
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cacheflow.errors import IntegrityError
from cacheflow.kv import decode_header, decode_layers, parse_name, seal, verify
from cacheflow.types import ChunkKey, Codec, KVLayout, ObjectKey, Span

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
TOPS = ("cacheflow", "storage_backends", "plugins")
SOURCES = sorted(path for top in TOPS for path in (ROOT / top).rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__"}
LOADERS = {"torch.load", "numpy.load", "np.load", "yaml.load", "yaml.unsafe_load", "ast.parse"}
"""Of libraries that would unpickle, or build objects of any class."""
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32", chunk_tokens=64)


def findings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                found = {name.name.partition(".")[0] for name in names} & MODULES
            case ast.ImportFrom(module=str(module)):
                found = {module.partition(".")[0]} & MODULES
            case ast.Call(func=ast.Name(id=name)):
                found = {name} & CALLS
            case ast.Call(func=ast.Attribute() as called):
                found = {ast.unparse(called)} & LOADERS
            case _:
                continue
        yield from (f"{path}:{node.lineno} {name}" for name in found)


def test_the_tree_has_nothing_that_runs_data() -> None:
    """No pickle or anything like it, no eval, exec or compile, no loader of a library that would
    unpickle, in any module that is installed."""
    assert len(SOURCES) > 100
    assert [finding for path in SOURCES for finding in findings(path)] == []


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    """The test above would notice each of them."""
    path = tmp_path / "bad.py"
    for line in ("import pickle", "from marshal import loads", "eval('1')", "torch.load('x')"):
        path.write_text(line)
        assert len(list(findings(path))) == 1, line


DANGEROUS = ("exec", "compile", "import", "open", "pickle.", "marshal.", "os.", "subprocess.")
"""Audit events (or families of them) that reading a chunk in memory has no business with."""
_seen: list[str] | None = None


def _hook(event: str, _: tuple[object, ...]) -> None:
    if _seen is not None and event.startswith(DANGEROUS):
        _seen.append(event)


@contextmanager
def audited() -> Iterator[list[str]]:
    """What Python reports while this is entered (hooks cannot be taken out again)."""
    global _seen
    if not getattr(sys, "_cacheflow_hooked", False):
        sys.addaudithook(_hook)
        sys._cacheflow_hooked = True  # type: ignore[attr-defined]
    _seen = []
    try:
        yield _seen
    finally:
        _seen = None


def chunk(codec: Codec) -> bytes:
    payload = bytearray(LAYOUT.payload_bytes())
    payload[3::4] = random.Random(1).choices((0x3E, 0x3F, 0x40), k=len(payload) // 4)
    key = ObjectKey(ChunkKey(bytes(32)), Span(0, 2), Span(0, 2))
    info, header = seal(
        key,
        LAYOUT,
        memoryview(payload),
        grid_id="g",
        segments=(),
        canonical=True,
        codec=codec,
    )
    assert info.codec is codec
    return header + bytes(payload[: info.nbytes - len(header)])


def read(data: bytes) -> None:
    info = decode_header(data)
    offset, size = info.layer_range(Span(0, 2))
    view = memoryview(bytearray(data[offset : offset + size]))
    verify(info, Span(0, 2), view)
    decode_layers(info, Span(0, 2), view, memoryview(bytearray(LAYOUT.payload_bytes())))


def test_the_audit_sees_what_it_looks_for() -> None:
    """Compiling and opening are noticed."""
    with audited() as events:
        compile("1", "x", "eval")
        with suppress(OSError):
            open("/nowhere/at/all")  # noqa: SIM115
    assert {"compile", "open"} <= set(events)


@pytest.mark.parametrize("codec", list(Codec))
def test_reading_a_chunk_runs_nothing(codec: Codec) -> None:
    """Valid chunks, and 300 damaged ones: no code is compiled, run or imported, no file opened, no
    process begun, by Python's own audit."""
    data = chunk(codec)
    read(data)  # whatever is imported on first use is imported now
    chance = random.Random(2)
    with audited() as events:
        read(data)
        for _ in range(300):
            bad = bytearray(data)
            for _ in range(chance.randint(1, 4)):
                bad[chance.randrange(len(bad))] = chance.randrange(256)
            with suppress(IntegrityError):
                read(bytes(bad))
        for name in ("__import__('os')", "../../x", bytes(32).hex() + ".kv.l0-2.h0-2"):
            with suppress(ValueError):
                parse_name(name)
    assert events == []
