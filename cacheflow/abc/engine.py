"""``Engine``: a recomputer that also serves, how its model reads messages, and who draws tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from cacheflow.abc.recomputer import Recomputer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cacheflow.types import (
        Sampling,
        Segment,
        Span,
    )

__all__ = ["ChatTemplate", "Decoder", "Engine", "Packer", "Sampler"]


class ChatTemplate(Protocol):
    """How a model reads messages, and how its tokens are read. Called on threads: may take long."""

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The prompt that ``messages`` (with ``role``, ``content`` ...) are, as tokens.

        Raises:
            ConfigError: the model's template does not take them; says why.
        """

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text`` as it is, nothing added; ConfigError if it is not Unicode."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, special tokens left out."""


@runtime_checkable
class Sampler(Protocol):
    """What an engine that can draw tokens offers beside :class:`Engine`."""

    async def first_sample(self, request_id: str, sampling: Sampling) -> int:
        """As :meth:`Engine.first_token`, drawn."""

    async def decode_sampled(
        self, request_ids: Sequence[str], tokens: Sequence[int], sampling: Sequence[Sampling | None]
    ) -> list[int]:
        """As :meth:`Engine.decode`, drawn for each request whose ``sampling`` is not None."""


@runtime_checkable
class Decoder(Protocol):
    """What an engine offers whose decode steps others can get out of the way of."""

    @property
    def is_decoding(self) -> bool:
        """Whether a decode step is under way or waits."""


@runtime_checkable
class Packer(Protocol):
    """What an engine offers that can push several tiles through a layer in one pass."""

    @property
    def pack_tokens(self) -> int:
        """The widest pass, in tokens. 0: every tile has a pass of its own, so that its bits depend
        on nobody beside it; else its KV is equal within the dtype's tolerance, and every segment
        that it reports is ``lossy``."""
        ...


class Engine(Recomputer, Protocol):
    """A recomputer that also serves: it samples tokens and names its model."""

    @property
    def identity(self) -> Mapping[str, str | int]:
        """What the key root binds: config, weights digest, adapter, KV dtype, layout, rope."""
        ...

    @property
    def layer_flops(self) -> tuple[float, float]:
        """``(linear, attention)`` FLOPs of one layer: per token, and per token and key position."""
        ...

    @property
    def max_tokens(self) -> int:
        """The model's context length in tokens."""
        ...

    @property
    def chat(self) -> ChatTemplate | None:
        """How the model reads messages; None where it comes without a template for them."""
        ...

    def segments(self, request_id: str) -> tuple[Segment, ...]:
        """How the tokens that are in the KV cache were computed (or loaded), in order."""
        ...

    def set_segments(self, request_id: str, tokens: Span, segments: Sequence[Segment]) -> None:
        """Record the provenance of loaded tokens."""
        ...

    async def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """Append prompt tokens to an open request whose KV so far stays; see :meth:`open`.

        The request is longer in the moment of the return, not before: an engine that awaits
        anything does so first, and appends when nothing can be cancelled any more. If it is
        cancelled or fails, nothing has changed: its caller, who is cancelled too, goes on with the
        request as it was.
        """
        ...

    async def fork(self, source_id: str, request_id: str, tokens: int) -> None:
        """Open ``request_id`` with the first ``tokens`` tokens of ``source_id``, KV included, whose
        KV must be complete. Whole pages are shared, the last one is copied. The source may go on
        meanwhile. If it is cancelled or fails, nothing is open.

        Raises:
            CapacityError: no KV memory is left for the copy.
        """
        ...

    async def truncate(self, request_id: str, tokens: int) -> None:
        """Forget all but the first ``tokens`` tokens, whose KV must be complete (0 < ``tokens``).

        What others share with the request stays as it is. Waits for work that still touches the
        KV. If it is cancelled or fails, nothing has changed.

        Raises:
            CapacityError: the last page is shared, and no KV memory is left for a copy of it.
        """
        ...

    async def first_token(self, request_id: str) -> int:
        """Greedy token after the last prompt token; the suffix must have been computed."""
        ...

    async def decode(self, request_ids: Sequence[str], tokens: Sequence[int]) -> list[int]:
        """Append one token to each request and return the next greedy token of each.

        In float32 these are the tokens that each request would get alone. A call that is cancelled
        ends the step all the same.

        Raises:
            CapacityError: no KV memory is left; no request was given a token.
            ClosedError: one of them is not open; no request was given a token.
        """
        ...

    async def aclose(self) -> None:
        """Stop the compute thread and free the KV cache. Idempotent."""
        ...
