"""Keys, provenance and the chunk format: what is stored, and how it is proved to be itself."""

from __future__ import annotations

from cacheflow.kv.checksums import checksum, wsum
from cacheflow.kv.codec import (
    CHUNK_FORMAT,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    check_layout,
    decode_header,
    encode_header,
    header_size,
    seal,
    verify,
)
from cacheflow.kv.keys import (
    KEY_FORMAT,
    chunk_keys,
    extend_keys,
    format_name,
    key_root,
    parse_name,
)
from cacheflow.kv.provenance import canonical_tokens, clip_segments, make_grid_id

__all__ = [
    "CHUNK_FORMAT",
    "KEY_FORMAT",
    "MAX_HEADER_BYTES",
    "PREFIX_BYTES",
    "canonical_tokens",
    "check_layout",
    "checksum",
    "chunk_keys",
    "clip_segments",
    "decode_header",
    "encode_header",
    "extend_keys",
    "format_name",
    "header_size",
    "key_root",
    "make_grid_id",
    "parse_name",
    "seal",
    "verify",
    "wsum",
]
