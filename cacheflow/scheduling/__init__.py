"""The pure decision core: no asyncio, no torch, no I/O; time comes in as an argument."""

from __future__ import annotations

from cacheflow.scheduling.batch import BatchScheduler
from cacheflow.scheduling.joint import JointScheduler
from cacheflow.scheduling.origins import RECOMPUTE, Origins
from cacheflow.scheduling.policies import POLICIES, Policy, load_policy

__all__ = [
    "POLICIES",
    "RECOMPUTE",
    "BatchScheduler",
    "JointScheduler",
    "Origins",
    "Policy",
    "load_policy",
]
