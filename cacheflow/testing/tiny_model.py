"""A tiny random Llama as a folder: a real model whose weights do not matter.

Needs torch and transformers when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["save_tiny_llama"]


def save_tiny_llama(folder: Path, seed: int = 7, **changes: int) -> Path:
    """Grouped queries, four layers, 320 tokens of vocabulary; ``changes`` to the config."""
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
