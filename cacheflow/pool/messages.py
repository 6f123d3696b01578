"""What each frame of the side channel says, strictly typed and bounded field by field.

Requests name objects as stored objects are named (``cacheflow.kv.format_name``), or by generation:
a number that the store gives a slot when it hands it out, never twice in one start of the store.
Offsets count from the start of the store's arena. Knows no connection.
"""

from __future__ import annotations

from typing import Annotated, Final, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cacheflow.errors import IntegrityError
from cacheflow.kv import MAX_HEADER_BYTES
from cacheflow.pool.frames import MAX_VALUES, Kind, decode_body, encode_frame

__all__ = [
    "BATCH",
    "Abort",
    "Alloc",
    "AllocReply",
    "Commit",
    "CommitReply",
    "Delete",
    "DeleteReply",
    "ErrorReply",
    "Hello",
    "HelloReply",
    "Lease",
    "LeaseReply",
    "Lookup",
    "LookupReply",
    "Message",
    "Nothing",
    "Release",
    "Scan",
    "ScanReply",
    "Stat",
    "StatReply",
    "REPLIES",
    "REQUESTS",
]

BATCH: Final = 512
"""Names, chunks or slots in one request."""
_KNOWN: Final = 4096

Number: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 63)]
Sum: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 64)]
Name: TypeAlias = Annotated[str, Field(max_length=160)]
Text: TypeAlias = Annotated[str, Field(max_length=1024)]
Digest: TypeAlias = Annotated[bytes, Field(min_length=32, max_length=32)]
Header: TypeAlias = Annotated[bytes, Field(max_length=MAX_HEADER_BYTES)]
TransportName: TypeAlias = Annotated[str, Field(min_length=1, max_length=32)]
Opaque: TypeAlias = Annotated[bytes, Field(max_length=64 << 10)]
"""What the two halves of a transport tell each other."""


class Message(BaseModel):
    """Fields of one kind of frame. No value is converted, none may be missing or unknown."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @classmethod
    def parse(cls, body: bytes, most: int = MAX_VALUES) -> Self:
        """``most``: values in it. Raises IntegrityError, which names the field and what is wrong
        but repeats no value."""
        try:
            return cls.model_validate(decode_body(body, most))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))[:200]
            raise IntegrityError(f"{cls.__name__}, field {where!r}: {first['msg']}") from None

    def frame(self, kind: Kind, number: int, *, is_reply: bool = False) -> bytes:
        """The whole frame; see :func:`encode_frame`."""
        return encode_frame(kind, number, dict(self), is_reply=is_reply)


class Nothing(Message):
    """A reply that only says that it was done."""


class ErrorReply(Message):
    """The request was not carried out."""

    code: Annotated[str, Field(max_length=32)]
    """``protocol``, ``token``, ``transport``, ``draining``, ``busy`` or ``failed``."""
    text: Text


class Hello(Message):
    """The first frame of a connection, and only that."""

    client: Annotated[str, Field(min_length=1, max_length=128)]
    """Unique for each start of each client: two connections of one are not the same one."""
    token: Annotated[bytes, Field(max_length=512)]
    offers: Annotated[tuple[tuple[TransportName, Opaque], ...], Field(max_length=8)]
    """Transports that the client can use, the one it likes best first, each with its hello."""


class HelloReply(Message):
    """What a client has to know of the store."""

    instance: Annotated[bytes, Field(min_length=16, max_length=16)]
    """Of this start of the store; generations of another one mean nothing."""
    arena_bytes: Number
    lease_ms: Number
    transport: TransportName
    answer: Opaque
    """The hello of the store's half of that transport."""


class Lookup(Message):
    """What is stored of these chunks?"""

    chunks: Annotated[tuple[Digest, ...], Field(max_length=BATCH)]
    known: Annotated[tuple[Number, ...], Field(max_length=_KNOWN)]
    """Generations whose headers the client has: they need not be sent."""
    lease: bool
    """Lease what is found and in memory, for ``lease_ms``: one such lease a slot and connection,
    which another lookup renews."""


