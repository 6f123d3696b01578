"""The public facade: an engine, its tiers and a restorer, and sessions that generate with them.

::

    async with CacheFlow.open(settings, engine=engine) as flow:
        session = flow.session("agent-7")
        async for token in session.generate(prompt):
            ...
"""

from __future__ import annotations

from cacheflow.session.flow import TOKENS_IN_ONE_GO, CacheFlow
from cacheflow.session.report import Generation, Usage
from cacheflow.session.session import Session

__all__ = ["TOKENS_IN_ONE_GO", "CacheFlow", "Generation", "Session", "Usage"]
