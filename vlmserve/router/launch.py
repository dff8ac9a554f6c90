"""Starts a router, and stops it again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from vlmserve.api.api_keys import read_api_keys
from vlmserve.api.event_loop import ApiEventLoop, forget_turns, longest_turn_s
from vlmserve.api.http_server import HttpServer
from vlmserve.api.listening import address_of, announce, listen
from vlmserve.router.app import build_app
from vlmserve.router.metrics import RouterMetrics
from vlmserve.router.settings import RouterSettings
from vlmserve.router.workers import Workers
from vlmserve_common.logs import configure_logging
from vlmserve_common.process.limits import raise_open_files
from vlmserve_common.process.stop_signals import STOP_SIGNALS
from vlmserve_common.process.threads import Threads

logger = logging.getLogger(__name__)
_BACKLOG = 2048
# How long the last words of answers that are cut short may take.
_FAREWELL_S = 1.0


def launch_router(settings: RouterSettings) -> int:
    """Serve until a signal (SIGINT, SIGTERM); returns the exit status. Call it in the main thread.

    A signal stops new connections and lets running requests finish, for `shutdown_timeout_s` at most; a second one does
    not wait. Raises VlmserveError or OSError, with a message fit for the user, if the router cannot start.
    """
    http = settings.http
    configure_logging(http.log_level, "router")
    keys = read_api_keys(http)  # so that errors in them show now
    raise_open_files()
    with contextlib.closing(listen(http.host, http.port)) as listener, contextlib.ExitStack() as stack:
        if keys is None and not address_of(listener).is_loopback:
            logger.warning(
                "--host is %s, and there is no API key: everyone who reaches this address may use the servers; set "
                "VLMSERVE_API_KEY or --api-key-file",
                http.host,
            )
        if keys is not None and keys.shared and settings.upstream_api_key is not None:
            logger.warning(
                "all clients have --upstream-api-key at the servers: they see each other's files, batches and responses"
            )
        if http.port_file:
            stack.callback(Path(http.port_file).unlink, missing_ok=True)
        with asyncio.Runner(loop_factory=ApiEventLoop) as runner:
            runner.run(_serve(settings, listener))
    logger.info("stopped")
    return 0


async def _serve(settings: RouterSettings, listener: socket.socket) -> None:
    http, loop = settings.http, asyncio.get_running_loop()

    def started(server: HttpServer, workers: Workers) -> None:
        def cut_short() -> None:
            workers.cut("the router ends")
            loop.call_later(_FAREWELL_S, setattr, server, "force_exit", True)

        def stop(number: int) -> None:
            if server.should_exit:
                logger.info("%s again: not waiting any longer", signal.Signals(number).name)
                cut_short()
                return
            name, patience_s = signal.Signals(number).name, http.shutdown_timeout_s
            logger.info("%s: running requests get %g s to finish", name, patience_s)
            server.should_exit = True
            loop.call_later(patience_s, cut_short)

        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, stop, number)
        gc.freeze()  # these objects stay
        forget_turns()  # of the start
        announce(listener, http.port_file, f"routes to {len(settings.servers)} servers")

    await route(settings, listener, started)


async def route(
    settings: RouterSettings, listener: socket.socket, started: Callable[[HttpServer, Workers], None]
) -> None:
    """Serve until the server that `started` gets should exit."""
    workers = Workers(settings)
    metrics, parsing = RouterMetrics(workers, longest_turn_s), Threads("bodies", 1)
    app = build_app(workers, settings, metrics, parsing)
    server = HttpServer(
        *(app, settings.http), backlog=_BACKLOG, started=lambda: started(server, workers), websockets=True
    )
    workers.start()
    try:
        await server.serve(sockets=[listener])
    finally:
        await workers.close()
        parsing.close()
