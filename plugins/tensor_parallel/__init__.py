"""A transformers model over several ranks, each with some heads: restored together."""

from __future__ import annotations

from cacheflow.plugins.tensor_parallel.engine import TensorParallelEngine

__all__ = ["TensorParallelEngine"]
