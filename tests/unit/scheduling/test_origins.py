"""Every cell of a prefix has one origin."""

from __future__ import annotations

from cacheflow.scheduling import Origins


def test_a_part_that_was_loaded_before_compute_wrote_the_tile_counts_once() -> None:
    """Tile 3 is 64 tokens wide: 16 of them came from a tier at layers 0 to 3, then compute wrote
    all 64 at layers 2 and 3, since the other 48 did not come."""
    origins = Origins()
    origins.loaded("disk", 3, 0b1111, 16)
    origins.loaded("net", 3, 0b0011, 48)
    for layer in (2, 3):
        origins.wrote(3, 64, layer)
    assert origins.recomputed == 2 * 64
    assert origins.by_channel == {"disk": 2 * 16, "net": 2 * 48}
    assert origins.recomputed + sum(origins.by_channel.values()) == 4 * 64


def test_what_compute_wrote_of_one_tile_says_nothing_of_another() -> None:
    """Nor does a channel appear that delivered nothing that is used."""
    origins = Origins()
    origins.wrote(0, 32, 0)
    origins.loaded("disk", 1, 0b1, 32)
    origins.loaded("net", 0, 0b1, 16)
    origins.loaded("late", 1, 0, 16)
    assert (origins.recomputed, origins.by_channel) == (32, {"disk": 32})
