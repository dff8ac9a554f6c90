"""Places experts anew, now and then, by how often they were chosen."""

from __future__ import annotations

import logging

import torch
from torch import nn

from vlmserve.ipc.messages import ExpertStats
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.expert_placement import imbalance, loads_of, move, place
from vlmserve_common.compute.experts import SparseMLP

log = logging.getLogger(__name__)


class ExpertBalancer:
    """Counts steps, and places experts anew after every `interval` of them. All ranks call `step` before each step.
    stats: of the last placement; any thread may read it."""

    @torch.inference_mode()
    def __init__(self, model: nn.Module, comm: Communicator, interval: int) -> None:
        self._mlps = [mlp for mlp in model.modules() if isinstance(mlp, SparseMLP) and mlp.slots is not None]
        self._slots = [mlp.slots for mlp in self._mlps if mlp.slots is not None]
        self._comm, self._interval = comm, interval
        self._steps = 0
        self.stats = ExpertStats()
        for slots in self._slots:
            slots.take_counts()  # those of trials and measurements

    def step(self) -> None:
        """Note that a step begins; experts may move now."""
        if self._steps == self._interval:
            self._steps = 0
            self._balance()
        self._steps += 1

    def _balance(self) -> None:
        parties = self._comm.shard.experts.ep_size
        before = after = 0.0
        moved = 0
        for mlp, slots, loads in zip(self._mlps, self._slots, loads_of(self._slots, self._comm), strict=True):
            old, new = slots.placement, place(loads, slots.placement, parties)
            if imbalance(loads, new, parties) < imbalance(loads, old, parties):
                moved += move(mlp.experts, slots, new, self._comm)
            before += imbalance(loads, old, parties) / len(self._slots)
            after += imbalance(loads, slots.placement, parties) / len(self._slots)
        self.stats = ExpertStats(
            imbalance=before,
            imbalance_after=after,
            rebalances_total=self.stats.rebalances_total + 1,
            moved_total=self.stats.moved_total + moved,
        )
        log.log(
            logging.DEBUG if self._comm.shard.rank else logging.INFO,
            "experts placed anew: the busiest of %d parties had %.2f times the mean to do in the last %d steps, and "
            "would have had %.2f; %d experts moved",
            parties,
            before,
            self._interval,
            after,
            moved,
        )
