"""What runs on a GPU and need not: the benchmark, on whatever device is here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import bench_gpu
import pytest
import rigs
import torch

from cacheflow.testing.tiny_model import save_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.allow_blocking  # files and prints are the benchmark's own
async def test_the_benchmark_restores_from_every_medium(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory, memory behind a link, and a disk: each restored all ways, and told as a table."""
    folder = save_tiny_llama(tmp_path / "tiny")
    options = bench_gpu.parsed(
        [
            *("--device", DEVICE, "--quick", "--models", str(folder), "--store", str(tmp_path)),
            *("--lengths", "512", "--links", "raw,1:1", "--most-stages", "1"),
        ]
    )
    found = await bench_gpu.measure(options)
    where = [(row["medium"], row["compute_io"]) for row in found["rows"]]
    assert where == [("pinned memory", "raw"), ("pinned memory", "1:1"), ("disk", "raw")]
    for row in found["rows"]:
        assert row["tokens"] == 512
        assert 0.0 <= row["recomputed_share"] <= 1.0
        assert min(row["recompute_s"], row["load_s"], row["adaptive_s"], row["fluid_s"]) > 0.0
    bench_gpu.tell(found)
    assert f"| {folder} | disk | 512 | raw |" in capsys.readouterr().out


def test_a_random_model_of_a_shape_is_made_once(tmp_path: Path) -> None:
    """Weights in bfloat16 of the sizes asked for; what is there is not made again."""
    shape = {**rigs.QUICK_MODEL, "num_hidden_layers": 1, "hidden_size": 64}
    folder = bench_gpu.save_random(tmp_path / "model", shape, torch.device(DEVICE))
    made = (folder / "model.safetensors").stat()
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert weights["model.embed_tokens.weight"].shape == (512, 64)
    assert torch.get_default_dtype() is torch.float32
    bench_gpu.save_random(folder, shape, torch.device(DEVICE))
    assert (folder / "model.safetensors").stat().st_mtime_ns == made.st_mtime_ns


def test_without_a_device_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CUDA device and none asked for by name: an error with the way out."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--device cpu --quick"):
        bench_gpu.device_of(bench_gpu.parsed([]))
