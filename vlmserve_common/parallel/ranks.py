"""A process's place among those that have a model together."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from vlmserve_common.compute.shard import Shard
from vlmserve_common.compute.stage import Stage
from vlmserve_common.parallel.ahead import TakenAhead
from vlmserve_common.parallel.group import IDLE_TIMEOUT, Orders, ProcessGroup
from vlmserve_common.parallel.meeting import MeetingPlace, meet
from vlmserve_common.parallel.presence import Presence

_CPU = torch.device("cpu")


class Ranks:
    """Rank `rank` of `place.size`, once it has met the others. The first one decides, and the others take orders.

    They are `stages` runs of equal length, each of which has some of the layers: rank = stage * tensor-parallel size +
    tensor-parallel rank. group: what the ranks of a stage exchange as they compute, None for one that is alone in it.
    orders: what the others are told to. shard: this rank's part of the model. results: from the last stage's first
    rank, which samples, to the first rank of all; None at others, and where there is one stage. presence: of ranks on
    other machines. about, look, errors: those of `meet`; RankLostError later on.
    """

    def __init__(
        self,
        place: MeetingPlace,
        rank: int,
        device: torch.device,
        about: Mapping[str, str],
        look: Callable[[], object] = lambda: None,
        *,
        stages: int = 1,
    ) -> None:
        self.rank, self.size = rank, place.size
        self._device, self._called = device, f"rank {rank} of {place.size}"
        self._store = meet(place, rank, about, look)  # which has to outlive the groups
        self._host = place.own_host()
        # on one machine whoever starts them looks after them
        self.presence = None if place.is_file else Presence(place, self._store, rank)
        self._groups: list[ProcessGroup] = []
        self._more: list[ProcessGroup] = []
        width = place.size // stages
        stage, within = divmod(rank, width)
        # in an order in which nobody waits for who waits for him: from the first stage on
        self.group = self._make(f"stage {stage}", within, width) if width > 1 else None
        before = self._make(f"link {rank - width}", 1, 2) if stage else None
        behind = self._make(f"link {rank}", 0, 2) if stage < stages - 1 else None
        self._told = self._make("orders", rank, place.size, device=_CPU, forever=True)
        self.orders = Orders(self._told.broadcast)
        self.shard = Shard(within, width, self.group, stage=Stage(stage, stages, before, behind))
        self.results: Orders | None = None
        if stages > 1 and (self.shard.is_entry or self.shard.samples):
            entry = self.shard.is_entry  # which may leave results lying about, while it is paused
            returning = self._make("results", int(entry), 2, device=_CPU, forever=not entry)
            self.results = Orders(returning.hand_on)

    def take_orders(self) -> Callable[[], bytes]:
        """What waits for the next order, at ranks but the first. To be called once."""
        return self.orders.take if self.shard.stage.size == 1 else TakenAhead(self.orders).take

    def share_memory(self) -> None:
        """Exchange through memory that all have, from now on, where they compute on one machine's CPU. To be called by
        all, once the operators are there."""
        for group in (self._told, *self.computing):
            group.share_memory()

    def make_group(self, name: str, rank: int, size: int) -> ProcessGroup:
        """Some of the ranks, of which this is number `rank`; all of them call it."""
        group = self._make(name, rank, size)
        self._more.append(group)
        return group

    @property
    def computing(self) -> tuple[ProcessGroup, ...]:
        """What this rank exchanges through in the midst of a step, but with other stages."""
        return tuple(group for group in (self.group, *self._more) if group is not None)

    def smallest(self, number: int) -> int:
        """The smallest of everybody's numbers."""
        return self._told.smallest(number)

    def close(self) -> None:
        """Let go of the others, who see that this rank is gone."""
        for group in self._groups:
            group.close()
        if self.presence is not None:
            self.presence.close()

    def _make(
        self, name: str, rank: int, size: int, *, device: torch.device | None = None, forever: bool = False
    ) -> ProcessGroup:
        """forever: who waits in it may wait for good."""
        group = ProcessGroup(
            self._store,
            name,
            rank=rank,
            size=size,
            device=device or self._device,
            host=self._host,
            called=self._called,
            **({"timeout": IDLE_TIMEOUT} if forever else {}),
        )
        self._groups.append(group)
        return group
