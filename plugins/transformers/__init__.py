"""Hugging Face transformers as a CacheFlow engine, in process."""

from __future__ import annotations

from cacheflow.plugins.transformers.engine import TransformersEngine
from cacheflow.plugins.transformers.smollm2 import prepare_smollm2

__all__ = ["TransformersEngine", "prepare_smollm2"]
