"""What the engine has to do with a model's cache: one method, by whatever name it is passed."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from cacheflow.plugins.transformers import TransformersEngine

    EngineFor = Callable[..., AbstractAsyncContextManager[TransformersEngine]]

PROMPT = [(7 * i) % 100 + 3 for i in range(150)]


class OnlyUpdate:
    """A cache of which nothing but ``update`` may be touched: what else such objects have (lists
    of keys and values, lengths, layers) comes and goes with transformers' versions."""

    def __init__(self, cache: Any, seen: list[int]) -> None:
        self._update, self._seen = cache.update, seen

    def update(self, key: Any, value: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        self._seen.append(layer)
        return self._update(key, value, layer, *args, **kwargs)


async def said(engine: TransformersEngine, name: str) -> list[int]:
    """The next tokens after the prompt."""
    await engine.open(name, PROMPT)
    await engine.prefill(name, 0, len(PROMPT))
    tokens = [await engine.first_token(name)]
    for _ in range(5):
        tokens += await engine.decode([name], tokens[-1:])
    await engine.close(name)
    return tokens


NAMES = ["cache", "past_key_values", "past_key_value"]
"""Of a layer's parameter for it, newest first."""


@pytest.mark.parametrize("name", NAMES)
async def test_layers_of_other_versions(
    engine_for: EngineFor, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whatever a layer's parameter is called, it gets the cache, in every layer of prefill and
    decode; and the tokens are the same, although it can do nothing with it but update it."""
    async with engine_for("llama") as engine:
        expected = await said(engine, "as it is")
    forward, seen = LlamaDecoderLayer.forward, list[int]()
    signature = inspect.signature(forward)
    own = next(each for each in NAMES if each in signature.parameters)

    def renamed(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if (given := kwargs.pop(name, None)) is not None:
            kwargs[own] = OnlyUpdate(given, seen)
        return forward(self, hidden_states, *args, **kwargs)

    parameters = [
        each.replace(name=name) if each.name == own else each
        for each in signature.parameters.values()
    ]
    renamed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    monkeypatch.setattr(LlamaDecoderLayer, "forward", renamed)
    async with engine_for("llama") as engine:
        seen.clear()
        assert await said(engine, "renamed") == expected
        passes = len(engine.grid.split(0, len(PROMPT))) + 5
        assert seen == list(range(engine.layout.num_layers)) * passes
