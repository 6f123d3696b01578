"""Keys, provenance and the chunk format: what is stored, and how it is proved to be itself."""

from __future__ import annotations

from cacheflow.kv.auth import ChunkAuth
from cacheflow.kv.checksums import checksum, wsum
from cacheflow.kv.chunk import Stamp, check_layout, check_stamp, restamp, seal, verify, verify_heads
from cacheflow.kv.coding import decode_layers, import_coders
from cacheflow.kv.header import (
    CHUNK_FORMAT,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    decode_header,
    encode_header,
    header_size,
)
from cacheflow.kv.hidden import boundary_shard
from cacheflow.kv.keys import (
    KEY_FORMAT,
    chunk_keys,
    extend_keys,
    format_name,
    key_root,
    model_id,
    parse_name,
    tenant_id,
    tenant_salt,
)
from cacheflow.kv.provenance import (
    canonical_tokens,
    clip_segments,
    exact_tokens,
    is_packed,
    make_grid_id,
)

__all__ = [
    "CHUNK_FORMAT",
    "ChunkAuth",
    "KEY_FORMAT",
    "MAX_HEADER_BYTES",
    "PREFIX_BYTES",
    "Stamp",
    "boundary_shard",
    "canonical_tokens",
    "check_layout",
    "check_stamp",
    "checksum",
    "chunk_keys",
    "clip_segments",
    "decode_header",
    "decode_layers",
    "encode_header",
    "exact_tokens",
    "extend_keys",
    "format_name",
    "header_size",
    "import_coders",
    "key_root",
    "is_packed",
    "make_grid_id",
    "model_id",
    "parse_name",
    "restamp",
    "seal",
    "tenant_id",
    "tenant_salt",
    "verify",
    "verify_heads",
    "wsum",
]
