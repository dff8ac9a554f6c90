"""The child processes of a server: their directories, their start, and the launcher of a node that has ranks only."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait

from processors.pool import prepare_processes
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.model_path import resolve_model
from vlmserve.config.settings import ServerSettings
from vlmserve.config.start_settings import StartSettings
from vlmserve.ipc.channels import Channels, Heartbeat
from vlmserve.ipc.child import LAST_WORDS_S, ChildMain, Ready, start_child, wait_until_ready
from vlmserve.ipc.private_dir import PrivateDirectory, shared_memory_base, socket_base
from vlmserve_common.logs import configure_logging
from vlmserve_common.process.child import ChildProcess
from vlmserve_common.process.stop_signals import (
    StopRequested,
    ignore_stop_signals,
    stop_signals_held,
    stop_signals_raise,
)


@dataclass(frozen=True, kw_only=True)
class Child:
    """A child process, and its sign of life."""

    process: ChildProcess
    heartbeat: Heartbeat


def make_directories(settings: ServerSettings, stack: ExitStack) -> tuple[Channels, StartSettings]:
    """Make the private directories, which `stack` removes; return the channels and start settings in them."""
    runtime_dir = stack.enter_context(PrivateDirectory(socket_base())).path
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


logger = logging.getLogger(__name__)


def run_rank_process(args: EngineArgs, channels: Channels, start: StartSettings, ready: Ready, *, rank: int) -> None:
    """Run the process of a rank other than the first, which the scheduler process has."""
    from vlmserve.engine.process import run_rank_process

    run_rank_process(args, channels, start, ready, rank=rank)


def rank_mains(args: EngineArgs) -> list[tuple[str, ChildMain]]:
    """Return the names and work of the processes of this node's ranks, without rank 0."""
    return [(f"rank-{rank}", partial(run_rank_process, rank=rank)) for rank in args.own_ranks if rank]


def serve_node(settings: ServerSettings) -> int:
    """Let this node's ranks work for the server of node 0, until it ends, a rank dies or a signal arrives.

    Returns the exit status. Call it in the main thread. Raises the errors of `launch.launch_server`.
    """
    configure_logging(settings.log_level, "node")
    with ExitStack() as stack:
        stack.enter_context(stop_signals_raise())
        try:
            args = replace(settings.engine, model=str(resolve_model(settings.engine.model)))
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
