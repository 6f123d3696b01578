"""A real trained model through the engine: sensible answers, exact KV on the real grid."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
import torch

from cacheflow.errors import ConfigError
from cacheflow.plugins.transformers import TransformersEngine, prepare_smollm2
from cacheflow.types import Claim, ComputeBatch, Span, StagedPart, TileWork

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.timeout(300)  # the first run fetches and converts the model


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return prepare_smollm2()
    except ConfigError as error:
        pytest.skip(f"the demo model cannot be had: {error}")


@pytest_asyncio.fixture
async def engine(folder: Path) -> AsyncIterator[TransformersEngine]:
    opened = await TransformersEngine.open_model(folder, dtype="float32", device="cpu")
    yield opened
    await opened.aclose()


async def test_it_answers(engine: TransformersEngine) -> None:
    """The converted weights are the trained ones: asked for the capital of France it says Paris."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = engine.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, tokenize=False
    )
    tokens = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    await engine.open("a", tokens)
    await engine.prefill("a")
    made = [await engine.first_token("a")]
    while len(made) < 10 and made[-1] != engine.tokenizer.eos_token_id:
        made += await engine.decode(["a"], made[-1:])
    assert "Paris" in engine.tokenizer.decode(made)


async def test_real_text_is_restored_bit_for_bit(engine: TransformersEngine) -> None:
    """On the default grid, over tiles of 512 and 1,024 tokens of real text: the front recomputed,
    the back loaded, the meeting tile split by layer; KV of all layers and the logits are equal."""
    tokens = engine.tokenizer(long_text())["input_ids"][:1310]
    prefix, layers = 1280, engine.layout.num_layers
    await engine.open("cold", tokens)
    await engine.prefill("cold", 0, prefix)
    await engine.prefill("cold", prefix)

    await engine.open("warm", tokens)
    front, meeting, back = engine.grid.split(0, prefix)
    for chunk in range(meeting.start // 256, prefix // 256):
        low = 0 if chunk >= back.start // 256 else 11
        view = memoryview(bytearray((layers - low) * engine.layout.layer_stride()))
        part = StagedPart(chunk, Span(low, layers), view)
        await engine.capture("cold", [part])
        await engine.publish("warm", [part])
    for tile, stop in ((front, layers), (meeting, 11)):

        def claim(_work: TileWork, layer: int, stop: int = stop) -> Claim:
            return Claim.WRITE if layer < stop else Claim.REFUSED

        await engine.recompute(ComputeBatch((TileWork("warm", tile, 0),)), claim)
    await engine.prefill("warm", prefix)
    for layer in range(layers):
        pairs = zip(engine.kv("cold", layer), engine.kv("warm", layer), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), f"layer {layer}"
    assert torch.equal(await engine.last_logits("cold"), await engine.last_logits("warm"))


def long_text() -> str:
    """A module of the standard library: text that every Python has."""
    return Path(argparse.__file__).read_text(encoding="utf-8")
