"""What ``cacheflow doctor`` looks at, each as one check with a finding and a fix.

A check never raises: what goes wrong is its finding. Nothing here changes the machine; the only
file it writes is a scratch file that is removed again.
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from cacheflow.cli.output import human_bytes
from cacheflow.cli.rates import copy_rate, disk_rates, hash_rate, supports_direct
from cacheflow.cores import usable_cores
from cacheflow.errors import CacheFlowError, ConfigError
from cacheflow.registry import (
    BACKEND_GROUP,
    ENGINE_GROUP,
    SERVER_GROUP,
    TRANSPORT_GROUP,
    available,
    load_backend,
    load_engine,
    load_server,
    load_transport,
)
from cacheflow.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cacheflow.pool import TransportKind
    from cacheflow.settings import TierSettings
    from cacheflow.types import StorePart

__all__ = ["Check", "Verdict", "checks"]

_FAST_BF16: Final = ("amx_bf16", "avx512_bf16", "bf16")
"""Flags in /proc/cpuinfo of processors whose bf16 matrix products are not emulated."""
_FREE_BYTES: Final = 1 << 30


class Verdict(StrEnum):
    """How a check came out."""

    OK = "ok"
    NOTE = "note"
    """Works, but something better is to be had, or something optional is missing."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ``fix`` says what to do, empty when nothing is to be done."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Measured values in base units (bytes, seconds)."""


def checks(folder: Path) -> list[tuple[str, Callable[[], list[Check]]]]:
    """What to run, in order: a title for the progress bar, and the check."""
    return [
        ("Python", _python),
        ("torch", _torch),
        ("CPU", _cpu),
        ("event loop", _loop),
        ("storage backends", lambda: _registered(BACKEND_GROUP, "backend", load_backend)),
        ("transports", _transports),
        ("engines", lambda: _registered(ENGINE_GROUP, "engine", load_engine)),
        ("servers", lambda: _registered(SERVER_GROUP, "server", load_server)),
        ("pools", _pools),
        ("memory", _memory),
        (f"disk at {folder}", lambda: _disk(folder)),
    ]


def _python() -> list[Check]:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        fix = "the nvme tier needs Linux (file locks of open files, O_DIRECT); all else is untested"
        return [Check("python", Verdict.NOTE, found, fix)]
    return [Check("python", Verdict.OK, found)]


def _torch() -> list[Check]:
    try:
        import torch
    except ImportError as error:
        fix = "pip install torch==2.13.0"
        return [Check("torch", Verdict.FAIL, f"cannot be imported: {error}", fix)]
    found = Check("torch", Verdict.OK, f"{torch.__version__}, {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        why = "this torch is a CPU build" if torch.version.cuda is None else "no usable CUDA device"
        fix = "nothing on a CPU host; on a GPU host install a CUDA build of torch and its driver"
        return [found, Check("cuda", Verdict.NOTE, why, fix)]
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [found, Check("cuda", Verdict.OK, f"{torch.version.cuda}: {', '.join(names)}")]


def _cpu() -> list[Check]:
    flags = _cpu_flags()
    cores = usable_cores()
    fast = [flag for flag in _FAST_BF16 if flag in flags]
    if fast:
        return [Check("cpu", Verdict.OK, f"{cores} cores, fast bf16 ({', '.join(fast)})")]
    fix = "on this processor use float32 for computing: bf16 is emulated and several times slower"
    return [Check("cpu", Verdict.NOTE, f"{cores} cores, no fast bf16", fix)]


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # no procfs here: nothing is known, so nothing is promised
        return set()
    for line in lines:
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()


def _loop() -> list[Check]:
    try:
        return [Check("uvloop", Verdict.OK, version("uvloop"))]
    except PackageNotFoundError:
        return [Check("uvloop", Verdict.FAIL, "not installed", "pip install uvloop")]


def _registered(group: str, kind: str, load: Callable[[str], object]) -> list[Check]:
    names = sorted(available(group))
    if not names:
        fix = "reinstall cacheflow-kv: its entry points are missing"
        return [Check(kind, Verdict.FAIL, "none is registered", fix)]
    found = []
    for name in names:
        try:
            load(name)
        except (ConfigError, AttributeError) as error:  # AttributeError: a stale entry point
            found.append(Check(f"{kind} {name}", Verdict.NOTE, "cannot be loaded", str(error)))
        else:
            found.append(Check(f"{kind} {name}", Verdict.OK, "loads"))
    return found


def _transports() -> list[Check]:
    """How a memory pool can be reached. Each is really opened: being installed is not enough."""
    found = []
    for name in sorted(available(TRANSPORT_GROUP)):
        try:
            asyncio.run(_open_and_close(name))
        except (ConfigError, AttributeError) as error:  # AttributeError: a stale entry point
            found.append(Check(f"transport {name}", Verdict.NOTE, "not usable", str(error)))
        else:
            found.append(Check(f"transport {name}", Verdict.OK, "works"))
    return found


async def _open_and_close(name: str) -> None:
    kind = cast("TransportKind", load_transport(name))
    transport = await kind.open_transport(None)
    await transport.aclose()


def _pools() -> list[Check]:
    """The stores of each pool among the tiers of the settings (``CACHEFLOW_TIERS``)."""
    try:
        tiers = [tier for tier in Settings().tiers if tier.backend == "pool"]
    except ConfigError as error:
        return [Check("settings", Verdict.FAIL, "cannot be used", str(error))]
    return [check for tier in tiers for check in asyncio.run(_pool(tier))]


async def _pool(tier: TierSettings) -> list[Check]:
    try:
        kind = await asyncio.to_thread(load_backend, tier.backend)
        pool = await kind.open(tier.options)
    except CacheFlowError as error:
        return [Check(f"tier {tier.name}", Verdict.FAIL, "cannot be opened", str(error))]
    try:
        parts = pool.parts()
    finally:
        await pool.aclose()
    if not parts:
        fix = "start stores (`cacheflow store serve`), or check where they are looked for"
        return [Check(f"tier {tier.name}", Verdict.NOTE, "no store is known", fix)]
    return [_part(tier, part) for part in parts]


def _part(tier: TierSettings, part: StorePart) -> Check:
    name = f"tier {tier.name}: {part.name}"
    if part.is_up:
        return Check(name, Verdict.OK, f"up, bytes travel by {part.transport}")
    fix = (
        "is the store running, can both of its ports be reached from here, and is the tier's "
        "option tls true exactly where the store has a tls_cert?"
    )
    found = "cannot be reached: its keys are misses"
    return Check(name, Verdict.NOTE, f"{found} ({part.reason})" if part.reason else found, fix)


def _memory() -> list[Check]:
    copy, digest = copy_rate(), hash_rate()
    return [
        Check("memory copy", Verdict.OK, _speed(copy), figures={"bytes_per_second": copy}),
        Check("xxh3", Verdict.OK, _speed(digest), figures={"bytes_per_second": digest}),
    ]


def _disk(folder: Path) -> list[Check]:
    name = f"disk {folder}"
    if not folder.is_dir():
        return [Check(name, Verdict.FAIL, "no such folder", f"mkdir -p {folder}")]
    try:
        free = _free_bytes(folder)
        room = Verdict.OK if free >= _FREE_BYTES else Verdict.NOTE
        fix = "" if room is Verdict.OK else "free some space: less than 1 GiB is left"
        space = Check(f"{name} free", room, human_bytes(free), fix, {"bytes": free})
        direct = supports_direct(folder)
        rates = disk_rates(folder, direct=direct, nbytes=min(128 << 20, int(free) // 2))
    except OSError as error:
        fix = "make it writable for this user, or name another folder with --folder"
        return [Check(name, Verdict.FAIL, f"cannot be written: {error.strerror}", fix)]
    return [_direct(name, direct), space, *_rates(name, rates.read, rates.write)]


def _direct(name: str, direct: bool) -> Check:
    if direct:
        return Check(f"{name} O_DIRECT", Verdict.OK, "works")
    fix = "use a folder on ext4 or xfs: without O_DIRECT reads go through the page cache"
    return Check(f"{name} O_DIRECT", Verdict.NOTE, "refused by the file system", fix)


def _rates(name: str, read: float, write: float) -> list[Check]:
    return [
        Check(f"{name} read", Verdict.OK, _speed(read), figures={"bytes_per_second": read}),
        Check(f"{name} write", Verdict.OK, _speed(write), figures={"bytes_per_second": write}),
    ]


def _free_bytes(folder: Path) -> float:
    usage = os.statvfs(folder)
    return float(usage.f_bavail * usage.f_frsize)


def _speed(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"
