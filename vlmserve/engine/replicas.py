"""The share of the machine that each of several replicas gets."""

from __future__ import annotations

from dataclasses import replace

import torch

from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.fields import flag
from vlmserve_common.compute.cpus import available_cpus
from vlmserve_common.compute.devices import resolve_device
from vlmserve_common.errors import EngineError


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
        behind = first + wanted + replica * args.num_encoders  # the GPUs after all replicas, then from the first one on
        encoder_devices = ",".join(f"cuda:{(behind + place) % count}" for place in range(args.num_encoders))
    return replace(args, device=f"cuda:{first + replica * ranks}", encoder_devices=encoder_devices)
