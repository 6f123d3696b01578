"""LMCache 0.5.6 beside CacheFlow: the same vLLM, prompts and disk; seconds to the first token.

Each of the two stores some prompts in a folder, and is stopped. Started again, it answers them from
the disk, and once more from memory. LMCache runs as on a CPU it can: its server in a process of its
own, with a memory tier over a folder. CacheFlow has the same: a memory tier over a folder.

    make bench-lmcache                           # 4,096 tokens, nine prompts
    make bench-lmcache ARGS=--quick
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm_engine import BLOCK, Engine, arguments, smollm2

if TYPE_CHECKING:
    from collections.abc import Iterator

SUFFIX: Final = 64
QUIET_SECONDS: Final = 3.0
"""Without a new byte in the folder: then everything is stored."""
START_SECONDS: Final = 600.0


def main() -> None:
    """Measure both and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments(parser)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=4096, help="of a stored prompt")
    parser.add_argument("--prompts", type=int, default=9)
    options = parser.parse_args()
    options.model = options.model or smollm2()
    if options.quick:
        options.tokens, options.prompts = 1024, 3
    chance = random.Random(2)
    length = options.tokens // BLOCK * BLOCK + SUFFIX
    prompts = [chance.choices(range(1000, 40000), k=length) for _ in range(options.prompts)]
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, peer in (("LMCache", lmcache), ("CacheFlow", cacheflow)):
            rows[name] = measure(peer, Path(folder) / name, prompts, options)
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'':12}{'computed':>12}{'from disk':>12}{'in memory':>12}{'cached':>10}")
    for name, row in rows.items():
        cells = "".join(f"{row[key]:12.3f}" for key in ("cold_s", "disk_s", "memory_s"))
        print(f"{name:12}{cells}{row['cached']:10d}")
    ratio = rows["CacheFlow"]["disk_s"] / rows["LMCache"]["disk_s"]
    print(f"CacheFlow from disk: {ratio:.2f} of LMCache: {'yes' if ratio <= 1.0 else 'NO'}")


def measure(
    peer: Any, folder: Path, prompts: list[list[int]], options: argparse.Namespace
) -> dict[str, Any]:
    """Medians over the prompts, each asked once cold, once after a restart, and once more."""
    folder.mkdir()
    engine_options = {
        "dtype": options.dtype,
        "max_model_len": len(prompts[0]) + BLOCK,
        "max_num_batched_tokens": len(prompts[0]) + BLOCK,
        "max_num_seqs": 4,
    }
    with peer(folder, options.model, engine_options) as engine:
        cold = [engine.first_token(prompt, "adaptive") for prompt in prompts]
        _wait_until_quiet(folder / "store")
    with peer(folder, options.model, engine_options) as engine:
        engine.first_token(prompts[0][:40], "adaptive")  # the first step of all takes longer
        disk, cached = [], []
        for prompt in prompts:
            disk.append(engine.first_token(prompt, "adaptive"))
            cached.append(engine.last_cached)
        memory = [engine.first_token(prompt, "adaptive") for prompt in prompts]
    return {
        "cold_s": round(statistics.median(cold), 4),
        "disk_s": round(statistics.median(disk), 4),
        "memory_s": round(statistics.median(memory), 4),
        "cached": min(cached),
    }


@contextmanager
def cacheflow(folder: Path, model: str, options: dict[str, Any]) -> Iterator[Engine]:
    """vLLM with CacheFlow over memory and a folder."""
    disk = {"name": "disk", "backend": "nvme", "options": {"path": str(folder / "store")}}
    memory = {"name": "memory", "backend": "dram", "options": {"capacity_bytes": 1 << 30}}
    extra = {"tiers": [memory, disk], "lookup_patience": 5.0}
    with Engine.start(folder, model, extra=extra, **options) as engine:
        yield engine


@contextmanager
def lmcache(folder: Path, model: str, options: dict[str, Any]) -> Iterator[Engine]:
    """vLLM with LMCache's connector, and LMCache's server over memory and a folder."""
    (folder / "store").mkdir(exist_ok=True)
    port, http = _free_port(), _free_port()
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://localhost",
            "lmcache.mp.port": port,
        },
    }
    with (
        _server(folder, port, http),
        Engine.start(
            folder, model, with_cacheflow=False, kv_transfer_config=connector, **options
        ) as engine,
    ):
        yield engine


@contextmanager
def _server(folder: Path, port: int, http: int) -> Iterator[None]:
    command = [
        *(str(Path(sys.executable).parent / "lmcache"), "server", "--host", "localhost"),
        *("--port", str(port), "--http-port", str(http), "--l1-size-gb", "1"),
        *("--eviction-policy", "LRU", "--disable-metrics"),
        *("--supported-transfer-mode", "engine_driven"),
        *("--l2-adapter", json.dumps({"type": "fs", "base_path": str(folder / "store")})),
    ]
    log = folder / "server.log"
    with log.open("a") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            _wait_for(http, process, log)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with socket.create_connection(("localhost", port), 1.0):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"LMCache's server does not start:\n{log.read_text()[-3000:]}")


def _wait_until_quiet(store: Path) -> None:
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < QUIET_SECONDS or not seen:
        nbytes = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
        if nbytes != seen:
            seen, since = nbytes, time.monotonic()
        if not nbytes and time.monotonic() - since > 60:
            raise SystemExit(f"nothing was stored in {store}")
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    main()
