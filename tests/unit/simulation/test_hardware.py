"""Modelled GPUs: the published curve, the published dimensions, and clear errors."""

from __future__ import annotations

import pytest

from cacheflow.errors import ConfigError
from cacheflow.simulation.hardware import Machine
from cacheflow.simulation.presets import DEVICES, LINKS, MODELS, load_link, load_machine
from cacheflow.types import Tile


@pytest.mark.parametrize(
    ("device", "first", "last"), [("a100", 38.8e-3, 112e-3), ("h100", 27.4e-3, 93.5e-3)]
)
def test_the_published_curve_of_cake_is_reproduced(device: str, first: float, last: float) -> None:
    """LongAlpaca-7B, chunks of 512 tokens (arXiv 2410.03065, figure 4): the first and the 64th
    within 3 %, those between on the line through both within 3 % of the last."""
    machine = load_machine(f"{device}:longalpaca-7b", layers_per_block=1)

    def seconds(chunk: int) -> float:
        tile = Tile(chunk, chunk * 512, (chunk + 1) * 512)
        return machine.block_seconds(tile) * machine.layer_blocks

    assert seconds(0) == pytest.approx(first, rel=0.03)
    assert seconds(63) == pytest.approx(last, rel=0.03)
    for chunk in range(64):
        line = first + (last - first) * chunk / 63
        assert seconds(chunk) == pytest.approx(line, abs=0.03 * last)


@pytest.mark.parametrize(("device", "rate"), [("h100", 30.8e3), ("l40s", 11.3e3)])
def test_wide_tiles_reach_half_of_the_datasheet_peak(device: str, rate: float) -> None:
    """Llama-3.1-8B, a tile of 2,048 tokens at the start: the usual rule for prefill, within 5 %."""
    machine = load_machine(f"{device}:llama-3.1-8b")
    seconds = machine.block_seconds(Tile(0, 0, 2048)) * machine.layer_blocks
    assert 2048 / seconds == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize(
    ("model", "nbytes"),
    [
        ("llama-3.1-8b", 131072),
        ("qwen3-8b", 147456),
        ("qwen3-30b-a3b", 98304),
        ("llama-3.1-70b", 327680),
        ("longalpaca-7b", 524288),
    ],
)
def test_kv_bytes_a_token(model: str, nbytes: int) -> None:
    """Follow from the published dimensions, and cells divide them without a rest."""
    machine = Machine(DEVICES["h100"], MODELS[model])
    assert machine.model.token_bytes == nbytes
    assert machine.block_bytes(512) * machine.layer_blocks == nbytes * 512


def test_wider_tiles_waste_less_and_later_ones_cost_more() -> None:
    """Seconds a token fall with the width and rise with the position, linearly."""
    machine = load_machine("h100:qwen3-8b")
    per_token = [machine.block_seconds(Tile(0, 0, w)) / w for w in (128, 256, 512, 1024, 2048)]
    assert per_token == sorted(per_token, reverse=True)
    at = [machine.block_seconds(Tile(0, s, s + 512)) for s in (0, 8192, 16384)]
    assert at[2] - at[1] == pytest.approx(at[1] - at[0])
    assert at[1] > at[0]


def test_tensor_parallel_gpus_share_the_arithmetic_only() -> None:
    """Four GPUs: a quarter of the work, the same launches."""
    one, four = load_machine("h100:llama-3.1-70b"), load_machine("h100x4:llama-3.1-70b")
    tile = Tile(0, 0, 2048)
    launches = 4 * one.device.launch_seconds
    expected = (one.block_seconds(tile) - launches) / 4 + launches
    assert four.block_seconds(tile) == pytest.approx(expected)
    assert four.name == "h100x4:llama-3.1-70b"


def test_a_machine_can_drift() -> None:
    """`drifting` scales the same costs by a function of time."""
    machine, tile = load_machine("a100:qwen3-8b"), Tile(0, 0, 512)
    cost = machine.drifting(lambda now: 2.0 if now > 1 else 1.0)
    assert cost(tile, 2.0) == 2 * cost(tile, 0.0) == 2 * machine.block_seconds(tile)


def test_every_preset_says_where_its_numbers_come_from() -> None:
    """No number without a source."""
    sources = [device.source for device in DEVICES.values()]
    sources += [model.source for model in MODELS.values()]
    sources += [link.source for link in LINKS.values()]
    assert all(sources)


@pytest.mark.parametrize(
    ("text", "bandwidth"),
    [("10gbps", 1.25e9), ("25Gbps", 3.125e9), ("100gbps", 12.5e9), ("1.5gb/s", 1.5e9)],
)
def test_links_by_rate(text: str, bandwidth: float) -> None:
    """Line rates in bits, or rates in bytes."""
    assert load_link(text).bandwidth == bandwidth
    assert load_link(" DRAM ").bandwidth == LINKS["dram"].bandwidth


@pytest.mark.parametrize("text", ["", "fast", "10", "0gbps", "-1gbps", "10gbps/s"])
def test_unknown_links_are_named(text: str) -> None:
    """The error repeats what was given and lists what there is."""
    with pytest.raises(ConfigError, match=r"--link .*25gbps.*nvme"):
        load_link(text)


@pytest.mark.parametrize("text", ["", "h100", "h100:gpt-2", "tpu:qwen3-8b", "h100x:qwen3-8b"])
def test_unknown_machines_are_named(text: str) -> None:
    """The error repeats what was given and lists GPUs and models."""
    with pytest.raises(ConfigError, match=r"--preset .*h100.*llama-3.1-8b"):
        load_machine(text)


def test_layers_must_divide_into_blocks() -> None:
    """36 layers are not a multiple of 8: the error says so."""
    with pytest.raises(ConfigError, match="36 layers"):
        load_machine("h100:qwen3-8b", layers_per_block=8)
    with pytest.raises(ConfigError, match="0 GPUs"):
        load_machine("h100x0:qwen3-8b")
