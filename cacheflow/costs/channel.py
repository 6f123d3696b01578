"""What a channel delivers, learned from the loads that ended on it.

One ``ChannelModel`` is one link with its own bandwidth, shared by everything that loads over it. A
load that meets an idle channel takes ``latency + bytes / bandwidth``; behind others its latency is
hidden as far as it was asked for early enough. Loads may end in any order: predictions only assume
that bytes arrive roughly in the order they were asked for. Knows no bytes but counts.
"""

from __future__ import annotations

from itertools import takewhile
from math import ceil, sqrt
from typing import TYPE_CHECKING, Final, TypeAlias

from cacheflow.costs.checks import Ratios
from cacheflow.costs.fit import Fit
from cacheflow.costs.profile import ChannelProfile

if TYPE_CHECKING:
    from collections.abc import Container

__all__ = ["ChannelModel"]

_Flight: TypeAlias = tuple[int, float, float | None]
"""A load in flight: bytes, when it was started, after how many seconds it was expected."""

_SPREAD: Final = (0.25, 0.0, 0.0, 1.0, 0.0, 0.0)
"""Before anything is known: latency is perhaps half of what the first load took."""
_PRIMED: Final = (0.06, 0.0, 0.0, 0.25, 0.0, 0.0)
_GAIN: Final = 0.2
_FAR: Final = (2.0, 2.0)
_KNOWN: Final = 4
_PATIENCE: Final = 3
"""Rows far off in a row that are a new speed."""
_SLOW: Final = 2.5
_SLOW_LOADS: Final = 2
"""So many loads in a row that took more than this times what they should are a new speed too."""
_ROW_SECONDS: Final = 1 / 6
"""Busy time that may bring as much drift as one row."""
_MEMORY_SECONDS: Final = 2.0
"""Busy time after which delivered bytes have lost about two thirds of their weight."""
_MEMORY_LOADS: Final = 12.0
"""The same in loads, so that a fast channel averages over several."""
_OUTLIER: Final = 3.0
_HEADROOM: Final = 1.25
"""The bandwidth is never believed to be more than this times what a busy channel delivered: waits
that look like latency may be streams that are slow together."""
_HOPE: Final = 4.0
"""And to be no more than this times that whatever depth is tried next."""
_MAX_DEPTH: Final = 64
_LEAST_SECONDS: Final = 1e-9
_SLACK: Final = 4.0
"""A load that is late by more than this times what it should have taken is likely to hang."""
_LATE: Final = 0.25
_LEAST_LATE: Final = 0.001
"""Beyond what loads differ anyway (a share of their time; seconds), one is late."""
_LEAST_SLACK: Final = 0.002
"""Seconds below which being late means nothing."""


