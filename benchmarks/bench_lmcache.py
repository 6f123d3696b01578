"""LMCache 0.5.6 beside CacheFlow: the same vLLM, prompts and disk; seconds to the first token.

Each of the two stores some prompts in a folder, and is stopped. Started again, it answers them from
the disk (nothing is left in the page cache), and once more from memory. Started a third time, its
processes may read from that disk at a *balanced* bandwidth only, at which loading a prompt takes as
long as computing it took. LMCache runs as on a CPU it can: its server in a process of its own, with
a memory tier over a folder. CacheFlow has the same: a memory tier over a folder.

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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from limited_folder import forget, limited_reads, why_not
from vllm_engine import BLOCK, VOCABULARY, Engine, arguments, quick_llama

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
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=4096, help="of a stored prompt")
    parser.add_argument("--prompts", type=int, default=9)
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.prompts = 1024, 3
    chance = random.Random(2)
    length = options.tokens // BLOCK * BLOCK + SUFFIX
    prompts = [chance.choices(range(VOCABULARY), k=length) for _ in range(options.prompts)]
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        options.model = options.model or quick_llama(Path(folder) / "model")
        reason = why_not(Path(folder))
        bandwidth = None
        for name, peer in (("LMCache", lmcache), ("CacheFlow", cacheflow)):
            measured = Measured(peer, Path(folder) / name, prompts, options)
            rows[name] = measured.disk()
            print(f"{name}: {rows[name]}", file=sys.stderr)  # it takes minutes to get here
            if not reason:
                # The same link for both: what the first of them needs for its balance.
                bandwidth = bandwidth or measured.balance(rows[name]["cold_s"])
                rows[name] |= measured.link(bandwidth)
                print(f"{name}: {rows[name]}", file=sys.stderr)
    if options.json:
        print(json.dumps({"bandwidth": bandwidth, **rows}, indent=2))
        return
    show(rows, bandwidth, reason)


def show(rows: dict[str, dict[str, Any]], bandwidth: float | None, reason: str) -> None:
    """The table, and who is ahead."""
    columns = {"cold_s": "computed", "disk_s": "from disk", "memory_s": "in memory"}
    if bandwidth is not None:
        columns["link_s"] = "balanced"
    print(" " * 12 + "".join(f"{title:>12}" for title in columns.values()) + f"{'cached':>10}")
    for name, row in rows.items():
        cells = "".join(f"{row[key]:12.3f}" for key in columns)
        print(f"{name:12}{cells}{row['cached']:10d}")
    print(f"balanced: {bandwidth / 1e6:.1f} MB/s" if bandwidth else f"balanced: not run, {reason}")
    ours, theirs = rows["CacheFlow"], rows["LMCache"]
    for key in [key for key in ("disk_s", "link_s") if key in columns]:
        ratio = ours[key] / theirs[key]
        print(f"CacheFlow {columns[key]}: {ratio:.2f} of LMCache: {'yes' if ratio <= 1 else 'NO'}")


@dataclass(frozen=True)
class Measured:
    """One of the two, its folder, and the prompts it is asked; figures are medians over these."""

    peer: Any
    folder: Path
    prompts: list[list[int]]
    options: argparse.Namespace

    def disk(self) -> dict[str, Any]:
        """Each prompt asked once cold, once after a restart, and once more."""
        self.folder.mkdir()
        with self._engine() as engine:
            cold = [engine.first_token(prompt, "adaptive") for prompt in self.prompts]
            _wait_until_quiet(self.folder / "store")
        disk, cached, memory = self._ask(again=True)
        return {
            "cold_s": round(statistics.median(cold), 4),
            "disk_s": round(statistics.median(disk), 4),
            "memory_s": round(statistics.median(memory), 4),
            "cached": min(cached),
        }

    def balance(self, seconds: float) -> float:
        """Bytes a second at which a stored prompt takes ``seconds`` to read."""
        files = [path for path in (self.folder / "store").rglob("*") if path.is_file()]
        return sum(path.stat().st_size for path in files) / len(self.prompts) / seconds

    def link(self, bandwidth: float) -> dict[str, Any]:
        """Each prompt asked once more after another restart, with reads limited."""
        with limited_reads(self.folder, bandwidth):
            link, _, _ = self._ask(again=False)
        return {"link_s": round(statistics.median(link), 4)}

    def _ask(self, *, again: bool) -> tuple[list[float], list[int], list[float]]:
        with self._engine() as engine:
            engine.first_token(self.prompts[0][:40], "adaptive")  # the first of all takes longer
            forget(self.folder / "store")
            seconds, cached = [], []
            for prompt in self.prompts:
                seconds.append(engine.first_token(prompt, "adaptive"))
                cached.append(engine.last_cached)
            twice = self.prompts if again else ()
            return seconds, cached, [engine.first_token(prompt, "adaptive") for prompt in twice]

    def _engine(self) -> Any:
        longest = len(self.prompts[0]) + BLOCK
        engine_options = {
            "dtype": self.options.dtype,
            "max_model_len": longest,
            "max_num_batched_tokens": longest,
            "max_num_seqs": 4,
        }
        return self.peer(self.folder, self.options.model, engine_options)


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
