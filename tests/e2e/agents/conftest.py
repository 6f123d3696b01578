"""Lets these tests import the benchmark of agents, of which they run a small part, and what the
examples with frameworks share."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

for folder in (ROOT / "benchmarks", ROOT / "examples" / "frameworks"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