class LookupReply(Message):
    """Of the first chunks asked, as many as fit a reply (one at least): all their objects.

    An object is ``(generation, header, offset)``: generation and offset 0 while it is on disk only,
    the header empty if the generation is known.
    """

    found: tuple[Annotated[tuple[tuple[Number, Header, Number], ...], Field(max_length=4096)], ...]


class Lease(Message):
    """These objects are about to be read."""

    names: Annotated[tuple[Name, ...], Field(max_length=BATCH)]


class LeaseReply(Message):
    """``(offset, bytes, generation)`` of each, or None: it is not there (any more).

    Nobody overwrites a leased slot for ``lease_ms``, counted by the store from before it answers.
    """

    slots: tuple[tuple[Number, Number, Number] | None, ...]


class Release(Message):
    """These leases are not needed any more: one of each, or (``looked_up``) that of lookups."""

    looked_up: bool
    generations: Annotated[tuple[Number, ...], Field(max_length=BATCH)]


class Alloc(Message):
    """Room for these objects, each described by its header."""

    headers: Annotated[tuple[Header, ...], Field(max_length=BATCH)]


class AllocReply(Message):
    """``(offset, generation, "")`` of each slot, or ``(0, 0, reason)``.

    A slot that is not committed in time is taken back; nobody sees it before.
    """

    slots: tuple[tuple[Number, Number, Text], ...]


class Commit(Message):
    """``(generation, xxh3-64 of the whole object)``: these slots are written."""

    slots: Annotated[tuple[tuple[Number, Sum], ...], Field(max_length=BATCH)]


class CommitReply(Message):
    """Why each was refused; empty where the object is visible now."""

    refused: tuple[Text, ...]


class Abort(Message):
    """These slots will not be committed, and nobody writes to them any more."""

    generations: Annotated[tuple[Number, ...], Field(max_length=BATCH)]


class Delete(Message):
    """Remove these objects, from disk too."""

    names: Annotated[tuple[Name, ...], Field(max_length=BATCH)]


class DeleteReply(Message):
    """Whether each was there."""

    deleted: tuple[bool, ...]


class Scan(Message):
    """Every object, in pages; ``after`` is 0, then what the page before said."""

    after: Number


class ScanReply(Message):
    """Headers, and where to go on; ``after`` 0: that was all."""

    headers: tuple[Header, ...]
    after: Number


class Stat(Message):
    """How is it?"""


class StatReply(Message):
    """State of the store; times in seconds."""

    instance: Annotated[bytes, Field(min_length=16, max_length=16)]
    uptime: float
    objects: Number
    used_bytes: Number
    """Of all objects, those on disk only included."""
    arena_bytes: Number
    arena_used_bytes: Number
    leases: Number
    uncommitted: Number
    clients: Number
    is_draining: bool


REQUESTS: Final[dict[Kind, type[Message]]] = {
    Kind.HELLO: Hello,
    Kind.LOOKUP: Lookup,
    Kind.LEASE: Lease,
    Kind.RELEASE: Release,
    Kind.ALLOC: Alloc,
    Kind.COMMIT: Commit,
    Kind.ABORT: Abort,
    Kind.DELETE: Delete,
    Kind.SCAN: Scan,
    Kind.STAT: Stat,
}
REPLIES: Final[dict[Kind, type[Message]]] = {
    Kind.HELLO: HelloReply,
    Kind.LOOKUP: LookupReply,
    Kind.LEASE: LeaseReply,
    Kind.RELEASE: Nothing,
    Kind.ALLOC: AllocReply,
    Kind.COMMIT: CommitReply,
    Kind.ABORT: Nothing,
    Kind.DELETE: DeleteReply,
    Kind.SCAN: ScanReply,
    Kind.STAT: StatReply,
    Kind.ERROR: ErrorReply,
}
