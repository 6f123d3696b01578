"""Votes and offerings as bytes: votes of one size whatever they say, so that one exchange carries
all of them; what does not fit is said with the next one.
"""

from __future__ import annotations

import json
import struct
from typing import Final

from cacheflow.distributed.agreement import Proposal, Vote
from cacheflow.errors import PeerError
from cacheflow.types import Coverage, Offering

__all__ = ["BALLOT_BYTES", "decode_offering", "decode_vote", "encode_offering", "encode_vote"]

BALLOT_BYTES: Final = 2048
"""Of one vote."""

_MAGIC: Final = 0xCF01
_HEAD: Final = struct.Struct("<HBBBB?")
_CALL: Final = struct.Struct("<Q")
_BLOCKED: Final = struct.Struct("<II")
_NEED: Final = struct.Struct("<IIH")
_GONE: Final = struct.Struct("<I")
_PROPOSAL: Final = struct.Struct("<I?IHHH")
_MOST_CALLS: Final = 128
_MOST_BLOCKED: Final = 48
_MOST_NEEDS: Final = 32
_MOST_GONE: Final = 8
"""All of them fit."""


def encode_vote(vote: Vote) -> bytes:
    """The first few of each kind."""
    calls, blocked = vote.calls[:_MOST_CALLS], vote.blocked[:_MOST_BLOCKED]
    needs, gone = vote.needs[:_MOST_NEEDS], vote.gone[:_MOST_GONE]
    parts = [
        _HEAD.pack(
            _MAGIC, len(calls), len(blocked), len(needs), len(gone), vote.proposal is not None
        ),
        *(_CALL.pack(each) for each in calls),
        *(_BLOCKED.pack(*each) for each in blocked),
        *(_NEED.pack(*each) for each in needs),
        *(_GONE.pack(each) for each in gone),
    ]
    if vote.proposal is not None:
        parts.append(_PROPOSAL.pack(*vote.proposal.work, vote.proposal.want, vote.proposal.able))
    return b"".join(parts).ljust(BALLOT_BYTES, b"\0")


def decode_vote(data: bytes) -> Vote:
    """What :func:`encode_vote` wrote.

    Raises:
        PeerError: it is not of this version: the ranks run different programs.
    """
    magic, *counts, proposes = _HEAD.unpack_from(data)
    if magic != _MAGIC or len(data) != BALLOT_BYTES:
        raise PeerError("another rank speaks another version: run the same CacheFlow on all ranks")
    at = _HEAD.size

    def take(form: struct.Struct, count: int) -> list[tuple[int, ...]]:
        nonlocal at
        first, at = at, at + count * form.size
        return list(form.iter_unpack(data[first:at]))

    calls, blocked, needs, gone = (
        take(form, count)
        for form, count in zip((_CALL, _BLOCKED, _NEED, _GONE), counts, strict=True)
    )
    proposal = None
    if proposes:
        request, is_suffix, start, layer, want, able = _PROPOSAL.unpack_from(data, at)
        proposal = Proposal((request, is_suffix, start, layer), want, able)
    return Vote(
        calls=tuple(call for (call,) in calls),
        proposal=proposal,
        blocked=tuple((request, start) for request, start in blocked),
        needs=tuple((request, start, layers) for request, start, layers in needs),
        gone=tuple(request for (request,) in gone),
    )


def encode_offering(offering: Offering) -> bytes:
    """As JSON: it has any length, and is sent once a request."""
    coverage = [[each.channel, list(each.layers), each.stride] for each in offering.coverage]
    rest = [offering.strange, offering.lossy, offering.subject, offering.resident]
    return json.dumps([coverage, *rest]).encode()


def decode_offering(data: bytes) -> Offering:
    """What :func:`encode_offering` wrote."""
    coverage, *rest = json.loads(data)
    each = (Coverage(channel, tuple(layers), stride) for channel, layers, stride in coverage)
    return Offering(tuple(each), *rest)
