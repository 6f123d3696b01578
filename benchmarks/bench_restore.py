"""Restore efficiency and never-worse, on the real model and a real store: ``cacheflow bench``.

    make bench-restore
    make bench-restore ARGS="--pool tcp --links 1:1 --lengths 4096"

``--pool tcp`` or ``--pool nixl``: the KV lies in a ``cacheflow store serve`` process, behind links
as narrow as ``--links`` says, instead of a folder. All other options are the command's.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from cacheflow.cli import main
from cacheflow.testing.store_process import StoreProcess

_ARENA = "1GiB"


def pool_tier(stack: ExitStack, transport: str) -> str:
    """A store process that lasts as long as ``stack``; the tier over it, for ``--tier``."""
    if transport == "nixl":
        os.environ.setdefault("UCX_TLS", "all")  # without RDMA it is only used if asked for
    log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
    offered = json.dumps([transport])
    store = stack.enter_context(StoreProcess(log, arena=_ARENA, transports=offered))
    options = {"peers": [store.address], "transports": [transport]}
    return json.dumps({"backend": "pool", "options": options})


if __name__ == "__main__":
    arguments = sys.argv[1:]
    with ExitStack() as stack:
        if "--pool" in arguments:
            at = arguments.index("--pool")
            arguments[at : at + 2] = ["--tier", pool_tier(stack, arguments[at + 1])]
        sys.argv[1:] = ["bench", *arguments]
        main()
