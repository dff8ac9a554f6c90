"""A pool of actors that share calls. A call whose actor is lost goes to another one."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlmserve_common.errors import EngineError, VlmserveError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

logger = logging.getLogger(__name__)

_TRIES = 3  # of a call that may itself end its actors
_PAUSES_S = (0.5, 1.0, 2.0, 5.0)
_STORE_FULL_S = 1.0


class PoolLostError(EngineError):
    """No actor of a pool works, and none has come back in time."""


@dataclass(kw_only=True, eq=False)
class _Standing:
    """An actor. place: what its `about` says of it. load: calls under way. lost: the calls that it took along."""

    actor: Any
    place: str = ""
    is_in: bool = False
    load: int = 0
    lost: int = 0
    reason: str = ""


class ActorPool:
    """Actors of one class, for one event loop. `start` comes first.

    cls: a class of async methods, importable by its name on all nodes. `about() -> tuple[place, description]` is one of
    them: two texts, or a VlmserveError if the actor cannot work; the constructor must not raise. arguments: of the
    constructor. group: a bundle for each actor. resources: those of a bundle. at_a_time: calls in each actor.
    patience_s: how long the pool may be without any working actor.
    """

    def __init__(
        self,
        cls: type,
        arguments: Mapping[str, Any],
        group: PlacementGroup,
        *,
        resources: dict[str, float],
        at_a_time: int,
        patience_s: float,
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, self._group, self._patience_s = ray, group, patience_s
        remote: Any = ray.remote(cls)
        self._standings = [
            _Standing(
                actor=remote.options(
                    num_cpus=resources.get("CPU", 0.0),
                    num_gpus=resources.get("GPU", 0.0),
                    max_concurrency=at_a_time,
                    max_restarts=-1,  # on another node, where there is room
                    max_task_retries=0,  # which `call` does, on an actor that works
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
                ).remote(**arguments)
            )
            for index in range(group.bundle_count)
        ]
        self.description = ""
        self._changed = asyncio.Event()
        self._returning: set[asyncio.Task[None]] = set()
        self._ending: asyncio.Task[None] | None = None
        self._stopped: str | None = None

    async def start(self) -> None:
        """Wait until all actors say what they are; sets `description`, which must be the same for all.

        Raises EngineError.
        """
        try:
            told = await asyncio.gather(*(standing.actor.about.remote() for standing in self._standings))
        except self._ray.exceptions.RayError as error:
            raise EngineError(f"an actor cannot start: {_words(error)}") from None
        for standing, (place, description) in zip(self._standings, told, strict=True):
            standing.place, standing.is_in = place, True
            self.description = self.description or description
            if description != self.description:
                raise EngineError(
                    f"{self._standings[0].place} and {place} would answer differently: weights, --dtype and "
                    "--max-pixels have to be the same on all nodes"
                )

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method of any actor, or raise its VlmserveError.

        Raises PoolLostError, and EngineError if this call alone has failed.
        """
        errors = self._ray.exceptions
        tries = 0
        while True:
            standing = await self._least_loaded()
            standing.load += 1
            try:
                # in a thread: large arguments are copied, and wait for room
                result = await asyncio.to_thread(getattr(standing.actor, method).remote, *arguments)
                return await result
            except errors.RayTaskError as error:  # of the method
                cause = error.cause
                raise (cause if isinstance(cause, VlmserveError) else EngineError(_words(error))) from None
            except errors.RayActorError as error:
                tries += 1
                standing.lost += 1
                self._leave_out(standing, error)
                if tries == _TRIES:
                    raise EngineError(f"{tries} actors were lost while they worked on it") from None
            except (errors.ObjectStoreFullError, errors.OutOfDiskError) as error:
                logger.warning("waiting for room in Ray's object store: %s", _words(error))
                await asyncio.sleep(_STORE_FULL_S)
            except errors.RayError as error:  # an object was lost, with its node
                tries += 1
                if tries == _TRIES:
                    raise EngineError(_words(error)) from None
            finally:
                standing.load -= 1

    def notes(self) -> list[str]:
        """Return a clause for each actor that was lost with work under way."""
        return [
            f"{one.place} was lost, and {one.lost} items under way on it were done again"
            for one in self._standings
            if one.lost
        ]

    async def close(self) -> None:
        """End all actors and free their places."""
        from ray.util import remove_placement_group

        tasks = [*self._returning, *([self._ending] if self._ending else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for standing in self._standings:
            self._ray.kill(standing.actor)
        remove_placement_group(self._group)

    # ---- actors that come and go

    async def _least_loaded(self) -> _Standing:
        while True:
            if self._stopped is not None:
                raise PoolLostError(self._stopped)
            working = [standing for standing in self._standings if standing.is_in]
            if working:
                return min(working, key=lambda standing: standing.load)
            await self._changed.wait()

    def _leave_out(self, standing: _Standing, error: Exception) -> None:
        if not standing.is_in:
            return
        standing.is_in, standing.reason = False, "its process or node is gone"
        logger.warning("%s: %s", standing.place, standing.reason)
        logger.debug("%s", error)
        returning = asyncio.create_task(self._bring_back(standing))
        self._returning.add(returning)
        returning.add_done_callback(self._returning.discard)
        if self._ending is None and not any(one.is_in for one in self._standings):
            self._ending = asyncio.create_task(self._end())

    async def _bring_back(self, standing: _Standing) -> None:
        """Use an actor again once Ray has started it anew."""
        for pause_s in itertools.chain(_PAUSES_S, itertools.repeat(_PAUSES_S[-1])):
            try:
                place, description = await standing.actor.about.remote()
                break
            except self._ray.exceptions.RayTaskError as error:
                standing.reason = _words(error)
            except self._ray.exceptions.RayError as error:  # there is no place for it yet
                logger.debug("%s", error)
            await asyncio.sleep(pause_s)
        if description != self.description:
            standing.reason = "it came back with other weights or settings"
            logger.warning("%s is not used: %s", place, standing.reason)
            return
        standing.place, standing.is_in = place, True
        logger.warning("%s works again", place)
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        self._tell()

    async def _end(self) -> None:
        """End the pool after the limit, unless an actor comes back."""
        await asyncio.sleep(self._patience_s)
        reasons = "; ".join(f"{one.place}: {one.reason}" for one in self._standings)
        self._stopped = f"no actor has worked for {self._patience_s:g} s: {reasons}"
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _words(error: Any) -> str:
    """Return the message of one of Ray's errors on one line, or that of the error that a method raised."""
    cause = getattr(error, "cause", None)
    told = " ".join(str(error if cause is None else cause).split())
    if isinstance(cause, VlmserveError):
        return told
    return f"{type(cause or error).__name__}: {told}" if told else type(cause or error).__name__
