"""The chat template of an engine's tokenizer (Hugging Face), as the server uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from cacheflow.abc import Engine

__all__ = ["TokenizerChat", "chat_of"]


class TokenizerChat:
    """Renders, encodes and decodes; blocking, for a thread of its own."""

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.stop_tokens = frozenset({tokenizer.eos_token_id} - {None})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Tokens of a conversation.

        Raises:
            ConfigError: the template refuses it; the message is the template's.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateError as error:
            raise ConfigError(f"the chat template refuses these messages: {error}") from error
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Tokens of ``text``, nothing added."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens`` without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def chat_of(engine: Engine, template: Path | None) -> TokenizerChat:
    """The chat template of ``engine``'s tokenizer, or the one in the file ``template``.

    Raises:
        ConfigError: there is none, or the file cannot be read.
    """
    tokenizer = getattr(engine, "tokenizer", None)
    text = None
    if template is not None:
        try:
            text = template.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"server setting chat_template: {template} cannot be read: {error.strerror}"
            ) from error
    if tokenizer is None or not (text or getattr(tokenizer, "chat_template", None)):
        raise ConfigError(
            "the model's folder has no tokenizer with a chat template; set "
            "CACHEFLOW_SERVER_CHAT_TEMPLATE to a Jinja file"
        )
    return TokenizerChat(tokenizer, text)
