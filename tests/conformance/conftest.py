"""Assertions of the shipped suite explain themselves like those of our own tests."""

from __future__ import annotations

import pytest

for _name in ("data", "faults", "harness", "model"):
    pytest.register_assert_rewrite(f"cacheflow.testing.storage_{_name}")
