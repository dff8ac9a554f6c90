"""A replica: a server whose HTTP is Serve's.

Serve calls `check_health` first, and again every few seconds. The first call starts the engine, so that its errors are
those of the deployment. A replica whose engine dies answers what is pending with 503 and ends, and Serve starts another
one. When a replica is removed, Serve sends it no more requests and waits for those under way; then the engine ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from vlmserve.api.launch import start_server
from vlmserve.api.serving import FAREWELL_S, Frontend, Serving
from vlmserve.config.settings import ServerSettings
from vlmserve.ipc.control_messages import GetServerInfoReq, ServerInfo
from vlmserve.ray.service.choosing import REQUESTS, STARTED, Order
from vlmserve.ray.service.plan import Bundle, Role
from vlmserve.ray.service.scaling import USE, use_of
from vlmserve.ray.service.versions import check_version
from vlmserve_common.errors import EngineError
from vlmserve_common.logs import configure_logging

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from vlmserve.ray.service.nodes import Nodes

logger = logging.getLogger(__name__)

# Which servers use which others, and the setting that names these.
_WORKS_FOR = {
    ("decode", "prefill"): "prefill_urls",
    ("decode", "encode"): "encoder_urls",
    ("prefill", "encode"): "encoder_urls",
    ("all", "encode"): "encoder_urls",
}
_LOOK_S = 0.5
_INFO_S = 5.0


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan:
    """What a replica is told. workers: how many servers of each role work for it. slots: requests computed together.
    target_use: see `Deployment`. bundles: what it has on each of its machines."""

    version: str
    settings: ServerSettings
    workers: dict[Role, int]
    slots: int
    target_use: float
    bundles: list[Bundle]

    @property
    def role(self) -> Role:
        """Return the replica's part of the work."""
        return self.settings.engine.role


