"""Real text that every machine has: the source of Python's own asyncio, in a fixed order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

__all__ = ["real_tokens"]


def real_tokens(tokenizer: Any, count: int) -> list[int]:
    """``count`` token ids of real text."""
    tokens: list[int] = []
    for path in sorted(Path(asyncio.__file__).parent.glob("*.py")):
        tokens += tokenizer(path.read_text(encoding="utf-8")).input_ids
        if len(tokens) >= count:
            return tokens[:count]
    return (tokens * (count // len(tokens) + 1))[:count]
