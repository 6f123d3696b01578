"""What is opened, what is refused and why, and how a model is named."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cacheflow.errors import ConfigError
from cacheflow.kv import key_root
from cacheflow.plugins.transformers import TransformersEngine, device
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    Engines = Callable[..., AbstractAsyncContextManager[TransformersEngine]]

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
    "original_max_position_embeddings": 4096,
}
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("MistralConfig", {"sliding_window": 64}, r"sliding-window attention \(window 64\)"),
    ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 64}, "sliding"),
    ("Gemma2Config", {}, "sliding_attention"),
    ("Gemma3TextConfig", {}, "sliding_attention"),
    ("GptOssConfig", {}, "sliding_attention"),
    ("DeepseekV3Config", {}, "latent"),
    ("Qwen3NextConfig", {}, "linear_attention"),
    ("MambaConfig", {}, "attention"),
    ("JambaConfig", {}, "."),
    ("T5Config", {}, "encoder"),
    ("FalconConfig", {"alibi": True}, "ALiBi"),
    ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type dyn"),
    ("Phi3Config", {"rope_parameters": LONG_ROPE}, "rope type longrope"),
)


@pytest.mark.parametrize(("kind", "options", "feature"), REFUSED)
async def test_models_that_cannot_be_restored_exactly_are_refused(
    tmp_path: Path, kind: str, options: dict[str, Any], feature: str
) -> None:
    """Windows, recurrent or hybrid layers, MLA, encoders, ALiBi and rotary frequencies that change
    with length are refused by the config alone; the message names the feature."""
    getattr(transformers, kind)(**options).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=feature) as refused:
        await TransformersEngine.open_model(tmp_path, device="cpu")
    assert "cannot be restored exactly" in str(refused.value)


SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("GPT2Config", {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}, "it has no"),
        ("GraniteConfig", {**SMALL, "embedding_multiplier": 3.0}, "more than its layers"),
        ("CohereConfig", {**SMALL, "logit_scale": 0.1}, "more than its layers"),
    ],
)
async def test_models_that_a_walk_does_not_reproduce_are_refused(
    tmp_path: Path, kind: str, options: dict[str, Any], reason: str
) -> None:
    """A forward pass that does more than embed, layers, norm and head is noticed at open."""
    config = getattr(transformers, kind)(**options)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        await TransformersEngine.open_model(tmp_path, device="cpu", dtype="float32")


def test_foreign_kinds_of_attention_are_named() -> None:
    """Attention layers that ask for sinks, windows or capping get an error, not an answer."""
    from cacheflow.plugins.transformers.attention import Tile, attention_forward, current_reach

    states, module = torch.zeros(1, 2, 4, 8), torch.nn.Identity()
    with pytest.raises(RuntimeError, match="outside"):
        attention_forward(module, states, states, states, None)
    current_reach.reach = Tile([])
    try:
        for name, what in {"s_aux": "sinks", "sliding_window": "window", "softcap": "cap"}.items():
            extra: Any = {name: 4.0}
            with pytest.raises(RuntimeError, match=what):
                attention_forward(module, states, states, states, None, **extra)
    finally:
        current_reach.reach = None


async def test_unknown_and_broken_paths(
    tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    """No folder, no config, a broken config, no weights: a ConfigError that names the path."""
    bare = tmp_path / "bare"
    bare.mkdir()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    headless = tmp_path / "headless"
    headless.mkdir()
    shutil.copy(model_folder("llama") / "config.json", headless)
    for path in (tmp_path / "nowhere", bare, broken, headless):
        with pytest.raises(ConfigError, match=path.name):
            await TransformersEngine.open_model(path, device="cpu")
    with pytest.raises(ConfigError, match=r"'hub/name': no such folder, .*`hf download NAME"):
        await TransformersEngine.open_model("hub/name", device="cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "int8"),
        ({"chunk_tokens": 48}, "48"),
        ({"threads": 0}, "threads"),
        ({"threads": None}, "threads must be a whole number"),
        ({"kv_bytes": "1GiB"}, "kv_bytes must be a whole number"),
        ({"device": "abacus"}, "abacus"),
    ],
)
async def test_bad_options(
    model_folder: Callable[[str], Path], options: dict[str, Any], message: str
) -> None:
    """An option that cannot be is named before the model is loaded."""
    with pytest.raises(ConfigError, match=message):
        await TransformersEngine.open_model(model_folder("llama"), **({"device": "cpu"} | options))


async def test_identity_follows_what_decides_kv_values(
    engine_for: Engines, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Same model, same key root, wherever it lies; other weights, config, dtype or chunks give
    another one."""

    async def root(**options: Any) -> bytes:
        settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "chunk_tokens": 16}
        grid = TileGrid((64,), 64)
        engine = await TransformersEngine.open_model(**(settings | {"grid": grid} | options))
        await engine.aclose()
        return bytes(key_root(engine.identity, b""))

    source = model_folder("llama")
    same = await root(model=source)
    copied = tmp_path / "copied"
    shutil.copytree(source, copied)
    assert await root(model=copied) == same

    weights = tmp_path / "weights"
    shutil.copytree(source, weights)
    tensors = load_file(weights / "model.safetensors")
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, weights / "model.safetensors", metadata={"format": "pt"})

    config = tmp_path / "config"
    shutil.copytree(source, config)
    fields = json.loads((config / "config.json").read_text())
    fields["rope_parameters"]["rope_theta"] = 20000.0
    (config / "config.json").write_text(json.dumps(fields))

    others = [
        await root(model=weights),
        await root(model=config),
        await root(model=source, dtype="bfloat16"),
        await root(model=source, chunk_tokens=32),
    ]
    assert len({same, *others}) == 5


async def test_grid_id_names_what_decides_bits(engine_for: Engines) -> None:
    """Grid, torch, device with its instruction set, attention and threads are in the grid id."""
    async with engine_for() as engine:
        parts = dict(part.split("=", 1) for part in engine.grid_id.split(";"))
    assert parts["grid"] == "32+32+64+64*"
    assert parts["torch"] == torch.__version__
    assert parts["dev"] == f"cpu/{torch.backends.cpu.get_cpu_capability()}"
    assert parts["threads"] == "1"


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [({"avx2"}, "float32"), ({"avx512f"}, "float32"), ({"avx512_bf16"}, "bfloat16")],
)
def test_auto_dtype(monkeypatch: pytest.MonkeyPatch, flags: set[str], dtype: str) -> None:
    """bfloat16 is chosen on a CPU only where it is fast."""
    monkeypatch.setattr(device, "cpu_flags", lambda: flags)
    assert device.fast_dtype(torch.device("cpu")) == dtype
    assert device.fast_dtype(torch.device("cuda")) == "bfloat16"


async def test_sizes(engine_for: Engines) -> None:
    """Layout, context length and FLOPs come from the config and the weights."""
    async with engine_for("qwen3", dtype="bfloat16") as engine:
        layout = engine.layout
        assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (3, 2, 32)
        assert (layout.dtype, layout.chunk_tokens, engine.max_tokens) == ("bfloat16", 16, 512)
        linear = 64 * (4 + 2 + 2) * 32 + 4 * 32 * 64 + 3 * 64 * 96
        assert engine.layer_flops == (2.0 * linear, 4.0 * 4 * 32)
