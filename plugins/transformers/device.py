"""Which device to compute on, its name where bits matter, and the dtype that it is fast at."""

from __future__ import annotations

from pathlib import Path

import torch

from cacheflow.errors import ConfigError

__all__ = ["device_kind", "fast_dtype", "pick_device"]


def pick_device(name: str) -> torch.device:
    """``auto`` is the first CUDA device, else the CPU.

    Raises:
        ConfigError: it is neither a CPU nor a CUDA device that is there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not served: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r}: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def device_kind(device: torch.device) -> str:
    """The device as far as it decides bits: the GPU's name, or the CPU's instruction set."""
    if device.type == "cuda":
        return f"cuda/{torch.cuda.get_device_name(device)}"
    return f"{device.type}/{torch.backends.cpu.get_cpu_capability()}"


def fast_dtype(device: torch.device) -> str:
    """bfloat16 where the hardware multiplies it natively; elsewhere it is several times slower."""
    if device.type != "cpu":
        return "bfloat16"
    return "bfloat16" if cpu_flags() & {"amx_bf16", "avx512_bf16", "bf16"} else "float32"


def cpu_flags() -> set[str]:
    """Feature names of the first CPU; empty where the kernel does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set()
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    return set(next(lines, "").partition(":")[2].split())
