"""What obstore's exceptions mean, said without a word of theirs.

Their texts repeat requests and answers, which may name access keys and carry signatures. So nothing
of them is passed on but what is looked for here: the HTTP status, the server's error code, the kind
of network error. Nothing is chained either: a traceback would print the original.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from cacheflow.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["STORE_ERRORS", "is_full", "is_refusal", "problem", "summary"]

STORE_ERRORS: Final = (BaseError, OSError, ValueError, NotImplementedError)
"""Everything obstore raises on purpose."""

_STATUS: Final = re.compile(r"\bstatus(?: code)?: ([45]\d\d)\b")
_CODE: Final = re.compile(r"<Code>([A-Za-z]{3,64})</Code>")
_NETWORK: Final = re.compile(r"\bHttpError \{\s*kind: ([A-Za-z]+)")
_INSUFFICIENT_STORAGE: Final = 507
_PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504, _INSUFFICIENT_STORAGE})
_KINDS: Final[Mapping[str, str]] = {
    "Timeout": "no answer in time",
    "Connect": "the server cannot be reached",
    "Request": "the connection broke while the request was sent",
    "Interrupted": "the connection broke in the middle of the answer",
    "Decode": "the connection broke in the middle of the answer",
}
"""The HTTP client's kinds of failure that may pass, and what to say."""
_REFUSED: Final = frozenset({401, 403})
_NO_ROOM: Final = re.compile(r"\b(?:StorageFull|QuotaExceeded|No space left on device)\b")


def problem(error: Exception, operation: str, context: str) -> BackendError:
    """``error`` as the contract's error; ``context`` must be free of secrets."""
    status = _status(error)
    temporary = status in _PASSING if status else _kind(error) in _KINDS or is_full(error)
    return BackendError(
        summary(error), operation=operation, context=context, is_temporary=temporary
    )


def summary(error: Exception) -> str:
    """One line that says what went wrong, made of known words only."""
    if status := _status(error):
        code = _CODE.search(str(error))
        return f"the server answered {status}{f' {code.group(1)}' if code else ''}"
    if (kind := _kind(error)) in _KINDS:
        return _KINDS[kind]
    if is_full(error):
        return "no space is left"
    if isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError):
        return "access was refused"
    if isinstance(error, FileNotFoundError):
        return "it is not there"
    return f"it failed ({type(error).__name__})"


def is_refusal(error: Exception) -> bool:
    """Whether the credentials are not good enough."""
    known = PermissionDeniedError | UnauthenticatedError | PermissionError
    return isinstance(error, known) or _status(error) in _REFUSED


def is_full(error: Exception) -> bool:
    """Whether a quota or a disk is full."""
    if status := _status(error):
        return status == _INSUFFICIENT_STORAGE or "<Code>QuotaExceeded</Code>" in str(error)
    return _NO_ROOM.search(str(error)) is not None


def _status(error: Exception) -> int:
    """The HTTP status of the last answer; 0 if there was none."""
    found = _STATUS.search(str(error))
    return int(found.group(1)) if found else 0


def _kind(error: Exception) -> str:
    """The kind of network error; empty if it was none."""
    found = _NETWORK.search(str(error))
    return found.group(1) if found else ""
