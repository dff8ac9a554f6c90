"""The engine's parts put together in one process, without sockets: what `LLM` and `AsyncLLM` stand on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from vlmserve.config.checks import check_engine_args
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.fields import flag
from vlmserve.config.model_path import resolve_model
from vlmserve.config.start_settings import StartSettings
from vlmserve.engine.build import EngineInfo, build_loop, build_runner
from vlmserve.engine.loop import EventLoop
from vlmserve.engine.step import GroupsWorker, ModelWorker
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.frontend.stage import StageLimits, TokenizerStage, make_tokenizer_stage
from vlmserve.ipc.messages import SchedulerOutput
from vlmserve.ipc.private_dir import PrivateDirectory, shared_memory_base, socket_base
from vlmserve_common.errors import EngineError, RankLostError

if TYPE_CHECKING:
    from vlmserve_common.parallel.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class OfflineEngine:
    """args: with the model's folder. stack: closes the loop and its encoders; `stage.media` is closed before.
    ranks: who has the other parts of the model, if there are any."""

    args: EngineArgs
    runner: ModelRunner
    info: EngineInfo
    loop: EventLoop
    stage: TokenizerStage
    stack: ExitStack
    ranks: Ranks | None = None


def build_offline_engine(
    args: EngineArgs, limits: StageLimits, send: Callable[[SchedulerOutput], None], *, log_level: str = "info"
) -> OfflineEngine:
    """send: gets the outputs of every step. log_level: of helper processes.

    Raises CheckpointError, EngineError or SettingsError.
    """
    check_engine_args(args)
    if args.num_replicas > 1:
        raise EngineError(
            f"{flag('dp_size')} is {args.dp_size}: only a server has several replicas; start `vlmserve serve` with it "
            "and send it requests, or make one engine on each device"
        )
    args = replace(args, model=str(resolve_model(args.model)))
    with ExitStack() as stack:
        args, runner, info, worker, ranks = _runner(args, stack, log_level)
        # for arrays that go to and from encoder and media processes, where there are any
        processes = args.num_encoders + args.media_processes
        shared = stack.enter_context(PrivateDirectory(shared_memory_base())) if processes else None
        start = None if shared is None else StartSettings(shared_dir=shared.path, log_level=log_level)
        loop = build_loop(args, runner, info, send, start=start, worker=worker)
        stack.callback(loop.close)
        stage = make_tokenizer_stage(
            args, limits, max_model_len=info.max_req_len, auto_pixels=info.auto_pixels, start=start
        )
        return OfflineEngine(
            args=args,
            runner=runner,
            info=info,
            loop=loop,
            stage=stage,
            stack=stack.pop_all(),
            ranks=ranks,
        )


def _runner(
    args: EngineArgs, stack: ExitStack, log_level: str
) -> tuple[EngineArgs, ModelRunner, EngineInfo, ModelWorker | GroupsWorker | None, Ranks | None]:
    """This process's part of the model, and what computes steps where others have theirs. stack: ends these."""
    if args.world_size == 1:
        return args, *build_runner(args), None, None
    # only who has such processes needs what they talk with
    from vlmserve.engine.rank_process import RankProcesses
    from vlmserve.engine.ranks import LAST_WORDS_S, join_ranks, leading_worker, meeting_place, rank_args

    own = rank_args(args, 0)
    folder = stack.enter_context(PrivateDirectory(socket_base())).path
    timeout_s = StartSettings(shared_dir=folder).startup_timeout_s
    start = StartSettings(shared_dir=folder, startup_timeout_s=timeout_s, ready_by=time.monotonic() + timeout_s)
    place = meeting_place(folder, args, start)
    processes = RankProcesses(args, place, log_level)
    stack.callback(processes.stop)
    try:
        ranks = join_ranks(own, 0, place, processes.check)
        stack.callback(ranks.close)
        runner, info = build_runner(own, ranks)
    except RankLostError:
        processes.check(LAST_WORDS_S)
        raise
    processes.wait_ready()
    return own, runner, info, leading_worker(runner, ranks, partial(processes.who_died, LAST_WORDS_S)), ranks
