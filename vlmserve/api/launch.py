"""The composition root: starts the processes of a server, connects them, and stops them again.

The parts of a server are made in order, and undone backwards whatever happens. Cheap checks come first: API keys, a
local model's config.json, the device. The first part is the listening socket, so that a taken port is known before a
model is loaded. Then come private directories, the process that all children are forks of, the children, their
readiness, and HTTP.

A server has three processes. This one has HTTP, the TokenizerManager, and media unless these have processes of their
own. The scheduler has the model. The detokenizer makes text. Each replica (`--dp-size`) has its own scheduler,
detokenizer and ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from processors.pool import prepare_processes
from vlmserve.api.api_keys import read_api_keys
from vlmserve.api.event_loop import ApiEventLoop, forget_turns
from vlmserve.api.listening import address_of, announce, listen
from vlmserve.config.engine_args import EngineArgs, StartSettings
from vlmserve.config.model_path import DEFAULT_MODEL_NAME, check_model, checked_model, local_folder
from vlmserve.config.settings import ServerSettings
from vlmserve.ipc.channels import LOOK_S, Channels, Heartbeat, Watchdog, Watched
from vlmserve.ipc.child import (
    LAST_WORDS_S,
    STACKS_SIGNAL,
    ChildMain,
    Ready,
    ReadyReport,
    of_all,
    start_child,
    wait_until_ready,
)
from vlmserve.ipc.messages import TokenizerManagerInput
from vlmserve.ipc.private_dir import PrivateDirectory, shared_memory_base, socket_base
from vlmserve_common.logs import configure_logging
from vlmserve_common.process.child import ChildProcess, keep_socket_in
from vlmserve_common.process.limits import raise_open_files
from vlmserve_common.process.stop_signals import (
    STOP_SIGNALS,
    StopRequested,
    ignore_stop_signals,
    stop_signals_held,
    stop_signals_raise,
)
from vlmserve_common.process.threads import exit_within

if TYPE_CHECKING:
    from vlmserve.api.app import ApiFrontend
    from vlmserve.api.encode_app import EncoderFrontend
    from vlmserve.api.http_server import HttpServer
    from vlmserve.ipc.engines import Engines

logger = logging.getLogger(__name__)

# How long answers of failed requests may take to get out; after a child's death, new requests still get one so long.
_FAREWELL_S = 1.0
_BACKLOG = 2048
# How long a process that hangs gets to write its stacks to the log.
_STACKS_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Child:
    """A child process, and its sign of life."""

    process: ChildProcess
    heartbeat: Heartbeat


def make_directories(settings: ServerSettings, stack: ExitStack) -> tuple[Channels, StartSettings]:
    """Make the private directories, which `stack` removes; return the channels and start settings in them."""
    runtime_dir = stack.enter_context(PrivateDirectory(socket_base())).path
    keep_socket_in(runtime_dir)
    shared_dir = stack.enter_context(PrivateDirectory(shared_memory_base())).path
    start = StartSettings(
        shared_dir=shared_dir,
        log_level=settings.log_level,
        startup_timeout_s=settings.startup_timeout_s,
        ready_by=time.monotonic() + settings.startup_timeout_s,
    )
    return Channels.in_directories(runtime_dir, shared_dir), start


def prepare_children() -> None:
    """Start the process that all children are forks of, which imports torch once for all of them."""
    # OpenMP's threads, where torch computes with several, would take cores from other work while they wait.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # torch asks for huge pages: weights and the KV cache are read through far fewer of the kernel's tables.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Texts come one by one. More threads would do nothing, and the library warns of them before each fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    prepare_processes()


def start_children(
    mains: Sequence[tuple[str, ChildMain]],
    args: EngineArgs,
    channels: Channels,
    start: StartSettings,
    stack: ExitStack,
) -> list[Child]:
    """Start processes of these names and work, which `stack` stops."""
    children: list[Child] = []
    for name, main in mains:
        with stop_signals_held():  # until it is sure that the child will be stopped
            process = start_child(name, main, args, channels, start)
            stack.callback(process.stop)
        children.append(Child(process=process, heartbeat=channels.heartbeat(name)))
    return children


def run_rank_process(args: EngineArgs, channels: Channels, start: StartSettings, ready: Ready, *, rank: int) -> None:
    """Run the process of a rank other than the first, which the scheduler process has."""
    from vlmserve.engine.process import run_rank_process

    run_rank_process(args, channels, start, ready, rank=rank)


def rank_mains(args: EngineArgs) -> list[tuple[str, ChildMain]]:
    """Return the names and work of the processes of this node's ranks, without rank 0."""
    return [(f"rank-{rank}", partial(run_rank_process, rank=rank)) for rank in args.own_ranks if rank]


