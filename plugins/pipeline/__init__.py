"""Pipeline parallel over torch.distributed: every rank a stage of consecutive layers."""

from __future__ import annotations

from cacheflow.plugins.pipeline.engine import PipelineEngine

__all__ = ["PipelineEngine"]
