"""The names at the top of the package: there, the same objects, and free until they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import cacheflow

STUB = Path(cacheflow.__file__).with_suffix(".pyi")


def test_stub_and_module_name_the_same() -> None:
    """Each name of the stub is found, and is what the stub says; there are no others."""
    named: dict[str | None, str | None] = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            named |= {alias.asname: node.module for alias in node.names}
    assert {*named, "__version__"} == set(cacheflow.__all__)
    for name, module in named.items():
        assert getattr(cacheflow, str(name)) is getattr(import_module(str(module)), str(name))
    assert set(cacheflow.__all__) <= set(dir(cacheflow))


def test_an_unknown_name_is_an_attribute_error() -> None:
    """As of any module."""
    with pytest.raises(AttributeError, match="no attribute 'Cacheflow'"):
        _ = cacheflow.Cacheflow  # type: ignore[attr-defined]


def test_importing_the_package_loads_nothing_heavy() -> None:
    """Neither torch nor asyncio, until a name is used that needs it."""
    code = (
        "import sys, cacheflow, cacheflow.types, cacheflow.scheduling\n"
        "print(sorted({'torch', 'asyncio', 'pydantic'} & set(sys.modules)))\n"
        "cacheflow.Settings\n"
        "print('pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "True"]
