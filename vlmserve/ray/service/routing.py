"""Serve's interface to `ReplicaChooser`. Only a process that sends requests of a front imports this."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ray.serve.request_router import RequestRouter

from vlmserve.ray.service.choosing import Order, ReplicaChooser

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RunningReplica


class AffinityRouter(RequestRouter):
    """Sends each order of a front to the replica that `ReplicaChooser` chooses."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Make the chooser: Serve calls this once. kwargs: those of `ReplicaChooser`."""
        self._chooser = ReplicaChooser(**kwargs)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Note which replicas there are: Serve calls this at each change, and for new figures."""
        super().update_replicas(replicas)
        self._chooser.update({one.replica_id.unique_id: one.routing_stats or {} for one in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which they are to be tried."""
        order = _order_of(pending_request)
        if order is None:
            return [candidate_replicas]
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        return [[by_name[name]] for name in self._chooser.ranked(order, by_name)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Note where a request went, until it ends."""
        order = _order_of(pending_request)
        if order is None:
            return
        self._chooser.went(order, replica_id.unique_id)
        loop = asyncio.get_running_loop()
        [rid] = order.demand.rids
        result.add_done_callback(lambda _: loop.call_soon_threadsafe(self._chooser.ended, rid))


def _order_of(request: PendingRequest | None) -> Order | None:
    args: Any = request.args if request is not None else ()
    return args[0] if args and isinstance(args[0], Order) else None
