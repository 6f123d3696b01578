"""``CACHEFLOW_*`` variables that nobody reads: told once a process, with the one that may be meant.

Pydantic refuses a misspelt argument and overlooks a misspelt variable. Knows names only, those of
programs and plugins that read some beside the settings included; what values mean is said by the
settings. How their mistakes are told is the same for all.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

__all__ = ["PREFIX", "not_json", "tell_unread", "unread", "what_is_wrong"]

PREFIX: Final = "CACHEFLOW_"
_PARTS: Final = ("CACHEFLOW_SERVER_", "CACHEFLOW_STORE_")
"""Of settings that look after their own names, when they are read."""
_OTHERS: Final = frozenset(
    {
        "CACHEFLOW_POOL_TOKEN",  # of clients of the memory pool
        "CACHEFLOW_SAVE",  # of vLLM's plugin
        "CACHEFLOW_OVERLAP",
        "CACHEFLOW_LOOKUP_PATIENCE",
        "CACHEFLOW_URL",  # of the examples
        "CACHEFLOW_FULL",  # of the tests
        "CACHEFLOW_REQUIRE_ALL",
    }
)
_SERVICE_LINK: Final = re.compile(r".*(_SERVICE_HOST|_SERVICE_PORT(_\w+)?|_PORT_\d+_\w+)")
"""What Kubernetes sets for a service that is called cacheflow-something."""
_ALIKE: Final = 0.75
"""Of two names, by :mod:`difflib`: a letter too many, or two that changed places."""
_told: set[str] = set()
_log = logging.getLogger("cacheflow.settings")


def unread(
    environment: Mapping[str, str], prefix: str, fields: Iterable[str]
) -> dict[str, list[str]]:
    """The variables that begin with ``prefix`` and that neither settings with ``fields`` nor anyone
    else reads, each with the known names that are most like it, if any."""
    known = {prefix + field.upper() for field in fields}
    parts: tuple[str, ...] = ()
    if prefix == PREFIX:
        known, parts = known | _OTHERS, _PARTS
    found = {}
    for variable, value in environment.items():
        name = variable.upper()  # pydantic reads them in any case
        if not name.startswith(prefix) or name.startswith(parts) or _is_service(name, value):
            continue
        if name.partition("__")[0] not in known:
            found[variable] = _near(name, prefix, known, parts)
    return found


def _near(name: str, prefix: str, known: Iterable[str], parts: Iterable[str]) -> list[str]:
    """Like ``name`` behind the prefix that all share."""
    ends = {each.removeprefix(prefix): each for each in known}
    end = name.removeprefix(prefix)
    near = difflib.get_close_matches(end, ends, n=2, cutoff=_ALIKE)
    if near:
        return [ends[each] for each in near]
    first, _, rest = end.partition("_")  # SERVE_PORT
    ends = {part.removeprefix(prefix).rstrip("_"): part for part in parts}
    return [ends[each] + rest for each in difflib.get_close_matches(first, ends, 1, _ALIKE)]


def tell_unread(prefix: str, fields: Iterable[str]) -> None:
    """Warn of each such variable of this process, once. See :func:`unread`."""
    fields = tuple(fields)
    for variable, near in unread(os.environ, prefix, fields).items():
        if variable in _told:
            continue
        _told.add(variable)
        names = ", ".join(prefix + field.upper() for field in fields)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {names}"
        _log.warning("environment variable %s is read by nobody: %s", variable, hint)


def not_json(error: Exception, prefix: str) -> tuple[str, str]:
    """The setting whose variable, of those with ``prefix``, pydantic's ``error`` is about, and what
    is wrong with it."""
    found = re.search(r'field "(\w+)"', str(error))
    field = found[1] if found else "(unknown)"
    return field, (
        f"the environment variable {prefix}{field.upper()} is not JSON, which lists are written as "
        f"({error.__cause__})"
    )


def what_is_wrong(problem: Mapping[str, Any]) -> str:
    """With a value, by pydantic's account of it; never the value, which may be a secret."""
    if problem["type"] in ("byte_size", "byte_size_unit"):
        return "write it in bytes, as 268435456 or 256MiB"
    return str(problem["msg"]).removeprefix("Value error, ")


def _is_service(name: str, value: str) -> bool:
    return _SERVICE_LINK.fullmatch(name) is not None or (
        name.endswith("_PORT") and value.startswith(("tcp://", "udp://", "sctp://"))
    )
