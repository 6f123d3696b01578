"""Write the dashboards' JSON, or with ``--check`` say whether what is there is up to date.

python dashboards/source/generate.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from overview import overview
from tenants import tenants
from tiers import tiers
from utilisation import utilisation
from vllm_beside import vllm_beside

BOARDS = {
    "overview": overview,
    "utilisation": utilisation,
    "tiers": tiers,
    "tenants": tenants,
    "vllm": vllm_beside,
}
FOLDER = Path(__file__).parent.parent / "grafana"


def rendered() -> dict[Path, str]:
    """The text of each file."""
    return {
        FOLDER / f"{name}.json": JSONEncoder(sort_keys=True, indent=2).encode(make().build()) + "\n"
        for name, make in BOARDS.items()
    }


def main() -> int:
    """0, or 1 if ``--check`` found a file that is not what the code makes."""
    stale = []
    for path, text in rendered().items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.name)
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if "--check" in sys.argv and stale:
        sys.stderr.write(f"not up to date: {', '.join(stale)}; run make dashboards\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
