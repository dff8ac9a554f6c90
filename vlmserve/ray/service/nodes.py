"""A replica's ranks on other machines (`--nnodes`): an actor on each, which has the processes of its ranks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vlmserve.api.launch import start_ranks
from vlmserve.config.settings import ServerSettings
from vlmserve.ray.service.plan import Bundle
from vlmserve.ray.service.ports import free_port
from vlmserve.ray.service.versions import check_version
from vlmserve_common.errors import EngineError
from vlmserve_common.logs import configure_logging
from vlmserve_common.process.child import ChildProcess


class RankNode:
    """The ranks of one machine. Ray ends the actor, and its processes end with it, when the replica is gone."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._ranks: Sequence[ChildProcess] = ()

    def start(self, settings: ServerSettings, version: str) -> None:
        """Start the ranks, and wait until they are ready."""
        check_version(version)
        configure_logging(settings.log_level, f"node-{settings.engine.node_rank}")
        self._ranks = start_ranks(settings, self._stack)

    def check(self) -> None:
        """Raise EngineError if a rank has ended."""
        for rank in self._ranks:
            if not rank.alive:
                raise EngineError(rank.how_it_died())

    def stop(self) -> None:
        """End the ranks."""
        self._stack.close()


class Nodes:
    """All machines of a replica but its own, in the bundles of its placement group."""

    def __init__(self, settings: ServerSettings, bundles: Sequence[Bundle]) -> None:
        group = ray.util.get_current_placement_group()
        assert group is not None, "Serve made it, as the replica has several bundles"
        actor: Any = ray.remote(RankNode)
        self._actors: list[Any] = []
        for number, bundle in enumerate(bundles[1:], 1):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            options: dict[str, Any] = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
            self._actors.append(actor.options(scheduling_strategy=place, **options).remote())
        address = f"{ray.util.get_node_ip_address()}:{free_port()}"
        self.settings = replace(settings, engine=replace(settings.engine, dist_init_addr=address))

    async def start(self, version: str) -> None:
        """Start the ranks of all machines. They are ready once this machine's are, too."""
        args = self.settings.engine
        starts = [
            actor.start.remote(replace(self.settings, engine=replace(args, node_rank=number)), version)
            for number, actor in enumerate(self._actors, 1)
        ]
        await asyncio.gather(*starts)

    async def check(self) -> None:
        """Raise EngineError if a rank or a machine is gone."""
        try:
            await asyncio.gather(*(actor.check.remote() for actor in self._actors))
        except ray.exceptions.RayActorError as error:
            raise EngineError(f"a machine with ranks of this replica is gone: {error}") from None

    async def stop(self) -> None:
        """End the ranks."""
        with contextlib.suppress(ray.exceptions.RayError):
            await asyncio.gather(*(actor.stop.remote() for actor in self._actors))
        for actor in self._actors:
            ray.kill(actor)
