"""Several observers as one, none of which can keep events from the others."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cacheflow.types import Event, Observer

__all__ = ["together"]

_log = logging.getLogger(__name__)


def together(*observers: Observer) -> Observer:
    """An observer that tells each of ``observers``, in order; what one raises is logged."""

    def tell(event: Event) -> None:
        for observer in observers:
            try:
                observer(event)
            except Exception:  # one that fails must not keep events from the others (promise 9)
                _log.exception("an observer failed on %s", type(event).__name__)

    return tell
