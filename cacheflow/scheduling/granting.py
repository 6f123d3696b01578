"""Compute for engines that schedule themselves: they ask how many tokens they may compute.

Such an engine decides at every step what it computes. What it is granted is its own, tile by tile;
loads come from the back as ever. See :mod:`cacheflow.scheduling.paced`.
"""

from __future__ import annotations

from typing import Final

from cacheflow.scheduling.fetching import Fetching
from cacheflow.scheduling.paced import Paced

__all__ = ["LEAST_TOKENS", "Granting"]

LEAST_TOKENS: Final = 64
"""What fewer take says nothing about tiles: it is not learned from."""


class Granting(Fetching):
    """Hands out compute that is paced by its engine."""

    def position(self, request_id: str) -> int:
        """Leading tokens of a paced request whose KV is complete: where its engine goes on, which
        is further than it has computed where loads came first."""
        with self._gate:
            return self._paced(request_id).skip_loaded()

    def grant_compute(self, request_id: str, budget: int, now: float) -> int:
        """How many tokens from :meth:`position` on the engine may compute in this step.

        At most ``budget``. 0: what comes next is (being) loaded. What was granted is the engine's
        to compute, in this step or a later one; no load touches it any more.

        Raises:
            KeyError: there is no such request, or it is not paced.
        """
        with self._gate:
            frontier = self._paced(request_id)
            if frontier.held or frontier.cancelled:
                return 0
            first = min(filter(None, (self._compute.waiting(), self._compute.parked())))
            frontier.is_first_to_compute = first[1] == request_id
            tokens = frontier.grant(budget, now)
            frontier.turn_compute_away(not tokens)
            return tokens

    def advanced(self, request_id: str, tokens: int, seconds: float, now: float) -> None:
        """The engine has computed so many of the tokens granted, in ``seconds`` of its compute (0:
        not known, for instance because the step computed other requests as well).

        Raises:
            ValueError: that is more than was granted.
            KeyError: there is no such request, or it is not paced.
        """
        with self._gate:
            frontier = self._paced(request_id)
            frontier.advance(tokens, seconds if tokens >= LEAST_TOKENS else 0.0)
            self._changed(frontier, now)
            self._rank_again(now)

    def _paced(self, request_id: str) -> Paced:
        frontier = self._requests[request_id]
        if not isinstance(frontier, Paced):
            raise KeyError(f"request {request_id!r} is not paced by its engine")
        return frontier