class Server:
    """A replica: it answers orders of fronts, or only works for others."""

    def __init__(
        self, plan: ReplicaPlan, addresses: DeploymentHandle | None = None, *workers: DeploymentHandle
    ) -> None:
        """Note what to do. workers: deployments that come first, since this one waits for them."""
        self._plan = plan
        self._addresses = addresses
        self._serving: Serving | None = None
        self._inner: ASGIApp | None = None
        self._nodes: Nodes | None = None
        self._stack = ExitStack()  # of the processes
        self._connected = contextlib.AsyncExitStack()
        self._urls: tuple[str, ...] = ()  # where this replica works for others
        self._started = time.time()
        self._orders = 0
        self._name = serve.get_replica_context().replica_id.unique_id

    async def check_health(self) -> None:
        """Start the server, at first; later raise EngineError if it cannot answer."""
        if self._serving is None:
            await self._start()
        serving = self._serving
        assert serving is not None
        reason = serving.failure or serving.problem
        if reason is not None:
            raise EngineError(reason)
        if self._nodes is not None:
            await self._nodes.check()
        if self._addresses is not None and self._urls:
            await self._addresses.put.remote(self._plan.role, self._name, self._urls)

    async def answer(self, order: Order) -> AsyncIterator[str | list[MutableMapping[str, Any]]]:
        """Answer a front's request: yield this replica's name, then ASGI messages as they come."""
        assert self._inner is not None
        messages: asyncio.Queue[MutableMapping[str, Any] | None] = asyncio.Queue()
        body: bytes | None = order.body

        async def receive() -> MutableMapping[str, Any]:
            nonlocal body
            if body is None:
                await asyncio.Future()  # the front cancels the call if the client leaves
            whole, body = body, None
            return {"type": "http.request", "body": whole, "more_body": False}

        async def run(app: ASGIApp) -> None:
            try:
                await app(dict(order.scope), receive, messages.put)
            finally:
                messages.put_nowait(None)

        yield self._name
        self._orders += 1
        work = asyncio.get_running_loop().create_task(run(self._inner))
        try:
            over = False
            while not over:
                batch = [await messages.get()]
                while not messages.empty():
                    batch.append(messages.get_nowait())
                over = batch[-1] is None
                made = [message for message in batch if message is not None]
                if made:
                    yield made
            await work
        finally:
            self._orders -= 1
            work.cancel()

    def record_routing_stats(self) -> dict[str, float]:
        """Report figures to the routers of fronts."""
        return {STARTED: self._started, REQUESTS: self._orders}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report figures to Serve's controller."""
        try:
            stats = (await self._info()).stats
        except (EngineError, TimeoutError):
            return {USE: 1.0}  # as busy as it should be
        return {USE: use_of(stats, self._plan.slots) / self._plan.target_use}

    def _takes_requests(self, app: ASGIApp) -> None:
        self._inner = app

    async def _start(self) -> None:
        plan = self._plan
        check_version(plan.version)
        configure_logging(plan.settings.log_level, f"{plan.role}-{self._name}")
        try:
            settings = await self._settled(plan.settings)
            starts: list[Any] = []
            if plan.settings.engine.nnodes > 1:
                from vlmserve.ray.service.nodes import Nodes

                self._nodes = Nodes(settings, plan.bundles)
                settings = self._nodes.settings
                starts.append(self._nodes.start(plan.version))
            starts.append(asyncio.to_thread(start_server, settings, self._stack))
            self._serving = serving = (await asyncio.gather(*starts))[-1]
            frontend: Frontend = await self._connected.enter_async_context(
                serving.frontend(lambda: settings.shutdown_timeout_s)
            )
        except BaseException:
            await self.stop()
            raise
        if plan.role in ("prefill", "encode"):
            self._urls = (await self._info()).urls
        serving.on_failure = self._ends
        self._connected.callback(frontend.fail_all, "the server is shutting down")  # what Serve did not wait for
        self._takes_requests(frontend.app)

    async def _settled(self, settings: ServerSettings) -> ServerSettings:
        """Return settings with the addresses of this replica, and of those that work for it."""
        engine, place = settings.engine, ray.util.get_node_ip_address()
        number = serve.get_replica_context().rank.rank  # a replaced replica has that of the one before
        if engine.role == "prefill":
            engine = replace(engine, prefill_listen=_listen(place, engine.prefill_listen, number, engine.num_replicas))
        elif engine.role == "encode":
            engine = replace(engine, encoder_listen=_listen(place, engine.encoder_listen, number, 1))
        for role, count in self._plan.workers.items():
            if (engine.role, role) in _WORKS_FOR:
                urls: dict[str, Any] = {_WORKS_FOR[engine.role, role]: ",".join(await self._urls_of(role, count))}
                engine = replace(engine, **urls)
        return replace(settings, engine=engine)

    async def _urls_of(self, role: Role, count: int) -> list[str]:
        """Return the URLs of all servers of a role, as soon as there are all."""
        assert self._addresses is not None
        until = time.monotonic() + self._plan.settings.startup_timeout_s
        while len(told := await self._addresses.get.remote(role)) < count:
            if time.monotonic() > until:
                raise EngineError(
                    f"{len(told)} of {count} servers with --role {role} were ready after "
                    f"{self._plan.settings.startup_timeout_s:g} s; --startup-timeout-s allows more"
                )
            await asyncio.sleep(_LOOK_S)
        return [url for urls in told for url in urls]

    async def _info(self) -> ServerInfo:
        assert self._serving is not None
        async with asyncio.timeout(_INFO_S):
            info = await self._serving.ask(GetServerInfoReq())
        if not isinstance(info, ServerInfo):
            raise EngineError("the engine tells nothing about itself")
        return info

    def _ends(self) -> None:
        """End this process soon: its engine is gone. Serve then starts another replica."""
        asyncio.get_running_loop().call_later(2 * FAREWELL_S, os._exit, 1)

    async def stop(self) -> None:
        """End the server, whatever there is of it."""
        if self._serving is not None:
            self._serving.on_failure = lambda: None
        try:
            await self._connected.aclose()
        finally:
            await asyncio.to_thread(self._stack.close)
            if self._nodes is not None:
                await self._nodes.stop()


class DeployedServer(Server):
    """A replica that ends when Serve says so."""

    async def __del__(self) -> None:
        """End the server. Serve calls this once its requests have ended."""
        await self.stop()


class Through(Starlette):
    """The application that Serve knows: it hands requests to the server's own, once there is one."""

    inner: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.inner is not None:
            await self.inner(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def make_through() -> Through:
    """Return an application without a server."""
    return Through()


class IngressServer(DeployedServer):
    """A replica that Serve's proxies send HTTP requests to. app: Serve sets it."""

    app: Through

    def _takes_requests(self, app: ASGIApp) -> None:
        self.app.inner = app


def _listen(host: str, given: str, number: int, ports: int) -> str:
    """Return where a server listens for others: this node's address, and ports of its own. given: the setting."""
    port = int(given.rpartition(":")[2])
    return f"{host}:{port + number * ports if port else 0}"
