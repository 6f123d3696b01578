"""Lets these tests import what lies beside them."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[3])

if ROOT not in sys.path:
    sys.path.append(ROOT)
