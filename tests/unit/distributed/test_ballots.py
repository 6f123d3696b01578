"""What ranks tell each other survives the way, and takes no more room than it is given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.distributed.agreement import Proposal, Vote
from cacheflow.distributed.ballots import (
    BALLOT_BYTES,
    decode_offering,
    decode_vote,
    encode_offering,
    encode_vote,
)
from cacheflow.errors import PeerError
from cacheflow.types import Coverage, Offering

word = st.integers(0, (1 << 32) - 1)
short = st.integers(0, (1 << 16) - 1)
proposals = st.builds(Proposal, st.tuples(word, st.booleans(), word, short), short, short)
votes = st.builds(
    Vote,
    calls=st.lists(st.integers(0, (1 << 64) - 1), max_size=40).map(tuple),
    proposal=st.none() | proposals,
    blocked=st.lists(st.tuples(word, word), max_size=60).map(tuple),
    needs=st.lists(st.tuples(word, word, short), max_size=60).map(tuple),
    gone=st.lists(word, max_size=20).map(tuple),
)


@given(votes)
def test_votes_come_back(vote: Vote) -> None:
    """Always in the same number of bytes; of what is too much, the first."""
    data = encode_vote(vote)
    assert len(data) == BALLOT_BYTES
    back = decode_vote(data)
    assert back.proposal == vote.proposal
    for name in ("calls", "blocked", "needs", "gone"):
        theirs, ours = getattr(back, name), getattr(vote, name)
        assert theirs == ours[: len(theirs)]
        assert len(theirs) == len(ours) or len(theirs) >= 8


def test_another_program_is_noticed() -> None:
    with pytest.raises(PeerError, match="another version"):
        decode_vote(bytes(BALLOT_BYTES))


masks = st.lists(st.integers(0, (1 << 130) - 1), max_size=6).map(tuple)


coverages = st.lists(st.builds(Coverage, st.text(max_size=9), masks, word), max_size=3)


@given(coverages, word, word, st.text(max_size=9))
def test_offerings_come_back(
    coverage: list[Coverage], strange: int, lossy: int, subject: str
) -> None:
    offering = Offering(tuple(coverage), strange, lossy, subject, strange)
    assert decode_offering(encode_offering(offering)) == offering
