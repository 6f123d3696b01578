"""Tiers: which store has which cells of a request, and whether a store is fit to be asked.

What is here is loaded when it is first asked for: the simulation uses the pure files of this
package (eviction, planned writes) and must not bring an event loop along.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cacheflow.tiers.archive import Imported, export_objects, import_objects
    from cacheflow.tiers.covering import Take, cover
    from cacheflow.tiers.damage import tell_damaged
    from cacheflow.tiers.encoded import Encoded
    from cacheflow.tiers.guarded import Guarded
    from cacheflow.tiers.health import Ailment, Health, HealthLimits
    from cacheflow.tiers.located import Located, locate
    from cacheflow.tiers.opening import front, try_tiers
    from cacheflow.tiers.tier import Tier
    from cacheflow.tiers.traffic import StoreGate, Traffic
    from cacheflow.tiers.write_behind import stores_at_once

__all__ = [
    "Ailment",
    "Encoded",
    "Guarded",
    "Health",
    "HealthLimits",
    "Imported",
    "Located",
    "StoreGate",
    "Take",
    "Tier",
    "Traffic",
    "cover",
    "export_objects",
    "front",
    "import_objects",
    "locate",
    "stores_at_once",
    "tell_damaged",
    "try_tiers",
]

_WHERE: Final = {
    "Ailment": "health",
    "Encoded": "encoded",
    "Guarded": "guarded",
    "Health": "health",
    "HealthLimits": "health",
    "Imported": "archive",
    "Located": "located",
    "StoreGate": "traffic",
    "Take": "covering",
    "Tier": "tier",
    "Traffic": "traffic",
    "cover": "covering",
    "front": "opening",
    "export_objects": "archive",
    "import_objects": "archive",
    "locate": "located",
    "stores_at_once": "write_behind",
    "tell_damaged": "damage",
    "try_tiers": "opening",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"cacheflow.tiers.{_WHERE[name]}"), name)
