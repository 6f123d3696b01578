"""Lets these tests import the benchmark of agents, of which they run a small part, what examples
with frameworks share, and the scripted server of the server's own tests."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

for folder in (ROOT, ROOT / "benchmarks", ROOT / "examples" / "frameworks"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

from tests.unit.openai_server.conftest import chat_model, serving  # noqa: E402

__all__ = ["chat_model", "serving"]
