"""The prompts of the vLLM tests, always the same: plain vLLM answers each of them once."""

from __future__ import annotations

import random
from typing import Final

BLOCK: Final = 128
_TOKENS: Final = random.Random(3)
BASE: Final = _TOKENS.choices(range(2048), k=2048)
"""What many prompts begin with."""


def _forks() -> list[list[int]]:
    """Prompts that share a part of ``BASE``, of all lengths up to 2k."""
    chance = random.Random(5)
    forks = []
    for _ in range(40):
        shared = chance.randrange(0, 1700)
        own = chance.choices(range(2048), k=chance.randrange(1, 300))
        forks.append([*BASE[:shared], *own])
    return forks


EDGES: Final = [BASE[:n] for n in (1, 127, 128, 129, 255, 256, 257, 1024, 1025, 2047)]
FORKS: Final = _forks()
LONG: Final = [*BASE, *random.Random(9).choices(range(2048), k=40)]
TAILED: Final = [*BASE, *random.Random(13).choices(range(2048), k=120)]
"""Behind what is stored there is as much to compute as can be without a block of its own."""
OTHER: Final = random.Random(17).choices(range(2048), k=2048 + 100)
"""Shares nothing with the others."""
_END: Final = random.Random(21).choices(range(2048), k=600)
LONG_TAILED: Final = [*BASE, *_END]
"""Behind what is stored there is a long pass, where the store takes no more."""
OTHER_TAILED: Final = [*OTHER[:2048], *_END]
PROMPTS: Final = [LONG, TAILED, LONG_TAILED, OTHER, OTHER_TAILED, *EDGES, *FORKS]
