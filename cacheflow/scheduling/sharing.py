"""Requests that begin alike: who restores the tiles they share, and what happens when it goes.

Every tile has one owner, the others wait for its cells. What a request owns is all of its tiles
from some index on (``led``), so owners form a chain from the shortest shared prefix to the longest.
Decides nothing: the scheduler says who should own what.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from cacheflow.scheduling.ledger import NOTHING, Ledger

if TYPE_CHECKING:
    from cacheflow.scheduling.frontier import Frontier

__all__ = ["Sharing"]


class Sharing(Ledger):
    """A ledger that may have tiles in common with others."""

    __slots__ = ()

    def join(self, leader: Frontier, tiles: int) -> None:
        """The first ``tiles`` tiles are those of ``leader``. Before anything is done for either of
        them here.

        Raises:
            ValueError: they are not the same tiles.
        """
        if self.spec.tiles[:tiles] != leader.spec.tiles[:tiles] or len(leader.tiles) < tiles:
            raise ValueError(f"{self.spec.id!r} does not begin like {leader.spec.id!r}")
        for t in range(tiles):
            self._count(t, NOTHING)
            self.tiles[t] = leader.tiles[t]
            self.tiles[t].sharers += 1
        self.led = tiles
        self.family = leader.family
        self.family.append(cast("Frontier", self))
        for t in range(tiles):
            self._recount(t)

    def fill(self, tiles: int) -> None:
        """The first ``tiles`` tiles are in the KV cache already."""
        self.filled = tiles
        for t in range(tiles):
            self.tiles[t].ready = self.tiles[t].full
            self._refresh(t)

    @property
    def leader(self) -> Frontier | None:
        """Who owns the last tile that is led here: the next owner down the chain."""
        if not self.led:
            return None
        state = self.tiles[self.led - 1]
        return next(
            member
            for member in self.family
            if member.led < self.led
            and len(member.tiles) >= self.led
            and member.tiles[self.led - 1] is state
        )

    def leans_on(self, owner: Frontier) -> bool:
        """Whether ``owner`` has still to restore a tile that is wanted here."""
        wanted = (self._open & ((1 << self.led) - 1)) >> owner.led << owner.led
        if self is owner or not wanted:
            return False
        first = (wanted & -wanted).bit_length() - 1
        return first < len(owner.tiles) and self.tiles[first] is owner.tiles[first]

    @property
    def is_leant_on(self) -> bool:
        """Whether others may lean on this one; found without asking each of them."""
        owned = self._open >> self.led << self.led
        first = (owned & -owned).bit_length() - 1
        return bool(owned) and self.tiles[first].sharers > 1

    @property
    def owns_shared(self) -> bool:
        """Whether others have any of the tiles that are restored, or were, here."""
        return self.led < len(self.tiles) and self.tiles[self.led].sharers > 1

    @property
    def leans(self) -> bool:
        """Whether another has still to restore a tile that is wanted here."""
        return bool(self._open & ((1 << self.led) - 1))

    def is_own(self, t: int | None) -> bool:
        """Whether nobody else has tile ``t``, or (None) the suffix."""
        return t is None or self.tiles[t].sharers == 1

    def take_over(self) -> None:
        """Restore what the leader has been restoring of this request; all that it did stays."""
        leader = self.leader
        assert leader is not None, "nobody leads"
        start, stop = leader.led, self.led
        leader._own_from(stop)
        self._own_from(start)
        for t in range(start, stop):
            state = self.tiles[t]
            for channel in leader.channels:
                known = self._coverage.get(channel)
                state.restrict(channel, () if known is None else known.layers)
            for channel, coverage in self._coverage.items():
                if channel not in leader.channels:
                    state.extend(channel, coverage.layers)
            self._refresh(t)

    def part(self) -> None:
        """Leave the family; its tiles have other owners by now."""
        mine = cast("Frontier", self)
        self.family.remove(mine)
        self.family = [mine]
        for state in self.tiles:
            state.sharers -= 1

    def _own_from(self, first: int) -> None:
        changed = range(min(first, self.led), max(first, self.led))
        for t in changed:
            self._count(t, NOTHING)
        self.led = first
        for t in changed:
            self._recount(t)
