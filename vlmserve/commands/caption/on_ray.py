"""Captions, or vectors, by engines on the nodes of a Ray cluster. This process reads items and keeps the journal."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vlmserve.commands.batch.item import ChatRequest
from vlmserve.commands.caption.local import LocalCaptioner
from vlmserve.commands.caption.run import CaptionStopped
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.settings import ServerSettings
from vlmserve.ray.cluster import Cluster
from vlmserve.ray.pool import ActorPool, PoolLostError
from vlmserve_common.errors import VlmserveError

logger = logging.getLogger(__name__)

_BESIDE_GPUS = 1.0  # the CPUs that an actor with GPUs reserves
_SPARE = 8  # calls of an actor besides those of items


@dataclass(frozen=True, kw_only=True, slots=True)
class RaySettings:
    """The flags of a run on a cluster. actors, cpus: None lets the cluster decide; see `bundle`."""

    address: str
    actors: int | None = None
    cpus: float | None = None
    patience_s: float = 300.0


class EngineActor:
    """An engine on a node. maker: what asks it, a `LocalCaptioner`. threads: of the model, if `--num-threads` is not
    set; None takes all cores."""

    def __init__(
        self,
        settings: ServerSettings,
        *,
        concurrency: int,
        nothing_twice: bool,
        threads: int | None,
        maker: type[LocalCaptioner],
    ) -> None:
        self._place = f"{socket.gethostname()} (process {os.getpid()})"
        self._trouble: VlmserveError | None = None
        engine = replace(settings.engine, num_threads=settings.engine.num_threads or threads)
        try:
            self._captioner = maker(
                replace(settings, engine=engine), concurrency=concurrency, nothing_twice=nothing_twice
            )
        except VlmserveError as error:  # which Ray would bury in a traceback
            self._trouble = type(error)(f"{self._place}: {error}")

    async def about(self) -> tuple[str, str]:
        """Return this actor's place and its engine's model and identity, in one text. Raises what kept it from
        starting."""
        if self._trouble is not None:
            raise self._trouble
        return self._place, f"{self._captioner.model}\n{self._captioner.identity}"

    async def ask(self, request: ChatRequest) -> dict[str, Any]:
        """Answer as `LocalCaptioner.ask`. If the engine has failed, this process ends, and Ray starts another one."""
        try:
            return await self._captioner.ask(request)
        except CaptionStopped as error:
            logger.critical("%s", error)
            os._exit(1)


class RayCaptioner:
    """A `Captioner` with an actor pool of engines. concurrency: items at a time in each. nothing_twice: see
    `CaptionCommand`. maker: see `EngineActor`.

    Blocks until there is room for the actors. Raises SettingsError or EngineError.
    """

    def __init__(
        self,
        ray: RaySettings,
        settings: ServerSettings,
        *,
        concurrency: int,
        nothing_twice: bool,
        maker: type[LocalCaptioner] = LocalCaptioner,
    ) -> None:
        self.model = self.identity = ""
        self._cluster = Cluster(ray.address)
        try:
            resources = bundle(self._cluster, settings.engine, ray.cpus)
            self.engines = ray.actors or self._cluster.free(resources)
            group = self._cluster.reserve(resources, self.engines, what="--ray-actors", patience_s=ray.patience_s)
            self._pool = ActorPool(
                EngineActor,
                {
                    "settings": settings,
                    "concurrency": concurrency,
                    "nothing_twice": nothing_twice,
                    "threads": threads_in(resources),
                    "maker": maker,
                },
                group,
                resources=resources,
                at_a_time=2 * concurrency + _SPARE,  # an actor takes over the items of others
                patience_s=ray.patience_s,
            )
        except BaseException:
            self._cluster.close()
            raise

    async def start(self) -> None:
        """Wait until all engines are loaded. Raises EngineError."""
        await self._pool.start()
        self.model, _, self.identity = self._pool.description.partition("\n")

    async def ask(self, request: ChatRequest) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = await self._pool.call("ask", request)
        except PoolLostError as error:
            raise CaptionStopped(f"{error} (--server-timeout-s)") from None
        return answer

    def notes(self) -> list[str]:
        return self._pool.notes()

    async def close(self) -> None:
        await self._pool.close()
        self._cluster.close()


def bundle(cluster: Cluster, engine: EngineArgs, cpus: float | None, *, spare: float = 0.0) -> dict[str, float]:
    """Return what an engine needs of one node: a GPU for each rank, where there are GPUs.

    cpus: None takes 1 beside GPUs, and otherwise those of the smallest node, but `spare`, or half of them.
    """
    on_gpus = engine.device.startswith("cuda") or (engine.device == "auto" and cluster.has("GPU"))
    if cpus is None:
        of_nodes = [node.resources["CPU"] for node in cluster.nodes if node.resources.get("CPU")]
        least = min(of_nodes, default=1.0)
        cpus = _BESIDE_GPUS if on_gpus else max(least - spare, least / 2)
    return {"CPU": cpus, "GPU": float(engine.world_size if on_gpus else 0)}


def threads_in(resources: Mapping[str, float]) -> int | None:
    """Return the threads of an engine in a bundle; None if a GPU computes."""
    return None if resources["GPU"] else max(1, int(resources["CPU"]))
