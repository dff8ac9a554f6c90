"""The processes of one model: where replicas and ranks compute, how ranks meet, and what all but the first do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import wait
from pathlib import Path

import blake3
import torch

from processors.pool import prepare_processes
from vlmserve.config.engine_args import EngineArgs, StartSettings
from vlmserve.config.fields import flag
from vlmserve.engine.adapters import obey_adapter_order
from vlmserve.engine.build import build_runner
from vlmserve.engine.profiling import FollowingProfiler
from vlmserve.engine.weights.rank import RankWeights
from vlmserve.executor.adapter_order import LoadAdapterOrder, UnloadAdapterOrder
from vlmserve.executor.distributed.follower import Follower, GroupFollower
from vlmserve.executor.distributed.leader import GroupLeader, LeadingWorker
from vlmserve.executor.distributed.orders import BesidesOrder
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.executor.profile_order import ProfileOrder
from vlmserve.models.registry import load_config
from vlmserve_common.compute.cpus import available_cpus
from vlmserve_common.compute.devices import resolve_device
from vlmserve_common.compute.shard import ExpertSharing, PipelineStage, Shard
from vlmserve_common.errors import EngineError, RankLostError
from vlmserve_common.parallel.meeting import MeetingPlace
from vlmserve_common.parallel.ranks import Ranks
from vlmserve_common.process.child import ChildProcess, Parent
from vlmserve_common.process.stop_signals import stop_signals_held
from vlmserve_common.version import __version__

LAST_WORDS_S = 3.0
"""A rank that has lost another waits this long before it ends, so that their parent can say which one was lost."""
# Settings that may differ between ranks.
_OWN_SETTINGS = frozenset({"model", "device", "num_threads", "node_rank"})


def rank_shard(args: EngineArgs, rank: int) -> Shard:
    """Return the part of the model that a rank has. rank = stage * tp_size + number within the stage."""
    stage, within = divmod(rank, args.tp_size)
    experts = ExpertSharing(
        ep_size=args.ep_size,
        a2a="none" if args.enable_lora else args.moe_a2a_backend,  # adapters need each token's row in its place
        redundant=args.ep_num_redundant_experts,
        counted=args.enable_eplb,
    )
    return Shard(
        within,
        args.tp_size,
        experts=experts,
        stage=PipelineStage(stage, args.pp_size),
        groups=args.attention_groups,
    )


def replica_args(args: EngineArgs, replica: int | None) -> EngineArgs:
    """Return a replica's own settings: its GPUs, which follow those of the replica before, or its share of the CPU's
    cores and memory. EngineError if there are too few GPUs. replica: None for a single engine, which gets
    everything."""
    if replica is None:
        return args
    device, ranks = resolve_device(args.device), len(args.own_ranks)
    if device.type != "cuda":
        threads = args.num_threads or max(1, available_cpus() // (args.dp_size * ranks))
        encoders = args.dp_size * args.num_encoders
        return replace(
            args,
            device=str(device),
            num_threads=threads,
            encoder_threads=args.encoder_threads or (max(1, available_cpus() // encoders) if encoders else None),
            mem_fraction_static=args.mem_fraction_static / args.dp_size,
        )
    first, count = device.index or 0, torch.cuda.device_count()
    wanted = args.dp_size * ranks
    if first + wanted > count:
        each = f" of {ranks} ranks each" if ranks > 1 else ""
        raise EngineError(
            f"{flag('dp_size')} is {args.dp_size}: so many replicas{each} want {wanted} GPUs, from cuda:{first} on; "
            f"the last one is cuda:{count - 1}"
        )
    encoder_devices = args.encoder_devices
    if args.num_encoders and encoder_devices is None and not args.encodes_on_all_ranks:
        free = [*range(first + wanted, count), *range(first)][replica * args.num_encoders :]
        own = range(first + replica * ranks, first + (replica + 1) * ranks)
        places = [free[n] if n < len(free) else own[(n - len(free)) % ranks] for n in range(args.num_encoders)]
        encoder_devices = ",".join(f"cuda:{place}" for place in places)
    return replace(args, device=f"cuda:{first + replica * ranks}", encoder_devices=encoder_devices)


def rank_args(args: EngineArgs, rank: int) -> EngineArgs:
    """Return a rank's own settings: one GPU, counted from --device on, or a share of the CPU's cores and memory.

    EngineError for more ranks than GPUs, or a model that cannot be shared among them.
    """
    config = load_config(Path(args.model), rank_shard(args, rank))
    for stage in range(args.pp_size):  # each stage is checked: another rank's may be impossible
        replace(config, shard=rank_shard(args, stage * args.tp_size)).of_part()
    device = resolve_device(args.device)
    here = args.own_ranks
    if device.type != "cuda":
        threads = args.num_threads or max(1, available_cpus() // len(here))
        memory = args.mem_fraction_static / len(here)
        return replace(args, device=str(device), num_threads=threads, mem_fraction_static=memory)
    first, count = device.index or 0, torch.cuda.device_count()
    if first + len(here) > count:
        wanted = f"{len(here)} ranks (--tp-size, --pp-size) want as many GPUs, from cuda:{first} on"
        raise EngineError(f"{wanted}; the last one is cuda:{count - 1}")
    return replace(args, device=f"cuda:{first + rank - here.start}")


def meeting_place(folder: Path | str, args: EngineArgs, start: StartSettings) -> MeetingPlace:
    """Return the place where the ranks of one engine meet. folder: a private directory, used on one machine."""
    address = f"{folder}/ranks" if args.nnodes == 1 else args.dist_init_addr
    return MeetingPlace(
        address=str(address), size=args.world_size, ready_by=start.ready_by, timeout_s=start.startup_timeout_s
    )


def join_ranks(args: EngineArgs, rank: int, place: MeetingPlace, look: Callable[[], object] = lambda: None) -> Ranks:
    """Meet the other ranks and connect to them. args: of `rank_args`. look, errors: those of `meet`."""
    return Ranks(place, rank_shard(args, rank), torch.device(args.device), _about(args), look)


def leading_worker(
    runner: ModelRunner, ranks: Ranks, who_died: Callable[[], str | None]
) -> LeadingWorker | GroupLeader:
    """Make the worker of the first rank. who_died: see `LeadingWorker`."""
    return (LeadingWorker if ranks.comm.tokens is None else GroupLeader)(runner, ranks, who_died)


def follow(
    args: EngineArgs,
    rank: int,
    place: MeetingPlace,
    *,
    ready: Callable[[], object],
    idle: Callable[[], object] = lambda: None,
    working: Callable[[], object] = lambda: None,
    replica: int = 0,
) -> None:
    """Do the work of any rank but the first, until another rank is gone.

    replica: the number of its replica. ready: called once. idle, working: called whenever this rank begins to wait or
    to work. RankLostError at the end; errors of `rank_args`, `meet` and `build_runner` before.
    """
    args = rank_args(args, rank)
    ranks = join_ranks(args, rank, place)
    runner, _ = build_runner(args, ranks)
    if args.role != "all":  # it needs ZeroMQ
        from vlmserve.engine.peers import connect_peers

        connect_peers(args, runner, ranks)
    profiler, number = FollowingProfiler(rank), replica * args.world_size + rank
    weights = RankWeights(args, runner, number=number, alive=working)

    def besides(order: BesidesOrder) -> None:
        if isinstance(order, ProfileOrder):
            profiler.obey(order)
        elif isinstance(order, LoadAdapterOrder | UnloadAdapterOrder):
            obey_adapter_order(runner.adapters, order, ranks)
        else:
            ranks.failure(weights.obey(order)[0])

    follower = (Follower if ranks.comm.tokens is None else GroupFollower)(runner, ranks, besides)
    ready()
    try:
        while True:
            idle()
            order = follower.await_order()
            working()
            follower.obey(order)
    except RankLostError:
        time.sleep(LAST_WORDS_S)
        raise


def run_rank(parent: Parent, args: EngineArgs, rank: int, place: MeetingPlace) -> None:
    """Do the work of a rank in a child process."""
    follow(args, rank, place, ready=lambda: parent.ready({}))


class RankProcesses:
    """All ranks but the first, as children of this process. `stop` must be called, whatever happens."""

    def __init__(self, args: EngineArgs, place: MeetingPlace, log_level: str) -> None:
        prepare_processes()
        self._place = place
        self._children: list[ChildProcess] = []
        self._starting: list[ChildProcess] = []
        for rank in args.own_ranks[1:]:
            with stop_signals_held():
                child = ChildProcess(
                    f"rank-{rank}",
                    run_rank,
                    (args, rank, place),
                    title=f"the process of rank {rank}",
                    log_level=log_level,
                    forked=True,
                )
                self._children.append(child)
            self._starting.append(child)

    def check(self, timeout_s: float = 0.0) -> None:
        """Raise EngineError with the message of a rank that cannot start, or is gone. timeout_s: how long to wait for
        reports."""
        for pipe in wait([child.pipe for child in self._starting], timeout_s):
            child = next(one for one in self._starting if one.pipe is pipe)
            child.take_report()
            self._starting.remove(child)
        died = self.who_died()
        if died is not None:
            raise EngineError(died)

    def wait_ready(self) -> None:
        """Wait until all ranks can work. Errors of `check`, and EngineError when the time is over."""
        while self._starting:
            if time.monotonic() > self._place.ready_by:
                late = ", ".join(child.title for child in self._starting)
                raise EngineError(f"not ready after {self._place.timeout_s:g} s: {late}")
            self.check(timeout_s=0.1)

    def who_died(self, timeout_s: float = 0.0) -> str | None:
        """Say which rank is gone and how; None if all are there. timeout_s: how long to wait for one to end."""
        gone: Sequence[object] = wait([child.sentinel for child in self._children], timeout_s)
        return next((child.how_it_died() for child in self._children if child.sentinel in gone), None)

    def stop(self) -> None:
        """End all processes."""
        for child in self._children:
            child.stop()


def _about(args: EngineArgs) -> dict[str, str]:
    """Return what must be the same for all ranks, by its name."""
    settings = {flag(name): repr(value) for name, value in asdict(args).items() if name not in _OWN_SETTINGS}
    return {
        # Without the number of commits: a checkout has that of the day when it was installed.
        "vlmserve's version": __version__.partition(".dev")[0],
        "torch's version": torch.__version__,
        "the model": _model_digest(Path(args.model)),
        "the kind of device": torch.device(args.device).type,
        **settings,
    }


def _model_digest(folder: Path) -> str:
    """Digest a checkpoint's configuration, and the names and sizes of its files."""
    digest = blake3.blake3()
    with contextlib.suppress(OSError):
        digest.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors*")):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
    return digest.hexdigest(length=8)
