"""Ranks but the first as a launcher's children, and the launcher of a node that has nothing else."""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait

from processors.pool.forks import prepare_processes
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.model_path import resolve_model
from vlmserve.config.settings import ServerSettings
from vlmserve.config.start_settings import StartSettings
from vlmserve.ipc.channels import Channels
from vlmserve.ipc.child import ChildMain, start_child, wait_until_ready
from vlmserve.ipc.private_dir import PrivateDirectory, shared_memory_base, socket_base
from vlmserve.ipc.ready import Ready
from vlmserve_common.logs import configure_logging
from vlmserve_common.process.child import ChildProcess
from vlmserve_common.process.stop_signals import (
    StopRequested,
    ignore_stop_signals,
    stop_signals_held,
    stop_signals_raise,
)

logger = logging.getLogger(__name__)


def run_rank_process(args: EngineArgs, channels: Channels, start: StartSettings, ready: Ready, *, rank: int) -> None:
    """The process of a rank but the first, which the scheduler's has."""
    from vlmserve.engine.process import run_rank_process

    run_rank_process(args, channels, start, ready, rank=rank)


def rank_mains(args: EngineArgs) -> list[tuple[str, ChildMain]]:
    """Names and work of the processes of this node's ranks, without the first of all."""
    return [(f"rank-{rank}", partial(run_rank_process, rank=rank)) for rank in args.own_ranks if rank]


def serve_node(settings: ServerSettings) -> int:
    """Have this node's ranks work for the server of node 0, until that is gone, one of them dies, or a signal comes;
    the exit status. Call it in the main thread. Errors: those of `launch.launch_server`."""
    configure_logging(settings.log_level, "node")
    with ExitStack() as stack:
        stack.enter_context(stop_signals_raise())
        try:
            args = replace(settings.engine, model=str(resolve_model(settings.engine.model)))
            runtime_dir = stack.enter_context(PrivateDirectory(socket_base())).path
            shared_dir = stack.enter_context(PrivateDirectory(shared_memory_base())).path
            channels = Channels.in_directories(runtime_dir, shared_dir)
            start = StartSettings(
                shared_dir=shared_dir,
                log_level=settings.log_level,
                startup_timeout_s=settings.startup_timeout_s,
                ready_by=time.monotonic() + settings.startup_timeout_s,
            )
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
            os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
            prepare_processes()
            children: list[ChildProcess] = []
            for name, main in rank_mains(args):
                with stop_signals_held():
                    child = start_child(name, main, args, channels, start)
                    stack.callback(child.stop)
                children.append(child)
            wait_until_ready(children, start)
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
