"""A system without what only Linux has, such as macOS: what is embedded in an agent works there.

The names are taken away in a process of its own, before anything of ours is imported.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_ELSEWHERE = """
import asyncio, fcntl, mmap, os, signal, sys

for module, names in {
    os: "sched_getaffinity sched_setaffinity O_DIRECT O_TMPFILE O_PATH posix_fadvise fdatasync "
        "posix_fallocate memfd_create eventfd pidfd_open copy_file_range splice setns",
    mmap: "MADV_HUGEPAGE MAP_POPULATE MAP_HUGETLB",
    fcntl: "F_OFD_SETLK F_OFD_SETLKW F_OFD_GETLK F_ADD_SEALS",
    signal: "SIGRTMIN SIGRTMAX",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

from cacheflow import CacheFlow, CacheFlowError, Generation, Settings
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.types import TileGrid

async def main(model, folder):
    engine = await TransformersEngine.open_model(
        model, dtype="float32", grid=TileGrid((32, 32, 64), 128), chunk_tokens=16
    )
    settings = {"staging_bytes": 1 << 23, "cache_dir": folder}
    tier = {"name": "memory", "backend": "dram", "options": {"capacity_bytes": 1 << 24}}
    prompt = [7 * i % 320 for i in range(400)]
    async with CacheFlow.open(Settings(tiers=[tier], **settings), engine=engine) as flow:
        answers = []
        for policy in ("recompute", "load"):
            session, report = flow.session(policy), Generation()
            stream = session.generate(prompt, max_new_tokens=4, policy=policy, report=report)
            answers.append([token async for token in stream])
            assert await flow.flush(30)
            await session.forget()
        assert answers[0] == answers[1]
        assert report.restoration.loaded_cells
    disk = {"name": "disk", "backend": "nvme", "options": {"path": folder + "/kv"}}
    try:
        async with CacheFlow.open(Settings(tiers=[disk], **settings), engine=engine):
            pass
    except CacheFlowError as error:
        print("refused:", error)
    await engine.aclose()

asyncio.run(main(*sys.argv[1:]))
"""


def test_an_embedded_flow_runs_without_linux(model_folder: Path, tmp_path: Path) -> None:
    """It imports, generates, saves and restores from memory; the nvme tier says what it lacks."""
    command = [sys.executable, "-c", _ELSEWHERE, str(model_folder), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "refused:" in done.stdout
    assert "has no locks of open files" in done.stdout
    assert "use another tier" in done.stdout
