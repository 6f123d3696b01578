"""Tiny random models of the families the engine serves, and engines over them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

GRID = TileGrid((32, 32, 64), 64)
CHUNK = 16

_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 2, "head_dim": 16}),
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-yarn": (
        "LlamaConfig",
        {
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 32}),
    "mistral": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": None}),
    "phi3": ("Phi3Config", {"num_key_value_heads": 2, "sliding_window": None}),
}
FAMILIES = tuple(_FAMILIES)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``model_folder(family)``: a saved random model of that family, made once a session."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            name, extra = _FAMILIES[family]
            torch.manual_seed(len(made))
            config = getattr(transformers, name)(**_COMMON, **extra)
            model = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(2.0)  # sharper attention: wrong keys must show in the tokens
            made[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family])
        return made[family]

    return folder


@pytest.fixture
def engine_for(
    model_folder: Callable[[str], Path],
) -> Callable[..., AbstractAsyncContextManager[TransformersEngine]]:
    """``async with engine_for(family, dtype=...) as engine``: closed again at the end."""

    @asynccontextmanager
    async def opened(family: str = "llama", **options: Any) -> AsyncIterator[TransformersEngine]:
        settings: dict[str, Any] = {
            "dtype": "float32",
            "grid": GRID,
            "chunk_tokens": CHUNK,
            "kv_bytes": 64 << 20,
        }
        engine = await TransformersEngine.open_model(
            model_folder(family), device="cpu", **(settings | options)
        )
        try:
            yield engine
        finally:
            await engine.aclose()

    return opened