def serve_node(settings: ServerSettings) -> int:
    """Let this node's ranks work for the server of node 0, until it ends, a rank dies or a signal arrives.

    Returns the exit status. Call it in the main thread. Raises the errors of `launch_server`.
    """
    with ExitStack() as stack:
        stack.enter_context(stop_signals_raise())
        try:
            args = _settle_model(settings)[0].engine
            channels, start = make_directories(settings, stack)
            prepare_children()
            started = start_children(rank_mains(args), args, channels, start, stack)
            children = [child.process for child in started]
            wait_until_ready(children, start, grace_s=LAST_WORDS_S)
            logger.info("ready: ranks %s work for %s", ", ".join(map(str, args.own_ranks)), args.dist_init_addr)
            ended = wait([child.sentinel for child in children])
            died = next(child for child in children if child.sentinel in ended)
            logger.error("stopped: %s", died.how_it_died())
            return 1
        except StopRequested as stop:
            logger.info("stopped by %s", stop)
            return 0
        finally:
            ignore_stop_signals()


Frontend: TypeAlias = "ApiFrontend | EncoderFrontend"
MakeFrontend: TypeAlias = "Callable[..., Frontend]"
"""Called as `vlmserve.api.app.make_frontend` is."""


def run_scheduler_process(args: EngineArgs, channels: Channels, start: StartSettings, ready: Ready) -> None:
    """Run the scheduler process."""
    from vlmserve.engine.process import run_scheduler

    run_scheduler(args, channels, start, ready)


def run_encoder_process(args: EngineArgs, channels: Channels, start: StartSettings, ready: Ready) -> None:
    """Run the process of an encoder (`--role encode`)."""
    from vlmserve.engine.encode_process import run_encoder

    run_encoder(args, channels, start, ready)


def run_detokenizer_process(args: EngineArgs, channels: Channels, start: StartSettings, ready: Ready) -> None:
    """Run the detokenizer process."""
    from vlmserve.frontend.detokenizer_process import run_detokenizer

    run_detokenizer(args, channels, start, ready)


def launch_server(
    settings: ServerSettings,
    *,
    scheduler: ChildMain = run_scheduler_process,
    detokenizer: ChildMain = run_detokenizer_process,
    make_frontend: MakeFrontend | None = None,
) -> int:
    """Serve until a signal (SIGINT, SIGTERM) or a failure; returns the exit status. Call it in the main thread.

    A signal stops new connections and lets running requests finish, for `shutdown_timeout_s` at most; a second one
    does not wait. Raises VlmserveError or OSError, with a message fit for the user, if the server cannot start.
    """
    configure_logging(settings.log_level, "node" if settings.engine.node_rank else "api")
    _check_first(settings.engine)
    if settings.engine.node_rank:
        return serve_node(settings)
    if settings.otlp_traces_endpoint is not None:
        from vlmserve.api.tracing import check_extra

        check_extra()  # before minutes go by with the model
    if settings.database_url is not None or settings.file_store_url is not None:
        from vlmserve.api.stores.opening import check_stores

        check_stores(settings)
    keys = read_api_keys(settings)  # so that errors in them show now
    raise_open_files()
    if settings.port_file:
        Path(settings.port_file).unlink(missing_ok=True)  # a waiting reader must not see an older server's port
    with ExitStack() as stack:
        stack.enter_context(stop_signals_raise())
        if settings.port_file:
            stack.callback(Path(settings.port_file).unlink, missing_ok=True)
        try:
            listener = stack.enter_context(contextlib.closing(listen(settings.host, settings.port)))
            if keys is None and not address_of(listener).is_loopback:
                logger.warning(
                    "--host is %s, and there is no API key: everyone who reaches this address may use the server; set "
                    "VLMSERVE_API_KEY or --api-key-file",
                    settings.host,
                )
            settings, model_name = _settle_model(settings)
            channels, start = make_directories(settings, stack)
            # The scheduler sets its own number. This process's work, pictures, has threads or processes of its own.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            prepare_children()  # this process has its own imports meanwhile
            encodes_only = settings.engine.role == "encode"
            if make_frontend is None and encodes_only:
                from vlmserve.api.encode_app import make_encoder_frontend

                make_frontend = make_encoder_frontend
            elif make_frontend is None:
                from vlmserve.api.app import make_frontend as http_frontend

                make_frontend = http_frontend
                if not settings.engine.media_processes or settings.engine.enable_mm_embeds:
                    import torch  # noqa: F401  # not only when the first picture waits for it
            mains: list[tuple[str, ChildMain]] = [("scheduler", scheduler), ("detokenizer", detokenizer)]
            mains = [("encoder", run_encoder_process)] if encodes_only else [*mains, *rank_mains(settings.engine)]
            engines = channels.replicas(settings.engine.num_replicas)
            children = [child for own in engines for child in start_children(mains, settings.engine, own, start, stack)]
            for child in children:  # all at once, for each may have something to finish
                stack.callback(child.process.tell_to_stop)
            # processes that wait for an encoder or a rank have the better error if that does not come
            args = settings.engine
            grace_s = LAST_WORDS_S if args.num_encoders or args.world_size > 1 else 0.0
            reports = wait_until_ready([child.process for child in children], start, grace_s=grace_s)
            serving = _Serving(
                settings=settings,
                model_name=model_name,
                api=channels.api,
                engines=engines,
                start=start,
                children=children,
                listener=listener,
            )
            status = _run(ApiEventLoop(), serving.run(of_all(reports.values()), make_frontend))
        except StopRequested as stop:
            logger.info("stopped by %s before the server was ready", stop)
            return 0
        finally:
            ignore_stop_signals()  # from here on everything is short, and must be done
    exit_within(serving.patience_s, status)
    return status


