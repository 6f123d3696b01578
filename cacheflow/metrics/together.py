"""Several observers as one, none of which can keep events from the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheflow.types import tell

if TYPE_CHECKING:
    from cacheflow.types import Event, Observer

__all__ = ["together"]


def together(*observers: Observer) -> Observer:
    """An observer that tells each of ``observers``, in order; what one raises is logged."""

    def tell_all(event: Event) -> None:
        for observer in observers:
            tell(observer, event)

    return tell_all
