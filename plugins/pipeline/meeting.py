"""A stage among the others: the group they talk in, and what carries between neighbours.

Knows no models but by their identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from torch import distributed

from cacheflow.plugins.pipeline.carrier import Carriers, open_carriers
from cacheflow.plugins.ranks import Joined, check_alike, leave_ranks, whole_group

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from cacheflow.plugins.transformers.lanes import Streams

__all__ = ["Meeting"]


@dataclass(frozen=True, slots=True)
class Meeting:
    """Use :meth:`open`. ``group``: all stages, over gloo. ``deadline``: seconds after which one
    that says nothing counts as dead."""

    joined: Joined
    group: distributed.ProcessGroup
    carriers: Carriers
    deadline: float

    @classmethod
    def open(
        cls,
        joined: Joined,
        identity: Mapping[str, str | int],
        device: torch.device,
        streams: Streams,
        deadline: float,
    ) -> Self:
        """All stages call it at the same time. Blocking.

        Raises:
            ConfigError: other stages have another model than ``identity`` says.
            PeerError: another rank is gone, or did not come.
        """
        group = whole_group(deadline)
        try:
            check_alike(group, identity, deadline)
            carriers = open_carriers(joined.rank, group, device, streams, deadline)
        except BaseException:
            distributed.destroy_process_group(group)
            raise
        return cls(joined, group, carriers, deadline)

    def close(self) -> None:
        """Leave torch.distributed as it was found. Blocking. Call it once."""
        self.carriers.close()
        leave_ranks(self.joined, [self.group])
