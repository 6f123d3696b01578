"""CacheFlow inside vLLM, measured: first tokens at every store speed, and what must not suffer.

make bench-vllm                              # the sweep over delays, some ten minutes
make bench-vllm ARGS="campaign"              # 200 random requests: tokens as in plain vLLM
make bench-vllm ARGS="campaign --requests 50 --seed 2"  # ... a piece of it, other prompts
make bench-vllm ARGS="decode"                # others' tokens while one request is restored
make bench-vllm ARGS="stores"                # a restore beside stores on the same line
make bench-vllm ARGS="restarts"              # vllm serve over one folder, started four times
make bench-vllm ARGS="all --quick"           # each of them, small
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Final

import vllm_campaign
import vllm_decode
import vllm_restarts
import vllm_stores
import vllm_sweep
from vllm_engine import arguments

PARTS: Final = {
    "sweep": vllm_sweep,
    "campaign": vllm_campaign,
    "decode": vllm_decode,
    "stores": vllm_stores,
    "restarts": vllm_restarts,
}


def main() -> None:
    """Measure, and say what was kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", default="sweep", choices=[*PARTS, "all"])
    arguments(parser)
    for part in PARTS.values():
        part.add_arguments(parser)
    options = parser.parse_args()
    results = {}
    for name in PARTS if options.part == "all" else [options.part]:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = PARTS[name].run(options, Path(folder))
        out = sys.stderr if options.json else sys.stdout
        print(*PARTS[name].report(results[name]), sep="\n", file=out, flush=True)
    if options.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
