"""The servers behind a router: which there are, how each is, and which gets a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from vlmserve.router.demand import Wish
from vlmserve.router.names import servers_of
from vlmserve.router.settings import DNS, Role, RouterSettings
from vlmserve.router.upstream import Headers, Server, ServerLostError
from vlmserve.routing.replicas import ANSWER_TOKENS, ReplicaRouter
from vlmserve_common.errors import first_line

logger = logging.getLogger(__name__)

State: TypeAlias = Literal["unknown", "healthy", "unhealthy", "paused", "draining"]
# Of a server's /metrics: what it has to do, whoever asked for it
_LOAD = re.compile(rb"^vlmserve:num_requests_(?:running|waiting)\{[^}]*\} (\S+)$", re.MULTILINE)
REQUEST_TOKENS = 2 * ANSWER_TOKENS
"""The load of a request whose prompt is not known."""


@dataclass(kw_only=True, eq=False)
class Worker:
    """A server. slot: its number among those it is chosen from. why: what is wrong. models: None if not known.

    failures: health checks in a row that got no answer. in_flight: requests that this router has sent it.
    """

    url: str
    role: Role
    server: Server
    slot: int
    state: State = "unknown"
    why: str = ""
    models: frozenset[str] | None = None
    failures: int = 0
    in_flight: int = 0
    requests: int = 0
    look: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def answers(self) -> bool:
        """Return True if requests of clients go there."""
        return answers(self.role)

    @property
    def takes(self) -> bool:
        """Return True if the server may get requests. One that was not looked at yet is tried."""
        return self.state in ("healthy", "unknown")

    def suspect(self, why: str) -> None:
        """Send no more requests until a health check, which comes at once, says that all is well."""
        if self.takes:
            self.state, self.why = "unhealthy", why
            logger.warning("%s gets no requests: %s", self.url, why)
        self.look.set()


@dataclass(kw_only=True, eq=False)
class Place:
    """Where a request goes. rid: names it among those in flight."""

    worker: Worker
    rid: str


class Workers:
    """All servers. `start` begins to look after them, in the running event loop; `close` ends that."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        method = settings.http.engine.load_balance_method
        # of servers that answer, and of those that work for them
        self._choosers = {answers: ReplicaRouter(0, method=method) for answers in (True, False)}
        self._all: dict[str, Worker] = {}
        self._following: list[asyncio.Task[None]] = []
        key = settings.upstream_api_key
        self.headers: Headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._all.values()))

    def get(self, url: str) -> Worker | None:
        """Return the server of a URL, if there is one."""
        return self._all.get(url)

    def start(self) -> None:
        """Take the servers of the command line, and begin to look after them."""
        for role, url in self._settings.servers:
            if url.startswith(DNS):
                self._following.append(asyncio.create_task(self._follow(url.removeprefix(DNS), role)))
            else:
                self.add(url.rstrip("/"), role)

    async def close(self) -> None:
        """End all connections and health checks."""
        tasks = self._following + [task for worker in self for task in worker.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.cut("the router ends")

    def cut(self, why: str) -> None:
        """End all requests."""
        for worker in self:
            worker.server.cut(why)

    def add(self, url: str, role: Role) -> Worker:
        """Take a server that is not there yet."""
        assert url not in self._all
        server = Server(url, connect_timeout_s=self._settings.connect_timeout_s)
        worker = Worker(url=url, role=role, server=server, slot=self._choosers[answers(role)].add())
        self._all[url] = worker
        self._run(worker, self._look_after(worker))
        return worker

    async def _follow(self, url: str, role: Role) -> None:
        """Add the servers of a name as their addresses come, and drain them as these go. While the name cannot be
        looked up, all stays as it is."""
        ours: set[str] = set()
        told = ""
        while True:
            try:
                found = await servers_of(url)
            except (OSError, UnicodeError) as error:
                if (why := first_line(error)) != told:
                    logger.warning("%s%s cannot be looked up, so its servers stay as they are: %s", DNS, url, why)
                    told = why
            else:
                told = ""
                for gone in ours - found:
                    if (worker := self._all.get(gone)) is not None:
                        self.drain(worker)
                # one that still drains, or was added by somebody else, is looked at again
                new = {one for one in found - ours if one not in self._all}
                for one in sorted(new):
                    self.add(one, role)
                ours = ours & found | new
            await asyncio.sleep(self._settings.health_check_interval_s)

    def drain(self, worker: Worker) -> None:
        """Send a server no more requests, and drop it when those in flight have ended or `drain_timeout_s` is over."""
        if worker.state == "draining":
            return
        worker.state, worker.why = "draining", ""
        if not worker.in_flight:
            worker.idle.set()
        self._run(worker, self._drop_when_idle(worker))

    def answering(self, tried: Sequence[Worker] = (), model: str = "") -> list[Worker]:
        """Return the servers that may answer a request. tried: those that did not. model: servers of other models are
        left out, if there is one that has it."""
        there = [one for one in self._all.values() if one.answers and one.takes and one not in tried]
        return [one for one in there if one.models is not None and model in one.models] or there

    def place(self, wish: Wish, tried: Sequence[Worker], at: Worker | None = None) -> Place | None:
        """Choose the server that answers a request, and count the request as in flight there. None: there is none.

        tried: servers that are not to be asked. at: the only one that may answer.
        """
        among = [one for one in self.answering(tried, wish.model) if at is None or one is at]
        if not among:
            return None
        [rid] = wish.demand.rids
        slot = self._choosers[True].place(wish.demand, [one.slot for one in among])
        worker = next(one for one in among if one.slot == slot)
        self._count(worker, 1)
        return Place(worker=worker, rid=rid)

    def ended(self, place: Place) -> None:
        """Note that nothing more comes from a place."""
        self._choosers[True].end(place.rid)
        self._count(place.worker, -1)

    def load_of(self, worker: Worker) -> int:
        """Return the tokens in flight at a server, as far as is known."""
        return self._choosers[worker.answers].loads[worker.slot]

    async def check(self, worker: Worker) -> None:
        """Look how a server is, and what it has to do for others than this router."""
        try:
            async with asyncio.timeout(self._settings.health_check_timeout_s):
                status, body = await worker.server.get(b"/health")
                found, why = _health(status, body)
                if found != "unhealthy":
                    await self._look_inside(worker)
        except TimeoutError:
            worker.failures += 1
            why = f"/health did not answer in {self._settings.health_check_timeout_s:g} s"
            if worker.failures < self._settings.health_failure_threshold:
                return
            # What hangs will not answer those that wait for it, either.
            worker.server.cut(why)
            found = "unhealthy"
        except ServerLostError as error:
            found, why = "unhealthy", str(error)
        else:
            worker.failures = 0
        if worker.state in ("draining", found):
            worker.why = why if worker.state == found else worker.why
            return
        if found == "healthy" and worker.state == "unhealthy":
            self._choosers[worker.answers].forget(worker.slot)  # it may be another process, whose caches are empty
        if found == "healthy":
            logger.info("%s (%s) is healthy", worker.url, worker.role)
        else:
            logger.warning("%s gets no requests: %s", worker.url, why)
        worker.state, worker.why = found, why

    async def _look_inside(self, worker: Worker) -> None:
        status, body = await worker.server.get(b"/v1/models", self.headers)
        if status == 200:
            worker.models = frozenset(str(model.get("id")) for model in json.loads(body).get("data", ()))
        elif status == 401 and self._settings.upstream_api_key is not None and worker.state == "unknown":
            logger.warning("%s does not take --upstream-api-key: its answer is 401", worker.url)
        _, page = await worker.server.get(b"/metrics", self.headers)
        others = sum(map(float, _LOAD.findall(page))) - worker.in_flight
        self._choosers[worker.answers].told(worker.slot, int(max(0, others)) * REQUEST_TOKENS)

    async def _look_after(self, worker: Worker) -> None:
        interval_s, loop = self._settings.health_check_interval_s, asyncio.get_running_loop()
        while True:
            began = loop.time()
            worker.look.clear()
            try:
                await self.check(worker)
            except (ValueError, AttributeError, TypeError) as error:
                worker.suspect(f"its answers are not those of a server: {first_line(error)}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await worker.look.wait()
            await asyncio.sleep(began + min(1.0, interval_s) - loop.time())  # not again and again

    async def _drop_when_idle(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await worker.idle.wait()
        except TimeoutError:
            logger.warning("%s: %d requests are cut off (--drain-timeout-s)", worker.url, worker.in_flight)
        worker.server.cut("the router drops this server")
        await worker.idle.wait()
        del self._all[worker.url]
        self._choosers[worker.answers].remove(worker.slot)
        logger.info("%s was dropped", worker.url)
        for task in worker.tasks - {asyncio.current_task()}:
            task.cancel()

    def _count(self, worker: Worker, by: int) -> None:
        worker.in_flight += by
        worker.requests += by > 0
        if worker.state == "draining" and not worker.in_flight:
            worker.idle.set()

    def _run(self, worker: Worker, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        worker.tasks.add(task)
        task.add_done_callback(worker.tasks.discard)


def answers(role: Role) -> bool:
    """Return True for a server that clients' requests go to."""
    return role in ("replica", "decode")


def _health(status: int, body: bytes) -> tuple[State, str]:
    """Return the state that an answer of /health tells, and what is wrong."""
    if status == 200:
        paused = b'"paused"' in body
        return ("paused", "its engine is paused") if paused else ("healthy", "")
    try:
        why = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        why = ""
    return "unhealthy", f"/health answers {status}{': ' if why else ''}{why[:200]}"
