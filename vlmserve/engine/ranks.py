"""Processes that have a model's parts: where each computes, how they meet, and what all but the first one do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import blake3
import torch

from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.fields import flag
from vlmserve.config.start_settings import StartSettings
from vlmserve.engine.build import build_runner
from vlmserve.engine.sharing import expert_sharing
from vlmserve.engine.token_groups import attention_group, join_groups, tokens_of
from vlmserve.executor.groups.follower import RoundFollower
from vlmserve.executor.groups.leader import RoundLeader
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.executor.ranks.follower import Follower
from vlmserve.executor.ranks.leader import LeadingWorker
from vlmserve.models.registry import load_config
from vlmserve_common.compute.cpus import available_cpus
from vlmserve_common.compute.devices import resolve_device
from vlmserve_common.compute.shard import Shard
from vlmserve_common.compute.stage import Stage
from vlmserve_common.errors import EngineError, RankLostError
from vlmserve_common.parallel.meeting import MeetingPlace
from vlmserve_common.parallel.ranks import Ranks
from vlmserve_common.version import __version__

LAST_WORDS_S = 3.0
"""Whoever loses another rank waits so long before it ends, too: the process that started both says which one it was."""
# What ranks may have each for itself.
_OWN_SETTINGS = frozenset({"model", "device", "num_threads", "node_rank"})


def rank_args(args: EngineArgs, rank: int) -> EngineArgs:
    """A rank's own settings: a GPU for each, from --device on, or a share of the CPU's cores and memory. EngineError
    for more of them than there are GPUs, or a model that they cannot share."""
    group = attention_group(args, rank)
    shard = Shard(rank % args.tp_size, args.tp_size, experts=expert_sharing(args), group=group)
    config = load_config(Path(args.model), shard)
    for stage in range(args.pp_size):  # any of which may be one that cannot be
        replace(config, shard=replace(shard, stage=Stage(stage, args.pp_size))).of_part()
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
    """Where the ranks of one engine meet. folder: an existing private directory, for those of one machine."""
    address = f"{folder}/ranks" if args.nnodes == 1 else args.dist_init_addr
    return MeetingPlace(
        address=str(address), size=args.world_size, ready_by=start.ready_by, timeout_s=start.startup_timeout_s
    )


def join_ranks(args: EngineArgs, rank: int, place: MeetingPlace, look: Callable[[], object] = lambda: None) -> Ranks:
    """Meet the others. args: of `rank_args`. look, errors: those of `meet`."""
    ranks = Ranks(place, rank, torch.device(args.device), _about(args), look, stages=args.pp_size)
    if args.enable_dp_attention:
        join_groups(args, ranks)
    return ranks


def leading_worker(
    runner: ModelRunner, ranks: Ranks, who_died: Callable[[], str | None]
) -> LeadingWorker | RoundLeader:
    """What computes steps at the first rank. who_died: see `LeadingWorker`."""
    tokens = tokens_of(ranks)
    return LeadingWorker(runner, ranks, who_died) if tokens is None else RoundLeader(runner, ranks, tokens, who_died)


def follow(
    args: EngineArgs,
    rank: int,
    place: MeetingPlace,
    *,
    ready: Callable[[], object],
    idle: Callable[[], object] = lambda: None,
    working: Callable[[], object] = lambda: None,
) -> None:
    """The work of a rank but the first, until one is gone: RankLostError. Other errors: those of `rank_args`, `meet`
    and `build_runner`. ready: called once; idle, working: called whenever it waits and works."""
    args = rank_args(args, rank)
    ranks = join_ranks(args, rank, place)
    runner, _ = build_runner(args, ranks)
    tokens = tokens_of(ranks)
    follower = Follower(runner, ranks) if tokens is None else RoundFollower(runner, ranks, tokens)
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


def _about(args: EngineArgs) -> dict[str, str]:
    """What must be the same for all ranks."""
    settings = {flag(name): repr(value) for name, value in asdict(args).items() if name not in _OWN_SETTINGS}
    return {
        "vlmserve's version": __version__,
        "torch's version": torch.__version__,
        "the model": _model_digest(Path(args.model)),
        "the kind of device": torch.device(args.device).type,
        **settings,
    }


def _model_digest(folder: Path) -> str:
    """Of a checkpoint's configuration, and the names and sizes of its files."""
    digest = blake3.blake3()
    with contextlib.suppress(OSError):
        digest.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors*")):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
    return digest.hexdigest(length=8)
