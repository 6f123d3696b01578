"""Fixtures of the command's tests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.unit.cli.stores import fill

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Of four chunks."""
    folder = tmp_path / "store"
    asyncio.run(fill(folder))
    return folder
