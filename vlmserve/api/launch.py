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
from collections.abc import Collection, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from processors.pool import prepare_processes
from vlmserve.api.api_keys import read_api_keys
from vlmserve.api.event_loop import ApiEventLoop, forget_turns
from vlmserve.api.listening import address_of, announce, listen
from vlmserve.api.serving import FAREWELL_S, Child, Frontend, MakeFrontend, Serving
from vlmserve.config.engine_args import EngineArgs, StartSettings
from vlmserve.config.model_path import DEFAULT_MODEL_NAME, check_model, checked_model, local_folder
from vlmserve.config.settings import ServerSettings
from vlmserve.ipc.channels import Channels
from vlmserve.ipc.child import (
    LAST_WORDS_S,
    ChildMain,
    Ready,
    of_all,
    start_child,
    wait_until_ready,
)
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
    from vlmserve.api.http_server import HttpServer

logger = logging.getLogger(__name__)

_BACKLOG = 2048


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


def start_ranks(settings: ServerSettings, stack: ExitStack) -> list[ChildProcess]:
    """Start the processes of this node's ranks, which `stack` stops, and wait until they are ready.

    Raises the errors of `start_server`.
    """
    args = _settle_model(settings)[0].engine
    channels, start = make_directories(settings, stack)
    prepare_children()
    children = [child.process for child in start_children(rank_mains(args), args, channels, start, stack)]
    wait_until_ready(children, start, grace_s=LAST_WORDS_S)
    logger.info("ready: ranks %s work for %s", ", ".join(map(str, args.own_ranks)), args.dist_init_addr)
    return children


def serve_node(settings: ServerSettings) -> int:
    """Let this node's ranks work for the server of node 0, until it ends, a rank dies or a signal arrives.

    Returns the exit status. Call it in the main thread. Raises the errors of `launch_server`.
    """
    with ExitStack() as stack:
        stack.enter_context(stop_signals_raise())
        try:
            children = start_ranks(settings, stack)
            ended = wait([child.sentinel for child in children])
            died = next(child for child in children if child.sentinel in ended)
            logger.error("stopped: %s", died.how_it_died())
            return 1
        except StopRequested as stop:
            logger.info("stopped by %s", stop)
            return 0
        finally:
            ignore_stop_signals()


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


def start_server(
    settings: ServerSettings,
    stack: ExitStack,
    scheduler: ChildMain = run_scheduler_process,
    detokenizer: ChildMain = run_detokenizer_process,
    make_frontend: MakeFrontend | None = None,
) -> Serving:
    """Start the processes of a server, which `stack` stops, and wait until they are ready. Any thread may call this, if
    it outlives them. Raises VlmserveError or OSError, with a message fit for the user."""
    settings, model_name = _settle_model(settings)
    args = settings.engine
    channels, start = make_directories(settings, stack)
    # The scheduler sets its own number. This process's work, pictures, has threads or processes of its own.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    prepare_children()  # this process has its own imports meanwhile
    encodes_only = args.role == "encode"
    if make_frontend is None and encodes_only:
        from vlmserve.api.encode_app import make_encoder_frontend

        make_frontend = make_encoder_frontend
    elif make_frontend is None:
        from vlmserve.api.app import make_frontend as http_frontend

        make_frontend = http_frontend
        if not args.media_processes or args.enable_mm_embeds:
            import torch  # noqa: F401  # not only when the first picture waits for it
    mains: list[tuple[str, ChildMain]] = [("scheduler", scheduler), ("detokenizer", detokenizer)]
    mains = [("encoder", run_encoder_process)] if encodes_only else [*mains, *rank_mains(args)]
    engines = channels.replicas(args.num_replicas)
    children = [child for own in engines for child in start_children(mains, args, own, start, stack)]
    for child in children:  # all at once, for each may have something to finish
        stack.callback(child.process.tell_to_stop)
    # processes that wait for an encoder or a rank have the better error if that does not come
    grace_s = LAST_WORDS_S if args.num_encoders or args.world_size > 1 else 0.0
    reports = wait_until_ready([child.process for child in children], start, grace_s=grace_s)
    return Serving(
        settings=settings,
        model_name=model_name,
        api=channels.api,
        engines=engines,
        start=start,
        children=children,
        report=of_all(reports.values()),
        make_frontend=make_frontend,
    )


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
            serving = start_server(settings, stack, scheduler, detokenizer, make_frontend)
            http = _HttpServing(serving=serving, listener=listener)
            status = _run(ApiEventLoop(), http.run())
        except StopRequested as stop:
            logger.info("stopped by %s before the server was ready", stop)
            return 0
        finally:
            ignore_stop_signals()  # from here on everything is short, and must be done
    exit_within(http.patience_s, status)
    return status


