"""The vLLM that is installed is the one the plugin was written for."""

from __future__ import annotations

import pytest

from cacheflow.errors import ConfigError
from cacheflow.plugins.vllm import compat


def test_touched_internals_are_as_expected() -> None:
    """Every method that is overridden or called has the parameters it had."""
    assert compat.differences() == []
    compat.check()


def test_a_changed_signature_is_noticed() -> None:
    """A parameter more or less, or a missing method, is named."""
    name = "vllm.v1.core.block_pool:BlockPool.touch"
    found = compat.differences({name: ("self",), f"{name}_it": ("self",)})
    assert found == [f"{name} takes self, blocks", f"{name}_it is missing"]


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the version found and those supported."""
    monkeypatch.setattr("vllm.__version__", "0.31.2")
    with pytest.raises(ConfigError, match=r"vLLM 0\.31\.2 is installed; .* 0\.32 up to"):
        compat.check()
