"""A process's place among those that have a model together."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from vlmserve_common.compute.shard import Shard
from vlmserve_common.parallel.group import IDLE_TIMEOUT, Orders, ProcessGroup
from vlmserve_common.parallel.meeting import MeetingPlace, meet
from vlmserve_common.parallel.presence import Presence


class Ranks:
    """Rank `rank` of `place.size`, once it has met the others. The first one decides, and the others take orders.

    group: what they exchange as they compute. orders: what the others are told to. shard: this rank's part of the
    model. presence: of ranks on other machines. about, look, errors: those of `meet`; RankLostError later on.
    """

    def __init__(
        self,
        place: MeetingPlace,
        rank: int,
        device: torch.device,
        about: Mapping[str, str],
        look: Callable[[], object] = lambda: None,
    ) -> None:
        self.rank, self.size = rank, place.size
        self._store = meet(place, rank, about, look)  # which has to outlive the groups
        host = place.own_host()
        # on one machine whoever starts them looks after them
        self.presence = None if place.is_file else Presence(place, self._store, rank)
        self.group = ProcessGroup(self._store, "model", rank=rank, size=place.size, device=device, host=host)
        self._told = ProcessGroup(
            self._store,
            "orders",
            rank=rank,
            size=place.size,
            device=torch.device("cpu"),
            host=host,
            timeout=IDLE_TIMEOUT,
        )
        self.orders = Orders(self._told)
        self.shard = Shard(rank, place.size, self.group)

    def share_memory(self) -> None:
        """Exchange through memory that all have, from now on, where they compute on one machine's CPU. To be called by
        all, once the operators are there."""
        self.group.share_memory()
        self._told.share_memory()

    def smallest(self, number: int) -> int:
        """The smallest of everybody's numbers."""
        return self.group.smallest(number)

    def close(self) -> None:
        """Let go of the others, who see that this rank is gone."""
        self.group.close()
        self._told.close()
        if self.presence is not None:
            self.presence.close()
