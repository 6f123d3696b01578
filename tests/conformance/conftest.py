"""Assertions of the shipped suite explain themselves like those of our own tests.

Lets tests import what lies beside them, too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[2])

if ROOT not in sys.path:
    sys.path.append(ROOT)

for _name in ("data", "faults", "harness", "model"):
    pytest.register_assert_rewrite(f"cacheflow.testing.storage_{_name}")
