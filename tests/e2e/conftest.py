"""A tiny random Llama as a folder, for tests that need a real model but not a trained one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def save_tiny_llama(folder: Path, seed: int = 7, **changes: int) -> Path:
    """Grouped queries, four layers, 320 tokens of vocabulary."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "max_position_embeddings": 2048,
    }
    LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model; not to be changed."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def other_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape and config, other weights."""
    return save_tiny_llama(tmp_path_factory.mktemp("other-llama"), seed=8)
