"""Records that cross the storage contract: buffers, reads, writes and their results."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, Self

from cacheflow.types.objects import Codec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.errors import CacheFlowError
    from cacheflow.types.objects import ChunkInfo, ObjectKey

__all__ = [
    "Buffer",
    "Capabilities",
    "Extent",
    "Hold",
    "Lent",
    "Loan",
    "MemoryKind",
    "Read",
    "StorePart",
    "TransferResult",
    "TransferStatus",
    "Write",
]


class MemoryKind(StrEnum):
    """Where a buffer lives."""

    PINNED = "pinned"
    PAGEABLE = "pageable"
    DEVICE = "device"


class Hold(Protocol):
    """Counts I/O in flight on a buffer, from any thread.

    A backend acquires once for every read or write it accepts, before its first await, and
    releases only when the operating system (or the peer) can no longer touch the buffer, cancelled
    or not. The owner reuses or frees the buffer only when the count is back at zero.
    """

    def acquire(self) -> None: ...

    def release(self) -> None: ...

    @property
    def in_flight(self) -> int:
        """Operations that may still touch the buffer."""
        ...


@dataclass(frozen=True, slots=True)
class Buffer:
    """Caller-owned memory. ``view`` is a C-contiguous byte view, or None for device memory."""

    address: int
    nbytes: int
    kind: MemoryKind
    view: memoryview | None
    hold: Hold


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes ``[offset, offset + buffer.nbytes)`` of one object, into the caller's buffer."""

    key: ObjectKey
    offset: int
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes ``[offset, offset + nbytes)`` of one object, wherever they lie."""

    key: ObjectKey
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Write:
    """One whole object, as consecutive parts (the encoded prefix and table, then the payload)."""

    info: ChunkInfo
    parts: tuple[Buffer, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class TransferStatus(StrEnum):
    """How a read or write ended."""

    OK = "ok"
    MISSING = "missing"
    """The object is not there (any more): a value, not an error."""
    SHORT = "short"
    """Fewer bytes than asked for."""
    FULL = "full"
    """A cap or a full disk; nothing of the object is visible."""
    FAILED = "failed"
    LATE = "late"
    """Given up at its deadline; its buffer may still be written, and is held until it is not."""
    REFUSED = "refused"
    """Not tried: the tier is set aside as sick, or what is no object lies in the object's place."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Outcome of ``request`` (the Read or Write given). ``seconds``: from submission to end."""

    request: Read | Write
    status: TransferStatus
    nbytes: int
    seconds: float
    error: CacheFlowError | None = None


@dataclass(frozen=True, slots=True)
class Lent:
    """What came of ``extent``: its bytes where they lie, read-only; or, not OK, why not."""

    extent: Extent
    status: TransferStatus
    buffer: Buffer | None = None
    error: CacheFlowError | None = None


class Loan:
    """Lent memory, in the order asked, to be given back once: with :meth:`release` or ``with``.

    Used on the event loop. Threads read what is lent only while somebody there keeps the loan.
    ``give_back`` must not raise.
    """

    __slots__ = ("_give_back", "parts")

    def __init__(self, parts: Sequence[Lent], give_back: Callable[[], None] | None = None) -> None:
        self.parts = parts
        self._give_back = give_back

    def release(self) -> None:
        """Nobody reads what is lent any more. Idempotent."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class StorePart:
    """One of the places that a store is made of, a server for instance."""

    name: str
    is_up: bool
    transport: str
    """What its bytes travel by; empty while that is not known."""
    repaired: int = 0
    """Copies that it had lost and was given again by this client."""
    not_repaired: int = 0
    """Those that it could not be given."""
    reason: str = ""
    """Why it is not up, as far as that is known."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do; the conformance suite picks its tests by these."""

    ranged_reads: bool = True
    persistent: bool = False
    """Objects survive the process."""
    shared: bool = False
    """Other processes see the same objects."""
    evicts: bool = False
    """Makes room by itself: no client has to keep an index of it."""
    codec: Codec = Codec.RAW
    """How raw chunks that are stored here are kept."""
    memory_kinds: frozenset[MemoryKind] = field(
        default_factory=lambda: frozenset({MemoryKind.PAGEABLE, MemoryKind.PINNED})
    )
    suggested_depth: int = 4
    """Reads in flight at which the medium reaches its bandwidth."""
    suggested_read_bytes: int = 4 << 20
    """Read size at which the medium reaches its bandwidth."""