def _run(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine in a new event loop, as `asyncio.run` does, which would wait for the threads of `to_thread`."""
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(_call_off(asyncio.all_tasks(loop), FAREWELL_S))
        loop.close()


async def _call_off(tasks: Collection[asyncio.Task[Any]], patience_s: float) -> None:
    """Cancel tasks, and wait for their ends. A task that waits for a thread may not end."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=patience_s)


@dataclass(kw_only=True)
class _HttpServing:
    """A started server from its readiness to its end: HTTP and signals. ends_at: the loop's time until which running
    work is waited for; None until the end begins."""

    serving: Serving
    listener: socket.socket
    ends_at: float | None = None

    @property
    def patience_s(self) -> float:
        """The seconds that the end may still wait for threads: never none, for most of them end at once."""
        left = self.serving.settings.shutdown_timeout_s if self.ends_at is None else self.ends_at - time.monotonic()
        return max(FAREWELL_S, left)

    async def run(self) -> int:
        from vlmserve.api.http_server import HttpServer

        loop = asyncio.get_running_loop()
        settings = self.serving.settings
        async with self.serving.frontend(lambda: self.patience_s) as frontend:
            server = HttpServer(
                frontend.app,
                settings,
                backlog=_BACKLOG,
                started=self._announce,
                websockets=settings.engine.role != "encode",
            )
            self.serving.on_problem = partial(self._on_problem, server, frontend)
            self.serving.on_failure = partial(self._on_failure, server)
            gc.freeze()  # these objects stay: looking through them would stop answers for a tenth of a second
            for number in STOP_SIGNALS:
                loop.add_signal_handler(number, self._on_signal, server, frontend, number)
            try:
                await server.serve(sockets=[self.listener])
            finally:
                await _call_off(asyncio.all_tasks() - {asyncio.current_task()}, self.patience_s)
        if self.serving.failure is None:
            logger.info("stopped")
            return 0
        logger.error("stopped: %s", self.serving.failure)
        return 1

    def _announce(self) -> None:
        forget_turns()  # of the start
        announce(self.listener, self.serving.settings.port_file, f"serves {self.serving.model_name}")

    def _on_problem(self, server: HttpServer, frontend: Frontend) -> None:
        if server.should_exit:  # nothing that is waited for will come
            self._cut_short(server, frontend)

    def _on_signal(self, server: HttpServer, frontend: Frontend, number: int) -> None:
        name, patience_s = signal.Signals(number).name, self.serving.settings.shutdown_timeout_s
        if server.should_exit:
            logger.info("%s again: not waiting any longer", name)
            self.ends_at = time.monotonic()
            self._cut_short(server, frontend)
            return
        problem = self.serving.problem
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
        asyncio.get_running_loop().call_later(FAREWELL_S, setattr, server, "force_exit", True)

    def _on_failure(self, server: HttpServer) -> None:
        self.ends_at = time.monotonic() + self.serving.settings.shutdown_timeout_s
        loop = asyncio.get_running_loop()
        loop.call_later(FAREWELL_S, setattr, server, "should_exit", True)
        loop.call_later(2 * FAREWELL_S, setattr, server, "force_exit", True)


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
