"""Options of the object store backend. Secrets have no place among them."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from cacheflow.storage_backends.options import Options

__all__ = ["MIN_PART_BYTES", "ObjectStoreOptions"]

MIN_PART_BYTES: Final = 5 << 20
"""The smallest part of a multipart upload that S3 takes."""

_SCHEMES: Final = ("s3", "gs", "az", "file", "memory")


class ObjectStoreOptions(Options):
    """Options of the ``object-store`` backend.

    Credentials are taken from the environment (``AWS_ACCESS_KEY_ID`` and so on, ``GOOGLE_*``,
    ``AZURE_*``, or the cloud's own instance roles), never from here.
    """

    url: str
    """``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``,
    ``file:///folder`` or ``memory:///`` (lasts as long as the backend)."""
    endpoint: str | None = None
    """Where an S3-compatible server listens, e.g. ``http://10.0.0.5:9000``; with ``s3://`` only."""
    region: str | None = None
    """Region of the bucket; with ``s3://`` only."""
    anonymous: bool = False
    """Send unsigned requests: for public buckets and servers that ask for no credentials."""
    concurrency: int = Field(default=64, ge=1, le=512)
    """Requests in flight at once: lookups, reads and deletes."""
    writers: int = Field(default=4, ge=1, le=64)
    """Objects being written at once."""
    part_bytes: int = Field(default=16 << 20, ge=MIN_PART_BYTES, le=1 << 30)
    """Larger objects are written in parts of this many bytes, several at a time."""
    timeout: float = Field(default=30.0, gt=0, le=600)
    """Seconds for one request, body included; what fails before is tried again until then."""
    connect_timeout: float = Field(default=5.0, gt=0, le=600)
    """Seconds for reaching the server."""
    retries: int = Field(default=2, ge=0, le=10)
    """Further attempts at a request that failed for a passing reason."""

    @field_validator("url")
    @classmethod
    def _is_a_store(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES:
            raise ValueError(f"begins with none of {', '.join(f'{s}://' for s in _SCHEMES)}")
        _check_no_secrets(url)
        if parts.scheme in ("file", "memory"):
            if parts.netloc:
                raise ValueError(f"write {parts.scheme}:/// with three slashes and a full path")
        elif not parts.netloc:
            raise ValueError("names no bucket")
        return url

    @field_validator("endpoint")
    @classmethod
    def _is_an_address(cls, endpoint: str | None) -> str | None:
        if endpoint is not None:
            parts = urlsplit(endpoint)
            if parts.scheme not in ("http", "https") or not parts.netloc:
                raise ValueError("is not an http:// or https:// address")
            _check_no_secrets(endpoint)
        return endpoint

    @property
    def scheme(self) -> str:
        """The kind of store, ``s3`` for instance."""
        return urlsplit(self.url).scheme


def _check_no_secrets(url: str) -> None:
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("must hold no credentials, query or fragment: set them in the environment")
