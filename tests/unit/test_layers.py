"""Who may import whom: the contracts of pyproject.toml hold, and would notice if they did not."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
MAPPED = {"plugins", "storage_backends"}
"""Folders that are installed inside `cacheflow`."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The packages as they are installed: import-linter does not follow the editable mapping."""
    for folder, target in (("cacheflow", ""), *((name, name) for name in sorted(MAPPED))):
        for source in (ROOT / folder).rglob("*.py"):
            link = tmp_path / "cacheflow" / target / source.relative_to(ROOT / folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source)
    return tmp_path


def lint(tree: Path) -> tuple[int, str]:
    program = Path(sys.executable).with_name("lint-imports")
    command = [str(program), str(ROOT / "pyproject.toml"), "--no-cache"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_contracts_hold(tree: Path) -> None:
    """No import anywhere goes against the layers."""
    code, output = lint(tree)
    assert code == 0, output


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("costs/broken.py", "import torch", "The decision core"),
        ("scheduling/broken.py", "import cacheflow.memory.pool", "The decision core"),
        ("kv/broken.py", "import cacheflow.session", "Each layer imports"),
        ("types/broken.py", "import cacheflow.abc", "Each layer imports"),
        ("restore/broken.py", "import cacheflow.storage_backends", "only through the registry"),
        ("plugins/broken.py", "import cacheflow.storage_backends", "do not know each other"),
        ("memory/broken.py", "import cacheflow.kv", "Pinned memory"),
        ("newcomer.py", "import cacheflow.types", "Each layer imports"),
    ],
)
def test_a_broken_layer_is_noticed(tree: Path, module: str, line: str, contract: str) -> None:
    """One import in the wrong direction, or a module that has no layer, breaks its contract."""
    (tree / "cacheflow" / module).write_text(line + "\n", encoding="utf-8")
    code, output = lint(tree)
    assert code == 1, output
    assert any(contract in row and "BROKEN" in row for row in output.splitlines()), output


def test_registry_contract_names_every_module() -> None:
    """The contract that guards the registry lists all of the core, so that none slips past it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {c["id"]: c for c in settings["tool"]["importlinter"]["contracts"]}
    there = {
        f"cacheflow.{path.stem}"
        for path in (ROOT / "cacheflow").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert set(contracts["registry"]["source_modules"]) == there - {"cacheflow.__init__"}


def test_decision_core_runs_without_torch_and_asyncio() -> None:
    """Importing scheduling and costs loads neither torch nor asyncio into the process."""
    code = (
        "import sys, cacheflow.scheduling, cacheflow.costs\n"
        "print([name for name in ('torch', 'asyncio', 'uvloop') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "."


@pytest.mark.parametrize("folder", sorted(MAPPED))
def test_backends_and_engines_use_the_public_surface_only(folder: str) -> None:
    """They import packages of the core, never a module inside one, as third parties do."""
    for path in (ROOT / folder).rglob("*.py"):
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "cacheflow" and parts[1:2] != [folder]:
                assert len(parts) <= 2, f"{path.relative_to(ROOT)} imports {name}"