def _run(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine in a new event loop, as `asyncio.run` does, which would wait for the threads of `to_thread`."""
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(_call_off(asyncio.all_tasks(loop), _FAREWELL_S))
        loop.close()


async def _call_off(tasks: Collection[asyncio.Task[Any]], patience_s: float) -> None:
    """Cancel tasks, and wait for their ends. A task that waits for a thread may not end."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=patience_s)


@dataclass(kw_only=True)
class _Serving:
    """The server from its readiness to its end: HTTP, the messages from the detokenizer, and a watch on the children.

    api: the address of messages from the engine. engines: the channels of each replica. failure: why the server ends,
    if it has to. watchdog: None until there are children to watch. ends_at: the loop's time until which running work
    is waited for; None until the end begins.
    """

    settings: ServerSettings
    model_name: str
    api: str
    engines: Sequence[Channels]
    start: StartSettings
    children: Sequence[Child]
    listener: socket.socket
    failure: str | None = None
    watchdog: Watchdog | None = None
    ends_at: float | None = None

    @property
    def patience_s(self) -> float:
        """The seconds that the end may still wait for threads: never none, for most of them end at once."""
        left = self.settings.shutdown_timeout_s if self.ends_at is None else self.ends_at - time.monotonic()
        return max(_FAREWELL_S, left)

    async def run(self, report: ReadyReport, make_frontend: MakeFrontend) -> int:
        from vlmserve.api.http_server import HttpServer
        from vlmserve.ipc.engines import connect
        from vlmserve.ipc.sockets import AsyncReceiver

        loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as stack:
            engines = connect(self.engines, self.settings.engine, stack)
            frontend = make_frontend(
                self.settings,
                max_model_len=report.max_model_len,
                auto_pixels=report.auto_pixels,
                model_name=self.model_name,
                send=engines.send,
                prepare=engines.prepare,
                control=engines.ask,
                start=self.start,
            )
            stack.push_async_callback(lambda: frontend.close(self.patience_s))
            server = HttpServer(frontend.app, self.settings, backlog=_BACKLOG, started=self._announce)
            gc.freeze()  # these objects stay: looking through them would stop answers for a tenth of a second
            for number in STOP_SIGNALS:
                loop.add_signal_handler(number, self._on_signal, server, frontend, number)
            processes = [child.process for child in self.children]
            for process in processes:
                loop.add_reader(process.sentinel, self._on_death, process, frontend, server)
            receiver = AsyncReceiver(
                self.api,
                get_args(TokenizerManagerInput),
                partial(self._receive, frontend, engines),
                broken=lambda error: self._fail(f"the socket from the engine broke: {error}", frontend, server),
            )
            watching = loop.create_task(self._watch(frontend, server))
            frontend.start()
            try:
                await server.serve(sockets=[self.listener])
            finally:
                watching.cancel()
                for process in processes:
                    loop.remove_reader(process.sentinel)
                receiver.close()
                others = asyncio.all_tasks() - {asyncio.current_task()}
                await _call_off(others, self.patience_s)
            if self.failure is None:
                logger.info("stopped")
                return 0
            logger.error("stopped: %s", self.failure)
            return 1

    def _announce(self) -> None:
        forget_turns()  # of the start
        announce(self.listener, self.settings.port_file, f"serves {self.model_name}")

    async def _watch(self, frontend: Frontend, server: HttpServer) -> None:
        children = {child.process.pid: child.process for child in self.children}

        def suspend(problem: str | None) -> None:
            if problem is None:
                logger.warning("all processes go on: requests are taken again")
            else:
                logger.warning("%s: requests are answered 503 until then", problem)
            frontend.suspend(problem)
            if problem is not None and server.should_exit:  # nothing that is waited for will come
                self._cut_short(server, frontend)

        def give_up(one: Watched, reason: str) -> None:
            child = children[one.pid]
            self._fail(f"{reason}; the stacks of its threads are in the log", frontend, server)
            child.signal(STACKS_SIGNAL)
            child.signal(signal.SIGCONT)  # or a stopped one would take no signal
            asyncio.get_running_loop().call_later(_STACKS_S, child.kill)

        self.watchdog = Watchdog(
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
            self.watchdog.look()

    def _on_signal(self, server: HttpServer, frontend: Frontend, number: int) -> None:
        name, patience_s = signal.Signals(number).name, self.settings.shutdown_timeout_s
        if server.should_exit:
            logger.info("%s again: not waiting any longer", name)
            self.ends_at = time.monotonic()
            self._cut_short(server, frontend)
            return
        problem = None if self.watchdog is None else self.watchdog.problem
        if problem is None:
            logger.info("%s: running requests get %g s to finish", name, patience_s)
        else:
            logger.info("%s: not waiting for running requests: %s", name, problem)
            patience_s = 0.0
        server.should_exit = True
        self.ends_at = time.monotonic() + patience_s
        asyncio.get_running_loop().call_later(patience_s, self._cut_short, server, frontend)

    def _cut_short(self, server: HttpServer, frontend: Frontend) -> None:
        frontend.fail_all("the server is shutting down")
        asyncio.get_running_loop().call_later(_FAREWELL_S, setattr, server, "force_exit", True)

    def _on_death(self, child: ChildProcess, frontend: Frontend, server: HttpServer) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(child.sentinel)
        self._fail(child.how_it_died(), frontend, server)

    def _fail(self, failure: str, frontend: Frontend, server: HttpServer) -> None:
        if self.failure is not None:
            return
        self.failure = failure
        self.ends_at = time.monotonic() + self.settings.shutdown_timeout_s
        logger.error("%s: pending requests are answered 503", failure)
        frontend.fail_all(f"the engine is gone ({failure})")
        loop = asyncio.get_running_loop()
        loop.call_later(_FAREWELL_S, setattr, server, "should_exit", True)
        loop.call_later(2 * _FAREWELL_S, setattr, server, "force_exit", True)

    def _receive(self, frontend: Frontend, engines: Engines, message: TokenizerManagerInput) -> None:
        try:
            frontend.handle(message)
        except Exception:
            logger.exception("a message from the engine could not be handled")
        engines.came(message)  # last, since an ended request may have to be taken back


def _check_first(args: EngineArgs) -> None:
    """Check the model, unless it may have to be downloaded, and a device and a template that were asked for."""
    if (folder := local_folder(args.model)) is not None:
        check_model(folder, args.max_model_len)
        if args.chat_template is not None:
            from vlmserve.frontend.chat_template import load_chat_template

            load_chat_template(folder, args.chat_template)
    if args.device not in ("auto", "cpu"):
        from vlmserve_common.compute.devices import resolve_device  # torch takes seconds to import

        resolve_device(args.device)


def _settle_model(settings: ServerSettings) -> tuple[ServerSettings, str]:
    """Return settings whose model is a folder on this machine, and the model's name for clients."""
    model = settings.engine.model
    name = settings.served_model_name or model or DEFAULT_MODEL_NAME
    folder = checked_model(settings.engine)
    return replace(settings, engine=replace(settings.engine, model=str(folder))), name
