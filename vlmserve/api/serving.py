"""A started engine and what answers for it: messages between them, and a watch on the engine's processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, get_args

from vlmserve.config.engine_args import StartSettings
from vlmserve.config.settings import ServerSettings
from vlmserve.ipc.channels import LOOK_S, Channels, Heartbeat, Watchdog, Watched
from vlmserve.ipc.child import STACKS_SIGNAL, ReadyReport
from vlmserve.ipc.messages import TokenizerManagerInput
from vlmserve_common.process.child import ChildProcess

if TYPE_CHECKING:
    from vlmserve.api.app import ApiFrontend
    from vlmserve.api.control import AskEngine
    from vlmserve.api.encode_app import EncoderFrontend
    from vlmserve.ipc.engines import Engines

logger = logging.getLogger(__name__)

FAREWELL_S = 1.0
"""The seconds that answers of failed requests may take to get out. New requests still get one for as long."""
# How long a process that hangs gets to write its stacks to the log.
_STACKS_S = 1.0

Frontend: TypeAlias = "ApiFrontend | EncoderFrontend"
MakeFrontend: TypeAlias = "Callable[..., Frontend]"
"""Called as `vlmserve.api.app.make_frontend` is."""


@dataclass(frozen=True, kw_only=True)
class Child:
    """A child process, and its sign of life."""

    process: ChildProcess
    heartbeat: Heartbeat


@dataclass(kw_only=True)
class Serving:
    """An engine whose processes are ready.

    api: the address of messages from the engine. engines: the channels of each replica. on_failure: called once the
    engine is gone, with requests failed. on_problem: called when the engine cannot answer for now. failure: why the
    engine is gone. ask: sends control messages to the engine, while there is a frontend.
    """

    settings: ServerSettings
    model_name: str
    api: str
    engines: Sequence[Channels]
    start: StartSettings
    children: Sequence[Child]
    report: ReadyReport
    make_frontend: MakeFrontend
    on_failure: Callable[[], None] = lambda: None
    on_problem: Callable[[], None] = lambda: None
    failure: str | None = None
    ask: AskEngine = field(init=False)
    _watchdog: Watchdog | None = None

    @property
    def problem(self) -> str | None:
        """Return why requests cannot be answered now; None if they can."""
        return None if self._watchdog is None else self._watchdog.problem

    @contextlib.asynccontextmanager
    async def frontend(self, patience_s: Callable[[], float]) -> AsyncIterator[Frontend]:
        """Connect a frontend to the engine, in the running event loop. patience_s: the seconds that closing it may
        take."""
        from vlmserve.ipc.engines import connect
        from vlmserve.ipc.sockets import AsyncReceiver

        loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as stack:
            engines = connect(self.engines, self.settings.engine, stack)
            self.ask = engines.ask
            frontend = self.make_frontend(
                self.settings,
                max_model_len=self.report.max_model_len,
                auto_pixels=self.report.auto_pixels,
                model_name=self.model_name,
                send=engines.send,
                prepare=engines.prepare,
                control=engines.ask,
                start=self.start,
            )
            stack.push_async_callback(lambda: frontend.close(patience_s()))
            for child in self.children:
                loop.add_reader(child.process.sentinel, self._on_death, child.process, frontend)
                stack.callback(loop.remove_reader, child.process.sentinel)
            receiver = AsyncReceiver(
                self.api,
                get_args(TokenizerManagerInput),
                partial(_receive, frontend, engines),
                broken=lambda error: self._fail(f"the socket from the engine broke: {error}", frontend),
            )
            stack.callback(receiver.close)
            watching = loop.create_task(self._watch(frontend))
            stack.callback(watching.cancel)
            await frontend.start()
            yield frontend

    async def _watch(self, frontend: Frontend) -> None:
        children = {child.process.pid: child.process for child in self.children}

        def suspend(problem: str | None) -> None:
            if problem is None:
                logger.warning("all processes go on: requests are taken again")
            else:
                logger.warning("%s: requests are answered 503 until then", problem)
            frontend.suspend(problem)
            if problem is not None:
                self.on_problem()

        def give_up(one: Watched, reason: str) -> None:
            child = children[one.pid]
            self._fail(f"{reason}; the stacks of its threads are in the log", frontend)
            child.signal(STACKS_SIGNAL)
            child.signal(signal.SIGCONT)  # or a stopped one would take no signal
            asyncio.get_running_loop().call_later(_STACKS_S, child.kill)

        self._watchdog = Watchdog(
            [
                Watched(title=child.process.title, pid=child.process.pid, heartbeat=child.heartbeat)
                for child in self.children
            ],
            timeout_s=self.settings.watchdog_timeout_s,
            clock=time.monotonic,
            suspend=suspend,
            give_up=give_up,
        )
        while True:
            await asyncio.sleep(LOOK_S)
            self._watchdog.look()

    def _on_death(self, child: ChildProcess, frontend: Frontend) -> None:
        asyncio.get_running_loop().remove_reader(child.sentinel)
        self._fail(child.how_it_died(), frontend)

    def _fail(self, failure: str, frontend: Frontend) -> None:
        if self.failure is not None:
            return
        self.failure = failure
        logger.error("%s: pending requests are answered 503", failure)
        frontend.fail_all(f"the engine is gone ({failure})")
        self.on_failure()


def _receive(frontend: Frontend, engines: Engines, message: TokenizerManagerInput) -> None:
    try:
        frontend.handle(message)
    except Exception:
        logger.exception("a message from the engine could not be handled")
    engines.came(message)  # last, since an ended request may have to be taken back