class ChannelModel:
    """Latency and bandwidth of one channel, with the loads now in flight.

    Busy time is the union of the intervals with something in flight. It is cut into rows: the first
    load of a busy period alone, later ones in groups of about as many as are in flight, so that it
    does not matter in which order parallel streams finish them. A row says how many latencies it
    had to wait out, how many bytes came and how long that took (see :class:`Fit`). Time that went
    into loads that failed is charged to the next delivery. Every method is O(1), except
    :meth:`ahead`, :meth:`landings`, and :meth:`ended` of a load that has passed others.
    """

    __slots__ = (
        "_busy",
        "_bytes",
        "_checks",
        "_fit",
        "_fitted",
        "_flights",
        "_fresh",
        "_head",
        "_opened_with",
        "_overtaken",
        "_pause",
        "_per_byte",
        "_progress",
        "_row",
        "_slow",
        "_steady",
        "_unit",
        "_wasted",
        "bandwidth",
        "in_flight_bytes",
        "latency",
    )

    def __init__(self) -> None:
        self._fit = Fit(_SPREAD, gain=_GAIN, far=_FAR, patience=_PATIENCE)
        self.latency = 0.0
        """Seconds that a load into an idle channel takes beyond its bytes' time."""
        self.bandwidth: float | None = None
        """Bytes a second of a busy channel, or None before the first completion."""
        self.in_flight_bytes = 0
        self._per_byte: float | None = None
        self._fitted = 0.0
        """Seconds a byte as if every wait were latency: what more depth might bring."""
        self._bytes = self._busy = 0.0
        self._unit = 0.0
        self._flights: dict[int, _Flight] = {}
        """In the order of starting."""
        self._head = (0, 0.0)
        """Bytes of the oldest of them, and when it was started."""
        self._overtaken: set[int] = set()
        """Loads in flight that began before one that was delivered."""
        self._progress = 0.0
        """When the channel last became busy or finished something."""
        self._pause = 0.0
        """How long after that the latency of the oldest load still ran."""
        self._fresh = True
        """Nothing was delivered yet since the channel became busy."""
        self._steady = False
        """A row behind the first was learned from since then."""
        self._opened_with = 0
        """Loads in flight when the row began."""
        self._wasted = 0.0
        self._row = (0, 0.0, 0, 0.0)
        """Loads, latencies waited out, bytes and seconds not yet learned from."""
        self._slow = 0
        """Slow loads in a row."""
        self._checks = Ratios()

    # -- what is known -------------------------------------------------------------------------

    @property
    def is_guess(self) -> bool:
        """One load alone was seen: all it took is put down to bandwidth."""
        return self._fit.seen == 1

    @property
    def is_known(self) -> bool:
        """Enough was observed here to tell latency from bandwidth."""
        return self._fit.seen >= _KNOWN

    @property
    def typical_bytes(self) -> float:
        """How large loads have been lately."""
        return self._unit

    @property
    def is_in_doubt(self) -> bool:
        """The latest load was so slow that with the next one like it the channel is."""
        return self._slow > 0

    @property
    def depth(self) -> int:
        """Loads of the usual size in flight that keep the channel busy."""
        if self._per_byte is None or not self._unit:
            return 1
        hidden = self.latency / (self._unit * self._fitted)
        return min(1 + ceil(hidden - 0.01), _MAX_DEPTH)

    @property
    def in_flight(self) -> int:
        """Loads started and not ended."""
        return len(self._flights)

    # -- loads ---------------------------------------------------------------------------------

    def started(self, load_id: int, nbytes: int, now: float) -> None:
        """A load was handed to the backend."""
        total = self.in_flight_bytes + nbytes
        expected = self.left(total, now) if self._per_byte is not None else None
        if not self._flights:
            self._head = (nbytes, now)
            self._moved(now)
            self._fresh, self._steady, self._opened_with = True, False, 0
        self._flights[load_id] = (nbytes, now, expected)
        self.in_flight_bytes = total

    def ended(self, load_id: int, now: float, *, delivered: bool) -> None:
        """A load ended; only delivered bytes count towards the bandwidth."""
        if load_id not in self._flights:
            return
        if delivered:
            self._overtaken.update(takewhile(lambda other: other != load_id, self._flights))
        self._overtaken.discard(load_id)
        nbytes, start, expected = self._flights.pop(load_id)
        if self._flights:
            self._head = next(iter(self._flights.values()))[:2]
        since = self._progress
        self._moved(now)
        busy = max(now - since, 0.0)
        self.in_flight_bytes -= nbytes
        if not delivered:
            self._wasted += busy
            return
        own = _over(now - start, expected)
        if expected:
            self._checks.append(own)
        stall = self._stall(start, since)
        if self._is_slower(stall, nbytes, busy, own):
            return
        count, stalls, total, seconds = self._row
        count, total = count + 1, total + nbytes
        self._row = (
            count,
            stalls + stall,
            total,
            seconds + busy + self._wasted,
        )
        self._wasted = 0.0
        if total and (self._fresh or count > len(self._flights)):
            self._close()
        self._fresh = False

    def _is_slower(self, stall: float, nbytes: int, busy: float, own: float) -> bool:
        """Whether a load that ended shows a new speed, which is then adopted.

        It counts as slow if both it (``own``: over what was expected) and the channel since the
        delivery before it were. After a pause the first is, and those that waited behind it are not
        by the channel's progress; a large load behind small ones of parallel streams is not by its
        own. Rows would tell later: after several times as many loads as are in flight.
        """
        if not self.is_known or not nbytes or self._per_byte is None:
            return False
        pace = busy / (stall * self.latency + nbytes * self._per_byte)
        self._slow = self._slow + 1 if min(own, pace) > _SLOW else 0
        if self._slow < _SLOW_LOADS:
            return False
        self._slow = 0
        # The load before this one may have begun at the old speed: this one says how slow it is.
        rates = self._fit.rates
        assert rates is not None
        self._fit.rescale(busy / (stall * rates[0] + nbytes * rates[1]))
        self._row, self._wasted = (0, 0.0, 0, 0.0), 0.0
        self._see(0, stall, nbytes, busy)
        self._adopt()
        self._fresh, self._opened_with = False, len(self._flights)
        return True

    def over_expected(self, load_id: int, now: float) -> float:
        """What a load that ends now took over what was expected when it began (1 if unknown)."""
        _, start, expected = self._flights.get(load_id, (0, now, None))
        return _over(now - start, expected)

    def _moved(self, now: float) -> None:
        """The channel became busy or finished something then (or latency is not what it was)."""
        self._progress = now
        self._pause = max(self._head[1] + self.latency - now, 0.0)

    def _stall(self, start: float, since: float) -> float:
        """Share of a latency that a load ended just now made the channel wait (0 to 1)."""
        if start >= since:
            # Asked for while older loads are still on their way: those kept the channel busy.
            return 0.0 if self._flights and self._head[1] < start else 1.0
        latency = self.latency
        return max(start + latency - since, 0.0) / latency if latency > 0.0 else 0.0

    def _close(self) -> None:
        """Learn from the row, unless the channel runs dry: parallel streams that end together had
        most of their bytes before, and rows with as many in flight as ever were there to tell."""
        row, self._row = self._row, (0, 0.0, 0, 0.0)
        flying = len(self._flights)
        self._see(*row)
        if self._steady and flying < self._opened_with:
            self._adopt()
        else:
            self._learn(*row)
            self._steady = not self._fresh
        self._opened_with = flying

    def _learn(self, count: int, stalls: float, nbytes: int, seconds: float) -> None:
        seconds = max(seconds, _LEAST_SECONDS)
        if self._fit.rates is None:
            self._unit = nbytes / count
            self._fit.start((seconds, seconds / nbytes, 0.0), (0.0, 1.0, 0.0))
        self._unit += (nbytes / count - self._unit) * min(count / _MEMORY_LOADS, 1.0)
        self._fit.observe(stalls, nbytes, 0.0, seconds, max(seconds / _ROW_SECONDS, 1.0))
        self._adopt()

    def _see(self, count: int, stalls: float, nbytes: int, seconds: float) -> None:
        """Remember what a busy channel delivered; one slow row counts as three at most."""
        if self._fresh:
            seconds = max(seconds - stalls * self.latency, 0.1 * seconds)
        if self._per_byte is not None:
            expected = stalls * self.latency + nbytes * self._per_byte
            seconds = min(seconds, _OUTLIER * expected)
        keep = max(0.0, 1.0 - max(seconds / _MEMORY_SECONDS, count / _MEMORY_LOADS))
        self._bytes = self._bytes * keep + nbytes
        self._busy = self._busy * keep + seconds

    def _adopt(self) -> None:
        rates = self._fit.rates
        assert rates is not None
        seen = self._busy / self._bytes if self._bytes else 0.0
        self.latency = rates[0]
        self._per_byte = max(rates[1], seen / _HEADROOM)
        self.bandwidth = 1.0 / self._per_byte
        self._fitted = max(rates[1], seen / _HOPE)
        self._moved(self._progress)

    # -- predictions ---------------------------------------------------------------------------

    def ahead(self, load_id: int) -> int:
        """Bytes in flight up to and including ``load_id``, in the order of starting."""
        total = 0
        for other, (nbytes, _, _) in self._flights.items():
            total += nbytes
            if other == load_id:
                break
        return total

    def left(self, nbytes: float, now: float) -> float | None:
        """Seconds until ``nbytes`` (from the head of the line on) will have been delivered.

        A head of line that is overdue is expected to take as long again as it is late, and once
        that is several times what it should have taken as many times longer, so a channel that
        hangs looks slower every moment, and soon much slower. Bytes beyond those in flight are
        taken to be asked for now. None while nothing is known and nothing is late: a channel that
        has never answered looks as slow as it has been silent.
        """
        per_byte = self._per_byte
        if not self._flights:
            if per_byte is None:
                return None
            return self.latency + nbytes * per_byte if nbytes > 0 else 0.0
        waited = now - self._progress
        if per_byte is None:
            return waited
        head, need = self._head[0], nbytes * per_byte
        late = waited - self._pause - head * per_byte
        if late > 0.0:
            slack = self._slack(head)
            return need + (late if late < slack else late * late / slack)
        seconds = need + self._pause - waited
        more = nbytes - self.in_flight_bytes
        if more > 0:
            seconds = max(seconds, self.latency + more * per_byte)
        return seconds if seconds > 0.0 else 0.0

    def landings(self, wanted: Container[int], now: float) -> list[tuple[int, float]]:
        """Of each ``wanted`` load in flight, by id, the seconds until it is there: until the bytes
        up to it are, or its :meth:`lag`."""
        found: list[tuple[int, float]] = []
        total, waited = 0, now - self._progress
        # As :meth:`left`, of which most is the same for all of them.
        per_byte, pause, head = self._per_byte, self._pause, self._head[0]
        late = 0.0 if per_byte is None else waited - pause - head * per_byte
        if late >= (slack := self._slack(head)):
            late = late * late / slack
        for load_id, (nbytes, _, _) in self._flights.items():
            total += nbytes
            if load_id in wanted:
                if per_byte is None:
                    seconds = waited
                elif late > 0.0:
                    seconds = total * per_byte + late
                else:
                    seconds = max(total * per_byte + pause - waited, 0.0)
                if self._overtaken:
                    seconds = max(seconds, self.lag(load_id, now))
                found.append((load_id, seconds))
        return found

    def slower_than(self, seconds: float, nbytes: float, now: float) -> float:
        """When ``left(nbytes)`` will exceed ``seconds`` if nothing is delivered before.

        At the earliest ``now``; used to set the timer after which recompute races a late load.
        """
        if not self._flights:
            return float("inf")
        per_byte = self._per_byte
        if per_byte is None:
            return max(now, self._progress + seconds)
        head, stall = self._head[0], self._pause
        due = self._progress + stall + head * per_byte
        late, slack = max(0.0, seconds - nbytes * per_byte), self._slack(head)
        return max(now, due + (late if late < slack else sqrt(late * slack)))

    def late_from(self) -> float:
        """When the oldest load under way counts as late if nothing is delivered before (never while
        nothing is known, or under way)."""
        if not self._flights or self._per_byte is None:
            return float("inf")
        head, stall = self._head[0], self._pause
        expected = head * self._per_byte
        return self._progress + stall + expected + max(_LATE * expected, _LEAST_LATE)

    def silent_from(self, least: float) -> float:
        """When the channel will have been silent for so long that it is likely to hang, and for
        ``least`` seconds more than it should (never while nothing is known, or under way)."""
        if not self._flights or self._per_byte is None:
            return float("inf")
        head = self._head[0]
        expected = self._progress + self._pause + head * self._per_byte
        return expected + max(self._slack(head), least)

    @property
    def was_passed(self) -> bool:
        """Whether any load in flight began before one that was delivered."""
        return bool(self._overtaken)

    def has_passed(self, load_id: int) -> bool:
        """Whether a load that began later than this one, which is in flight, was delivered."""
        return load_id in self._overtaken

    def lag(self, load_id: int, now: float) -> float:
        """Seconds for which a load that hangs while others pass it is expected to go on: as long as
        it is late. 0 for all others, which the channel's own progress tells enough about."""
        if load_id not in self._overtaken:
            return 0.0
        due, slack = self._due(load_id)
        return now - due if now - due > slack else 0.0

    def lags_from(self, load_id: int, seconds: float) -> float:
        """When its :meth:`lag` will exceed ``seconds`` (never where nothing has passed it yet)."""
        due, slack = self._due(load_id)
        return due + max(seconds, slack)

    def _due(self, load_id: int) -> tuple[float, float]:
        """When a load that was overtaken should have been there, and how late says something."""
        if load_id not in self._overtaken:
            return float("inf"), 0.0
        nbytes, start, expected = self._flights[load_id]
        if expected is None:
            expected = self.latency + nbytes * (self._per_byte or 0.0)
        return start + expected, max(_SLACK * expected, _LEAST_SLACK)

    def _slack(self, head: int) -> float:
        """Seconds by which the oldest load may be late before it is likely to hang."""
        expected = self.latency + head * (self._per_byte or 0.0)
        return max(_SLACK * expected, _LEAST_SLACK)

    def take_checks(self) -> list[float]:
        """What loads took over what was predicted: the latest few hundred since the last call."""
        return self._checks.take()

    # -- from one process to the next ----------------------------------------------------------

    def profile(self) -> ChannelProfile | None:
        """What is known, to be kept; None when nothing is."""
        if self._per_byte is None:
            return None
        return ChannelProfile(self.latency, self._per_byte, self._unit)

    def doubt(self) -> None:
        """Trust what is known no more than if it had been kept from another process."""
        if (profile := self.profile()) is not None:
            self._bytes = self._busy = 0.0
            self.prime(profile)

    def prime(self, profile: ChannelProfile) -> None:
        """Begin with what was known once. A handful of loads outweighs it."""
        typical = profile.latency + profile.unit * profile.per_byte
        self._unit = profile.unit
        units = (typical, profile.per_byte, 0.0)
        self._fit.start(units, (profile.latency / typical, 1.0, 0.0), _PRIMED)
        self._adopt()


def _over(seconds: float, expected: float | None) -> float:
    """What a load took over what was expected of it (1 if nothing was)."""
    return max(seconds, _LEAST_SECONDS) / expected if expected else 1.0
