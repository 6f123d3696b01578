"""Drawing tokens: the right distribution, from nothing but logits, seed and position."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cacheflow.abc import Sampler
from cacheflow.errors import ConfigError
from cacheflow.plugins.transformers.sampling import choose, draw
from cacheflow.types import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def shares(how: Sampling, draws: int = 4000) -> list[float]:
    counts = Counter(draw(LOGITS, how, position) for position in range(draws))
    return [counts[token] / draws for token in range(len(LOGITS))]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Sampling(1.0), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(0.5), [0.685, 0.247, 0.062, 0.007]),
        (Sampling(1.0, top_p=0.75), [0.625, 0.375, 0.0, 0.0]),
        (Sampling(1.0, top_p=0.01), [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_tokens_come_as_often_as_they_should(how: Sampling, expected: list[float]) -> None:
    """Temperature flattens or sharpens, top_p cuts the tail: within four standard deviations."""
    for share, chance in zip(shares(how), expected, strict=True):
        assert abs(share - chance) <= 4 * (max(chance * (1 - chance), 1e-9) / 4000) ** 0.5 + 1e-3


def test_next_to_no_temperature_takes_the_likeliest() -> None:
    """Logits divided by what fp32 cannot say would be no numbers."""
    logits = torch.tensor([1.0, 30.0, -2.0])
    assert [draw(logits, Sampling(t), 0) for t in (1e-30, 1e-45, 5e-324)] == [1, 1, 1]


def test_a_top_p_that_is_nothing_in_fp32_takes_the_likeliest() -> None:
    """And not no token at all, which would end the step of all who decode beside it."""
    logits = torch.tensor([1.0, 3.0, -2.0])
    assert [draw(logits, Sampling(1.0, p), 0) for p in (1e-3, 1e-50, 5e-324)] == [1, 1, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_end_no_step(bad: float) -> None:
    """Such a row gets what the greedy choice is; the others of its step theirs."""
    rows = torch.stack([torch.tensor([1.0, bad, 3.0, 4.0]), LOGITS])
    how = Sampling(seed=5)
    assert choose(rows, [how, how], [0, 7]) == [1, draw(LOGITS, how, 7)]


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    """The same again, in any batch; another seed or place draws anew; who does not sample gets the
    likeliest token."""
    alone = [draw(LOGITS, Sampling(seed=5), place) for place in range(50)]
    rows = torch.stack([LOGITS] * 3)
    for place, token in enumerate(alone):
        how = [None, Sampling(seed=5), Sampling(seed=6)]
        assert choose(rows, how, [place, place, place])[:2] == [0, token]
    assert alone != [draw(LOGITS, Sampling(seed=6), place) for place in range(50)]
    assert len(set(alone)) > 1


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_impossible_numbers_are_refused(wrong: dict[str, float]) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]


async def test_the_engine_draws_in_a_batch_as_alone(engine_for: Callable[..., Any]) -> None:
    """A request's drawn tokens do not depend on who decodes beside it."""
    async with engine_for() as opened:
        assert isinstance(opened, Sampler)
        engine: Any = opened
        how = Sampling(1.5, seed=3)

        async def begin(name: str) -> list[int]:
            await engine.open(name, list(range(5, 25)))
            await engine.prefill(name)
            return [await engine.first_sample(name, how)]

        alone = await begin("alone")
        for _ in range(12):
            alone += await engine.decode_sampled(["alone"], alone[-1:], [how])
        made = await begin("a")
        other = await begin("b")
        for _ in range(12):
            step = await engine.decode_sampled(["b", "a"], [other[-1], made[-1]], [None, how])
            other.append(step[0])
            made.append(step[1])
    assert made == alone
    assert made != other
