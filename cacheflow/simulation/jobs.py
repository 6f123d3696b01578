"""Requests as a workload states them, and how they are cut into tiles and cells.

Knows positions and block names only: no tokens, no bytes, no schedulers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from cacheflow.errors import ConfigError
from cacheflow.simulation.bounds import FluidRequest
from cacheflow.types import RequestSpec, TileGrid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.simulation.hardware import Machine
    from cacheflow.simulation.records import Record

__all__ = ["WIDE", "Cut", "Job", "Workload"]

WIDE: Final = TileGrid(head=(), tail=2048)
"""Tiles of 2,048 tokens from the start: coarser than the real grid, for large simulations."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request. ``arrival`` in virtual seconds.

    Either ``hash_ids`` name its blocks (what is stored then depends on what ran before), or the
    first ``prefix_tokens`` are stored but for the chunks in ``holes``.
    """

    id: str
    arrival: float
    total_tokens: int
    prefix_tokens: int = 0
    output_tokens: int = 0
    hash_ids: tuple[int, ...] = ()
    leaves: tuple[int, ...] = ()
    """Names of the whole blocks that are stored once it was answered."""
    holes: frozenset[int] = frozenset()
    priority: int = 0
    deadline: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.prefix_tokens < self.total_tokens:
            raise ValueError(
                f"{self.id}: a prefix of {self.prefix_tokens} of {self.total_tokens} tokens leaves "
                "nothing to compute"
            )


class Workload(Protocol):
    """Where requests come from."""

    @property
    def name(self) -> str:
        """For titles."""
        ...

    def first(self) -> Sequence[Job]:
        """Requests known from the beginning, in any order."""
        ...

    def then(self, job: Job, record: Record) -> Job | None:
        """What follows once ``job`` has its first token (the next turn of a conversation)."""
        ...


@dataclass(frozen=True, slots=True)
class Cut:
    """Cells: tiles of ``grid``, chunks of ``chunk_tokens``, ``layer_blocks`` rows.

    Raises:
        ConfigError: a tile is not a whole number of chunks.
    """

    layer_blocks: int
    chunk_tokens: int = 512
    grid: TileGrid = WIDE

    def __post_init__(self) -> None:
        try:
            self.grid.check(self.chunk_tokens)
        except ValueError as error:
            raise ConfigError(
                f"--chunk {self.chunk_tokens}: a tile of --cells holds whole chunks ({error})"
            ) from error

    def spec(self, job: Job, prefix_tokens: int) -> RequestSpec:
        """The request whose first ``prefix_tokens`` (rounded down to chunks) may be restored."""
        prefix = prefix_tokens // self.chunk_tokens * self.chunk_tokens
        return RequestSpec(
            id=job.id,
            arrival=job.arrival,
            prefix_tokens=prefix,
            total_tokens=job.total_tokens,
            chunk_tokens=self.chunk_tokens,
            num_layers=self.layer_blocks,
            tiles=self.grid.split(0, prefix),
            suffix=self.grid.split(prefix, job.total_tokens),
            priority=job.priority,
            deadline=job.deadline,
        )

    def fluid(
        self, spec: RequestSpec, machine: Machine, bandwidth: float, stored: Sequence[int] = ()
    ) -> FluidRequest:
        """The request's cells for a bound, over all its channels' ``bandwidth`` together.

        ``stored[c]``: bitmap of layer blocks of chunk ``c`` that some channel has (all if empty).
        """
        compute: list[float] = []
        load: list[float] = []
        full = (1 << spec.num_layers) - 1
        for tile in spec.tiles:
            seconds = machine.block_seconds(tile)
            nbytes = machine.block_bytes(tile.width)
            there = full
            first, last = tile.start // spec.chunk_tokens, tile.stop // spec.chunk_tokens
            for mask in stored[first:last]:
                there &= mask
            for layer in range(spec.num_layers):
                compute.append(seconds)
                load.append(nbytes / bandwidth if there >> layer & 1 else float("inf"))
        fixed = sum(machine.block_seconds(piece) for piece in spec.suffix) * spec.num_layers
        return FluidRequest(tuple(compute), tuple(load), fixed)
