"""Planning and agreement across the ranks of one model: no transport, no tensors."""

from __future__ import annotations

from cacheflow.distributed.agreement import (
    Act,
    Decision,
    Proposal,
    Vote,
    agree,
    combine,
)
from cacheflow.distributed.ballots import (
    decode_offering,
    decode_vote,
    encode_offering,
    encode_vote,
)
from cacheflow.distributed.member import Member, Outcome
from cacheflow.distributed.shards import cut_heads, cut_layers, cut_layout
from cacheflow.distributed.stages import (
    Mode,
    PipelinePlan,
    StageCosts,
    StagePlan,
    best_split,
    fluid_seconds,
    grid_seconds,
    plan_stages,
    worth_storing,
)

__all__ = [
    "Act",
    "Decision",
    "Member",
    "Mode",
    "Outcome",
    "PipelinePlan",
    "Proposal",
    "StageCosts",
    "StagePlan",
    "best_split",
    "Vote",
    "agree",
    "combine",
    "cut_heads",
    "cut_layers",
    "cut_layout",
    "decode_offering",
    "decode_vote",
    "encode_offering",
    "encode_vote",
    "fluid_seconds",
    "grid_seconds",
    "plan_stages",
    "worth_storing",
]
