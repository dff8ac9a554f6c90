"""Ranks but the first as a launcher's children, and the launcher of a node that has nothing else."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait

from vlmserve.api.launch_children import make_directories, prepare_children, start_children
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.model_path import resolve_model
from vlmserve.config.settings import ServerSettings
from vlmserve.config.start_settings import StartSettings
from vlmserve.ipc.channels import Channels
from vlmserve.ipc.child import LAST_WORDS_S, ChildMain, Ready, wait_until_ready
from vlmserve_common.logs import configure_logging
from vlmserve_common.process.stop_signals import StopRequested, ignore_stop_signals, stop_signals_raise

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
