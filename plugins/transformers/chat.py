"""Messages to tokens, by the chat template that the model's tokenizer brings along.

Knows templates and tokenizers; no models, no KV, no sessions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["TemplateChat", "chat_of"]


def chat_of(tokenizer: Any, model: Any = None) -> TemplateChat | None:
    """How the model with this tokenizer reads messages; None if it says nothing about that."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return TemplateChat(tokenizer, ends if isinstance(ends, list) else [ends])


class TemplateChat:
    """Implements :class:`cacheflow.abc.ChatTemplate`."""

    def __init__(self, tokenizer: Any, ends: Sequence[int | None] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop_tokens = frozenset({tokenizer.eos_token_id, *ends} - {None})
        """The tokenizer's, and those that the model's generation config adds (end of a turn)."""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """See :meth:`cacheflow.abc.ChatTemplate.render`."""
        from jinja2 import TemplateError

        try:
            text: str = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            # A template is a program: what it does not take ends in whatever it happens to raise.
            raise ConfigError(f"the model's chat template refuses the messages: {error}") from None
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """See :meth:`cacheflow.abc.ChatTemplate.encode`."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair: JSON can write it
            raise ConfigError(f"the text is not Unicode: {error.reason}") from None
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """See :meth:`cacheflow.abc.ChatTemplate.decode`."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
