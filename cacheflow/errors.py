"""The error tree of CacheFlow.

::

    CacheFlowError
    |- ConfigError      a setting, model or folder cannot be used; raised before work starts
    |- BackendError     a storage operation failed (operation, context, is_temporary)
    |- IntegrityError   stored bytes are not what they claim to be; never served
    |- CapacityError    a cap (memory, disk, queue) would be exceeded
    |- ClosedError      the object was used after it was closed
    `- PeerError        another rank of the same model is gone, or says what cannot be

A miss is a value, not an exception: lookups and loads report it as data.
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "CacheFlowError",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "IntegrityError",
    "PeerError",
]


class CacheFlowError(Exception):
    """Base of everything CacheFlow raises on purpose."""


class ConfigError(CacheFlowError):
    """A setting, model or store cannot be used; the message names it and says what to do."""


class BackendError(CacheFlowError):
    """A storage operation failed.

    ``operation`` is the contract's verb (``load``, ``store`` ...), ``context`` says on what, and
    ``is_temporary`` whether the same call may succeed later.
    """

    def __init__(
        self, message: str, *, operation: str, context: str = "", is_temporary: bool = False
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.context = context
        self.is_temporary = is_temporary

    def __str__(self) -> str:
        where = f" ({self.context})" if self.context else ""
        return f"{self.operation}: {super().__str__()}{where}"


class IntegrityError(CacheFlowError):
    """Stored bytes are truncated, altered, of another version or of another geometry."""


class CapacityError(CacheFlowError):
    """A configured cap would be exceeded; nothing was changed."""


class ClosedError(CacheFlowError):
    """The object was used after ``aclose()``."""


class PeerError(CacheFlowError):
    """Another rank of the same model died, did not answer in time, or is not where we are.

    What was in progress is lost, stores are not; the ranks have to be started again together.
    """
