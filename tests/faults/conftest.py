"""A tiny random Llama, for faults that only a real model's bits can show.

Lets these tests import what lies beside them, and the benchmarks they run a tenth of.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cacheflow.testing.tiny_model import save_tiny_llama

ROOT = Path(__file__).parents[2]

for folder in (ROOT, ROOT / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grouped queries, three layers, 320 tokens of vocabulary; not to be changed."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 1024}
    return save_tiny_llama(tmp_path_factory.mktemp("llama"), 17, **sizes, **heads)
