"""A Ray cluster: connecting to it, which nodes it has, and places for actors on them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import math
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlmserve_common.errors import EngineError, SettingsError
from vlmserve_common.installing import NAME, install
from vlmserve_common.version import __version__

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

logger = logging.getLogger(__name__)

HERE, OWN = "auto", "local"
"""Addresses: the cluster that this machine is part of, and a new one on this machine for this process alone."""
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+):(\d{1,5})")
_CONNECT_S, _LOOK_S, _POLL_S = 5.0, 60.0, 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine of the cluster. resources: what it has in all, such as {"CPU": 8.0, "GPU": 2.0}."""

    id: str
    address: str
    resources: Mapping[str, float]

    def room(self, bundle: Mapping[str, float]) -> int:
        """Return how many times a bundle of resources fits on the empty node."""
        wanted = {name: amount for name, amount in bundle.items() if amount > 0}
        return min((math.floor(self.resources.get(name, 0.0) / amount) for name, amount in wanted.items()), default=1)


def check_address(address: str, setting: str) -> None:
    """Raise SettingsError for what is no address of a cluster. setting: the flag in messages."""
    if address not in (HERE, OWN) and not _HOST_PORT.fullmatch(address):
        raise SettingsError(
            f"{setting} is {address!r}; it must be host:port of the cluster's head (6379 by default), {HERE} for the "
            f"cluster that this machine is part of, or {OWN} for one on this machine alone"
        )


class Cluster:
    """This process's connection to a cluster. If the process has one already, it is used, and `close` leaves it alone.

    All nodes have this version of vlmserve. Raises SettingsError for a wrong address and a missing library,
    EngineError for a cluster that cannot be used.
    """

    def __init__(self, address: str, *, setting: str = "--ray") -> None:
        check_address(address, setting)
        if importlib.util.find_spec("ray") is None:
            raise SettingsError(f"{setting} needs ray: {install('cluster')}")
        import ray

        self._owned = not ray.is_initialized()
        if self._owned:
            _connect(address, setting)
        try:
            self.nodes = _nodes()
            _check_versions(self.nodes)
            self.nodes = _nodes()  # one may have gone meanwhile
        except BaseException:
            self.close()
            raise

    def has(self, resource: str) -> bool:
        """Return True if any node has such a resource."""
        return any(node.resources.get(resource) for node in self.nodes)

    def free(self, bundle: Mapping[str, float]) -> int:
        """Return about how many times a bundle fits into what nobody has reserved, at least 1."""
        import ray

        free = ray.available_resources()
        rooms = [free.get(name, 0.0) / amount for name, amount in bundle.items() if amount > 0]
        return max(1, min([self.room(bundle), *map(math.floor, rooms)]))

    def room(self, bundle: Mapping[str, float]) -> int:
        """Return how many times a bundle fits on the empty nodes. A bundle is never on two nodes."""
        return sum(node.room(bundle) for node in self.nodes)

    def check_room(self, bundle: Mapping[str, float], count: int, *, what: str) -> str:
        """Return words for `count` actors with such a bundle. Raises EngineError if even the empty nodes have no room.

        what: the setting of the count.
        """
        wanted = f"{what} is {count}, with {_told(bundle)} each"
        if count > self.room(bundle):
            raise EngineError(f"{wanted}: the cluster has room for {self.room(bundle)}. Its nodes: {self._told()}")
        return wanted

    def reserve(self, bundle: Mapping[str, float], count: int, *, what: str, patience_s: float) -> PlacementGroup:
        """Reserve resources for `count` actors, spread over the nodes. Blocks while others have them, `patience_s` at
        the most.

        what: the setting of the count. Raises EngineError if there is no room.
        """
        from ray.util import placement_group, remove_placement_group

        wanted = self.check_room(bundle, count, what=what)
        bundle = {name: amount for name, amount in bundle.items() if amount > 0}
        group = placement_group([bundle] * count, strategy="SPREAD")
        end, told = time.monotonic() + patience_s, False
        try:
            while not group.wait(_POLL_S):
                if time.monotonic() > end:
                    raise EngineError(f"{wanted}: others have kept what is needed for {patience_s:g} s")
                if not told:
                    logger.warning("%s: waiting until others leave room for them", wanted)
                    told = True
        except BaseException:
            remove_placement_group(group)
            raise
        return group

    def close(self) -> None:
        """Disconnect. All actors of this process end."""
        import ray

        if self._owned:
            ray.shutdown()

    def _told(self) -> str:
        return "; ".join(f"{node.address} has {_told(node.resources)}" for node in self.nodes)


def _connect(address: str, setting: str) -> None:
    import ray

    found = _HOST_PORT.fullmatch(address)
    if found:  # Ray itself would try for a minute, and say much
        try:
            socket.create_connection((found[1].strip("[]"), int(found[2])), timeout=_CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise EngineError(f"{setting} {address}: no Ray cluster answers there: {error}") from None
    try:
        more: dict[str, Any] = {"include_dashboard": False} if address == OWN else {}
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **more)
    except Exception as error:  # of many types
        told = " ".join(str(error).split()) or type(error).__name__
        where = "no Ray cluster can be used there, without RAY_AUTH_MODE=token perhaps"  # `ray start` asks for it
        where = "this machine is in no Ray cluster" if address == HERE else where
        raise EngineError(f"{setting} {address}: {where}: {told}") from None


def _nodes() -> Sequence[Node]:
    import ray

    return [
        Node(id=one["NodeID"], address=one["NodeManagerAddress"], resources=_plain(one["Resources"]))
        for one in ray.nodes()
        if one["Alive"]
    ]


def _plain(resources: Mapping[str, float]) -> dict[str, float]:
    """Leave out what Ray counts for itself, such as each node's own name."""
    return {name: resources[name] for name in ("CPU", "GPU") if name in resources}


def _check_versions(nodes: Sequence[Node]) -> None:
    """Raise EngineError for nodes whose vlmserve is not this one. Nothing of vlmserve is imported on them."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(importlib.metadata.version)
    asked = [
        look.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
        ).remote(NAME)
        for node in nodes
    ]
    others = []
    for node, answer in zip(nodes, asked, strict=True):
        try:
            found = ray.get(answer, timeout=_LOOK_S)
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        except Exception as error:  # of many types
            if all(other.id != node.id for other in _nodes()):
                continue  # Ray lists a node for a while after its end
            raise EngineError(f"node {node.address} does not work: {' '.join(str(error).split())}") from None
        if found != __version__:
            others.append(f"{node.address} has {found}")
    if others:
        raise EngineError(
            f"all nodes need the same version of {NAME}: here it is {__version__}; {'; '.join(sorted(set(others)))}"
        )


def _told(resources: Mapping[str, float]) -> str:
    names = {"CPU": "CPUs", "GPU": "GPUs"}
    return ", ".join(f"{resources[name]:g} {words}" for name, words in names.items() if resources.get(name)) or "none"
