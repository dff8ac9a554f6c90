"""The engine's parts put together in one process, without sockets: what `LLM` and `AsyncLLM` stand on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from vlmserve.config.checks import check_engine_args
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.model_path import resolve_model
from vlmserve.config.start_settings import StartSettings
from vlmserve.engine.build import EngineInfo, build_runner, build_scheduler
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.ipc.private_dir import PrivateDirectory, shared_memory_base
from vlmserve.messages import SchedulerOutput
from vlmserve.scheduler.scheduler import Scheduler
from vlmserve.tokenizer.stage import StageLimits, TokenizerStage, make_tokenizer_stage


@dataclass(frozen=True, kw_only=True)
class OfflineEngine:
    """args: with the model's folder. stack: closes the scheduler and its encoders; `stage.media` is closed before."""

    args: EngineArgs
    runner: ModelRunner
    info: EngineInfo
    scheduler: Scheduler
    stage: TokenizerStage
    stack: ExitStack


def build_offline_engine(
    args: EngineArgs, limits: StageLimits, send: Callable[[SchedulerOutput], None], *, log_level: str = "info"
) -> OfflineEngine:
    """send: gets the outputs of every step. log_level: of helper processes.

    Raises CheckpointError, EngineError or SettingsError.
    """
    check_engine_args(args)
    args = replace(args, model=str(resolve_model(args.model)))
    runner, info = build_runner(args)
    with ExitStack() as stack:
        # for arrays that go to and from encoder and media processes, where there are any
        processes = args.num_encoders + args.media_processes
        shared = stack.enter_context(PrivateDirectory(shared_memory_base())) if processes else None
        start = None if shared is None else StartSettings(shared_dir=shared.path, log_level=log_level)
        scheduler = build_scheduler(args, runner, info, send, start=start)
        stack.callback(scheduler.close)
        stage = make_tokenizer_stage(
            args, limits, max_model_len=info.max_req_len, auto_pixels=info.auto_pixels, start=start
        )
        return OfflineEngine(
            args=args, runner=runner, info=info, scheduler=scheduler, stage=stage, stack=stack.pop_all()
        )
