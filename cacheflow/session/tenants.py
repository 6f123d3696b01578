"""One tenant of many: it has keys and a stamp of its own, and finds nothing that others stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cacheflow.errors import ConfigError
from cacheflow.kv import key_root, tenant_id, tenant_salt
from cacheflow.session.opening import stamp_of

if TYPE_CHECKING:
    from cacheflow.abc import Engine
    from cacheflow.kv import Stamp
    from cacheflow.settings import Settings

__all__ = ["Tenant", "tenant_of"]


@dataclass(frozen=True, slots=True)
class Tenant:
    """What a tenant's chunks are called, and what is written into them."""

    name: str
    root: bytes
    stamp: Stamp


def tenant_of(name: str, settings: Settings, engine: Engine) -> Tenant:
    """The tenant called ``name``; the unnamed one has the salt of the settings itself.

    Raises:
        ConfigError: it is not a name.
    """
    if not isinstance(name, str):
        raise ConfigError(f"a tenant's name is text, got {type(name).__name__}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"a tenant's name is Unicode text: {error.reason}") from None
    salt = tenant_salt(settings.salt_bytes, name)
    stamp = replace(stamp_of(settings, engine), tenant_id=tenant_id(salt))
    return Tenant(name, key_root(engine.identity, salt), stamp)
