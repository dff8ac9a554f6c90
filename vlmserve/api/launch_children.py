"""What launchers do alike: private directories, what children are told of them, and the children."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from processors.pool import prepare_processes
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.settings import ServerSettings
from vlmserve.config.start_settings import StartSettings
from vlmserve.ipc.channels import Channels
from vlmserve.ipc.child import ChildMain, start_child
from vlmserve.ipc.heartbeat import Heartbeat
from vlmserve.ipc.private_dir import PrivateDirectory, shared_memory_base, socket_base
from vlmserve_common.process.child import ChildProcess
from vlmserve_common.process.stop_signals import stop_signals_held


@dataclass(frozen=True, kw_only=True)
class Child:
    """A process, and where it shows that it lives."""

    process: ChildProcess
    heartbeat: Heartbeat


def make_directories(settings: ServerSettings, stack: ExitStack) -> tuple[Channels, StartSettings]:
    """Private ones, which `stack` removes, and what is found there."""
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
    """Start the process that they are forks of, which imports torch once for all."""
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
    """Processes of these names and work, which `stack` stops."""
    children: list[Child] = []
    for name, main in mains:
        with stop_signals_held():  # until it is sure that the child will be stopped
            process = start_child(name, main, args, channels, start)
            stack.callback(process.stop)
        children.append(Child(process=process, heartbeat=channels.heartbeat(name)))
    return children
