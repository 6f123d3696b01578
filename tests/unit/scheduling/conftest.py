"""Lets these tests import what lies beside them, and the benchmark they run a tenth of."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

for folder in (ROOT, ROOT / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
