"""Keys of a request's whole blocks, made as its tokens become known; or why it can have none.

Belongs to the scheduler's thread. Requests are vLLM's; only what is named in :class:`Request` is
looked at.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from cacheflow.errors import ConfigError
from cacheflow.kv import extend_keys, key_root, tenant_id
from cacheflow.plugins.vllm.identity import content_extras, tenant_salt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cacheflow.plugins.vllm.identity import Adapter, Feature
    from cacheflow.types import ChunkKey

__all__ = ["Keyring", "Request"]

_log = logging.getLogger(__name__)


class Request(Protocol):
    """The part of vLLM's Request that is read (and the count that a jump writes)."""

    request_id: str
    priority: int
    num_computed_tokens: int
    num_preemptions: int
    cache_salt: str | None
    prompt_embeds: object | None
    pooling_params: object | None
    resumable: bool
    skip_reading_prefix_cache: bool
    kv_transfer_params: dict[str, Any] | None
    prefill_stats: Any

    @property
    def all_token_ids(self) -> Sequence[int]: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def lora_request(self) -> Adapter | None: ...

    @property
    def mm_features(self) -> Sequence[Feature]: ...


@dataclass(slots=True)
class _Ring:
    root: bytes
    tenant: bytes
    keys: list[ChunkKey] = field(default_factory=list)


class Keyring:
    """``identity``: what all requests have in common; ``salt``: the operator's."""

    def __init__(self, identity: Mapping[str, str | int], salt: bytes, block: int) -> None:
        self._identity = dict(identity)
        self._salt = salt
        self._block = block
        self._rings: dict[str, _Ring | None] = {}

    def keys(self, request: Request, tokens: int | None = None) -> Sequence[ChunkKey] | None:
        """Keys of the whole blocks among the first ``tokens`` (default: all that are known) of
        ``request``; None if it has none, for a reason logged once."""
        if request.request_id not in self._rings:
            self._rings[request.request_id] = self._ring(request)
        ring = self._rings[request.request_id]
        if ring is None:
            return None
        root, keys = ring.root, ring.keys
        count = len(request.all_token_ids) if tokens is None else tokens
        if count // self._block > len(keys):
            known = list(request.all_token_ids[:count])
            extras = [e for e in content_extras(request.mm_features or ()) if e[0] < len(known)]
            extend_keys(keys, root, known, self._block, extras)
        return keys[: count // self._block]

    def tenant(self, request: Request) -> bytes:
        """Who the blocks of a request that has keys belong to, for their headers."""
        ring = self._rings[request.request_id]
        assert ring is not None
        return ring.tenant

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._rings.pop(request_id, None)

    def renew(self) -> None:
        """No stored block is valid any more (the weights changed): all keys are new from now on."""
        self._identity["epoch"] = secrets.token_hex(16)
        self._rings.clear()

    def _ring(self, request: Request) -> _Ring | None:
        try:
            if reason := _refusal(request):
                raise ConfigError(reason)
            salt = tenant_salt(self._salt, request.cache_salt, request.lora_request)
            return _Ring(key_root(self._identity, salt), tenant_id(salt))
        except ConfigError as error:
            _log.info("request %s passes through untouched: %s", request.request_id, error)
            return None


def _refusal(request: Request) -> str:
    """Why the KV of a request cannot be named by its tokens; empty if it can."""
    if request.prompt_embeds is not None:
        return "its prompt is embeddings, not tokens"
    if request.pooling_params is not None:
        return "it is a pooling request"
    if request.resumable:
        return "its input streams in"
    if any(not feature.identifier for feature in request.mm_features or ()):
        return "a multimodal item has no content hash"
    return ""
