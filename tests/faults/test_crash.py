"""kill -9 at random instants, a thirteenth of what `make bench-crash` does: see its docstring."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench_crash.py"
KILLS = 30


def test_a_tenth_of_the_crash_campaign(tmp_path: Path) -> None:
    """Whatever is killed when: nothing acknowledged is lost, nothing unverified is served, the cap
    holds, and after reopening index, accounts and files agree with no unfinished file left."""
    options = ["--kills", str(KILLS), "--json", "--folder", str(tmp_path)]
    command = [sys.executable, str(BENCH), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    bad = ("lost", "over_cap", "unverified", "differing", "unfinished")
    assert {name: found[name] for name in bad} == dict.fromkeys(bad, 0), found["wrong"]
    assert found["wrong"] == []
    assert found["kills"] >= KILLS
    assert found["interrupted"] > 0
    assert found["largest"] > 0.9 * found["cap"], "the cap was never reached"
