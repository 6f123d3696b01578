"""A tiny random chat model with a tokenizer of its own, a service over it, and a client."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cacheflow.plugins.openai_server import ServerSettings, create_app, opened_service
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.settings import Settings
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from cacheflow.plugins.openai_server.service import Service

MODEL = "tiny-chat"
GRID = TileGrid((32, 32, 64), 64)
CHUNK = 16
CONTEXT = 1024
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_chat_model(folder: Path) -> Path:
    """A random Llama over a byte-level vocabulary of 300 tokens, with ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken(token, special=True) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat and the dog sat on the mat " * 4], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder; not to be changed."""
    return save_chat_model(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture
def serving(
    chat_model: Path, tmp_path: Path
) -> Callable[..., AbstractAsyncContextManager[Service]]:
    """``async with serving(max_running=1) as service``: a service over the tiny model."""

    @asynccontextmanager
    async def opened(kv_bytes: int = 64 << 20, **options: Any) -> AsyncIterator[Service]:
        engine = await TransformersEngine.open_model(
            chat_model,
            dtype="float32",
            device="cpu",
            grid=GRID,
            chunk_tokens=CHUNK,
            kv_bytes=kv_bytes,
        )
        tier = {"name": "disk", "backend": "nvme", "options": {"path": str(tmp_path / "kv")}}
        settings = Settings(tiers=(tier,), staging_bytes=1 << 24)
        try:
            async with opened_service(
                engine, MODEL, settings, ServerSettings(**options)
            ) as service:
                yield service
        finally:
            await engine.aclose()

    return opened


@asynccontextmanager
async def client_of(service: Service, **options: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """A client that talks to the application in process."""
    transport = httpx2.ASGITransport(create_app(service))
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://server/v1", timeout=60, **options
    ) as client:
        yield client


@asynccontextmanager
async def openai_of(service: Service, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client on the application in process; it never tries again by itself."""
    async with client_of(service) as http:
        yield openai.AsyncOpenAI(
            api_key=key, base_url="http://server/v1", http_client=http, max_retries=0
        )
