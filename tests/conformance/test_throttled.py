"""A throttled backend is still a backend: the contract through a link, over dram and over nvme.

The harness of what is behind the link is used through the link.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.storage_backends.throttled import Link, ThrottledBackend
