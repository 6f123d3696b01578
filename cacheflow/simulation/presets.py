"""Named GPUs, models and links, each with where its numbers come from.

Nothing here was measured by this project: GPUs follow datasheet peaks and one published curve,
models follow their public configurations, links their line rates.

**The published curve.** Cake (arXiv 2410.03065), figure 4: LongAlpaca-7B, chunks of 512 tokens; the
first takes 38.8 ms on an A100 and 27.4 ms on an H100, the 64th 112 and 93.5 ms. First chunk and
slope give the rates of linear work and of attention at a width of 512. How a rate grows with the
width is not in that figure: the H100's limit is set so that a tile of 2,048 tokens of Llama-3.1-8B
runs at the 30.8k tokens/s that half of the datasheet peak would give (counting all parameters), a
common rule for prefill; attention at any width saturates towards half of the peak.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from cacheflow.errors import ConfigError
from cacheflow.simulation.hardware import Device, Machine, ModelShape

__all__ = ["DEVICES", "LINKS", "MODELS", "LinkPreset", "load_link", "load_machine"]

DEVICES: Final = {
    device.name: device
    for device in (
        Device(
            "h100",
            peak=989e12,
            linear_limit=0.577,
            linear_half_width=457.0,
            attention_half_width=1420.0,
            source="peak: H100 SXM datasheet; width 512: Cake figure 4; width 2,048: half of peak",
        ),
        Device(
            "a100",
            peak=312e12,
            linear_limit=0.70,
            linear_half_width=50.0,
            attention_half_width=163.0,
            source="peak: A100 SXM datasheet; width 512: Cake figure 4; limit 0.70 assumed",
        ),
        Device(
            "l40s",
            peak=362e12,
            linear_limit=0.484,
            linear_half_width=167.0,
            attention_half_width=190.0,
            source="peak: L40S datasheet; width 2,048: half of peak; widths scaled from h100, a100",
        ),
    )
}

MODELS: Final = {
    model.name: model
    for model in (
        ModelShape("llama-3.1-8b", 32, 32, 8, 128, 218.1e6, "its config.json"),
        ModelShape("qwen3-8b", 36, 32, 8, 128, 192.9e6, "its config.json"),
        ModelShape(
            "qwen3-30b-a3b",
            48,
            32,
            4,
            128,
            56.9e6,
            "its config.json, active weights; tiles thinned by 128 experts / 8 per token (assumed)",
            narrow=16.0,
        ),
        ModelShape("llama-3.1-70b", 80, 64, 8, 128, 855.6e6, "its config.json"),
        ModelShape("longalpaca-7b", 32, 32, 32, 128, 202.4e6, "Llama-2-7B's config.json"),
    )
}


@dataclass(frozen=True, slots=True)
class LinkPreset:
    """A channel: ``bandwidth`` in bytes a second, ``latency`` in seconds.

    ``duplex``: stores have as much again in the other direction, as on a network port or PCIe.
    Otherwise stores and loads share the bandwidth, as on a flash drive, whose chips do one thing at
    a time (and write slower than they read, which is not modelled), or under a cap on the bytes of
    a volume, whichever way they go.
    """

    name: str
    bandwidth: float
    latency: float
    source: str
    duplex: bool = True


LINKS: Final = {
    link.name: link
    for link in (
        LinkPreset(
            "nvme",
            7.0e9,
            100e-6,
            "sequential reads of a PCIe 4.0 x4 SSD, by datasheets",
            duplex=False,
        ),
        LinkPreset("pcie4", 25e9, 20e-6, "pinned host memory over PCIe 4.0 x16, about 80 % of 32"),
        LinkPreset("pcie5", 50e9, 20e-6, "pinned host memory over PCIe 5.0 x16, about 80 % of 64"),
    )
}
LINKS["dram"] = LinkPreset("dram", LINKS["pcie5"].bandwidth, 20e-6, LINKS["pcie5"].source)

_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)(gbps|mbps|gb/s|mb/s)(-shared)?")
_UNITS: Final = {"gbps": 1e9 / 8, "mbps": 1e6 / 8, "gb/s": 1e9, "mb/s": 1e6}
_NETWORK_LATENCY: Final = 50e-6


def load_link(text: str, option: str = "--link") -> LinkPreset:
    """A preset by name, or a line rate: ``25gbps``, ``0.8gbps``, ``1.5gb/s``, each way;
    ``1.5gb/s-shared``: for loads and stores together. ``option``: who asks.

    Raises:
        ConfigError: neither.
    """
    name = text.strip().lower()
    if name in LINKS:
        return LINKS[name]
    rate = _RATE.fullmatch(name)
    if rate is None or not float(rate[1]):
        raise ConfigError(
            f"{option} {text!r} is neither a rate like 10gbps, 25gbps, 40gbps, 80gbps, 100gbps or "
            f"1.5gb/s (or 1.5gb/s-shared) nor one of {', '.join(LINKS)}"
        )
    bandwidth, duplex = float(rate[1]) * _UNITS[rate[2]], rate[3] is None
    return LinkPreset(name, bandwidth, _NETWORK_LATENCY, "line rate", duplex)


def load_machine(text: str, *, layers_per_block: int = 4) -> Machine:
    """``gpu:model``, or ``gpux4:model`` for four tensor-parallel GPUs.

    Raises:
        ConfigError: no such GPU or model, or its layers do not divide into such blocks.
    """
    device, colon, model = text.strip().lower().partition(":")
    parts = re.fullmatch(r"(\w+?)(?:x(\d+))?", device)
    name = parts[1] if parts else device
    if not colon or name not in DEVICES or model not in MODELS:
        raise ConfigError(
            f"--preset {text!r} is not GPU:MODEL with a GPU of {', '.join(DEVICES)} (h100x4 for "
            f"four) and a model of {', '.join(MODELS)}"
        )
    gpus = int(parts[2]) if parts and parts[2] else 1
    return Machine(DEVICES[name], MODELS[model], layers_per_block=layers_per_block, gpus=gpus)
