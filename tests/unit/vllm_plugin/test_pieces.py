"""The last blocks come by layers: the first layers of all of them before later ones of any."""

from __future__ import annotations

import pytest

from cacheflow.plugins.vllm.pieces import BANDS, Piece, arranged, bands, hidden_share
from cacheflow.types import Span

LAYERS = 30
WHOLE = Span(0, LAYERS)


@pytest.mark.parametrize("layers", [1, 2, 3, BANDS, 30, 61])
def test_bands_are_all_layers(layers: int) -> None:
    """Each once, in order, in bands of about the same size."""
    found = bands(layers)
    assert [layer for band in found for layer in band] == list(range(layers))
    assert len(found) == min(BANDS, layers)
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert hidden_share(layers) == found[-1].start / layers


def test_a_model_of_one_layer_hides_nothing() -> None:
    """Its only layer is read at once."""
    assert hidden_share(1) == 0.0


def test_last_blocks_come_by_layers() -> None:
    """Whole blocks from the last one down, then band by band, the last block first in each."""
    waiting = [Piece(block, WHOLE) for block in range(4, 9)]
    order = arranged(waiting, 6, LAYERS)[::-1]
    assert order[:3] == [Piece(8, WHOLE), Piece(7, WHOLE), Piece(6, WHOLE)]
    expected = [Piece(block, band) for band in bands(LAYERS) for block in (5, 4)]
    assert order[3:] == expected


def test_what_is_split_already_stays() -> None:
    """More blocks are split when compute turns out to take longer; none is asked for twice."""
    waiting = arranged([Piece(block, WHOLE) for block in range(4, 9)], 5, LAYERS)
    waiting.pop()  # block 8 is on its way
    again = arranged(waiting, 7, LAYERS)
    assert again[-1] == Piece(7, WHOLE)
    layers = dict.fromkeys(range(4, 8), 0)
    for piece in again:
        assert not layers[piece.block] & piece.mask
        layers[piece.block] |= piece.mask
    assert set(layers.values()) == {(1 << LAYERS) - 1}
    starts = [piece.layers.start for piece in again[:-1]]
    assert starts == sorted(starts, reverse=True)
