"""A tiny random Llama as a folder, for tests that need a real model but not a trained one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cacheflow.testing.tiny_model import save_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model; not to be changed."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def other_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape and config, other weights."""
    return save_tiny_llama(tmp_path_factory.mktemp("other-llama"), seed=8)


@pytest.fixture(scope="session")
def stages_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for pipelines, and the KV and tokens of its cold run in a single process."""
    from tests.e2e.stages import prepare

    return prepare(tmp_path_factory.mktemp("pipeline"))
