"""`--max-pixels auto`: how large pictures may be that a CPU encodes in the time allowed for one."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

from processors.families.config import ProcessorConfig, read_processor_config
from processors.resize import smart_resize
from vision.towers.blocks import VisionTower, encoding_flops
from vision.towers.loading import outline_tower
from vlmserve.config.engine_args import AUTO, EngineArgs
from vlmserve.engine.encoder import encoder_devices, encoder_threads
from vlmserve_common.checkpoint.hf_config import read_hf_config
from vlmserve_common.compute.cpus import available_cpus
from vlmserve_common.compute.linear import Linear

log = logging.getLogger(__name__)

SMALLEST_PIXELS = 448 * 448
# What else an encoding takes, beside its products at full speed.
_OVERHEAD = 1.5
_ROWS, _MEASURE_S = 256, 0.06

Rate = Callable[[torch.dtype, int, int], float]
"""As `product_rate`."""


def auto_max_pixels(
    args: EngineArgs, *, dtype: torch.dtype, device: torch.device, rate: Rate | None = None
) -> int | None:
    """The largest area of a picture, in pixels; None: the checkpoint's own limit. Says in the log which one, and why.

    None also where `--max-pixels` says something else, and where a GPU encodes. args.model: the checkpoint folder.
    dtype: the tower's. device: the model's. Takes some tens of milliseconds.
    """
    devices = encoder_devices(args, device) if args.num_encoders else (str(device),)
    if args.max_pixels != AUTO or "cpu" not in devices:
        return None
    folder = Path(args.model)
    config = read_processor_config(folder, read_hf_config(folder))
    sizes = allowed_sizes(config)
    if len(sizes) == 1:
        return None
    tower = outline_tower(folder, dtype=dtype)
    layer = (weight for name, weight in tower.named_parameters() if name.startswith("blocks.0."))
    outer, inner = max((weight.shape for weight in layer if weight.ndim == 2), key=math.prod)
    threads = encoder_threads(args) if args.num_encoders else min(args.num_threads or math.inf, available_cpus())
    measured = threads * (rate or product_rate)(dtype, inner, outer)
    times = {area: encode_seconds(tower, config, area, measured) for area in sizes}
    chosen = max((area for area in sizes if times[area] <= args.max_pixels_auto_s), default=sizes[0])
    if chosen == config.max_pixels:
        log.debug("pictures have the checkpoint's full size: about %.1f s at %.3g FLOP/s", times[chosen], measured)
        return None
    height, width = smart_resize(3072, 4096, factor=config.patches.factor, min_pixels=0, max_pixels=chosen)
    log.info(
        "pictures are scaled down to at most %d pixels (%dx%d of 4:3), which this CPU encodes in about %.2g s "
        "(--max-pixels auto); --max-pixels checkpoint gives the full size, --max-pixels %d keeps this one",
        chosen,
        width,
        height,
        times[chosen],
        chosen,
    )
    return chosen


def allowed_sizes(config: ProcessorConfig) -> list[int]:
    """Areas to choose from, in pixels, smallest first; the checkpoint's limit is the last.

    Few, so that a start on the same machine finds the same one: embeddings that are kept are of one size.
    """
    token = config.patches.factor**2
    steps = max(0, math.ceil(2 * math.log2(config.max_pixels / SMALLEST_PIXELS)))
    areas = [int(SMALLEST_PIXELS * 2 ** (step / 2)) // token * token for step in range(steps)]
    return [*(area for area in areas if config.min_pixels <= area < config.max_pixels), config.max_pixels]


def encode_seconds(tower: VisionTower, config: ProcessorConfig, area: int, rate: float) -> float:
    """About how long a picture of so many pixels takes, at so many FLOP/s."""
    return _OVERHEAD * encoding_flops(tower, area // config.patches.patch_size**2) / rate


def product_rate(dtype: torch.dtype, inner: int, outer: int) -> float:
    """FLOP/s of products of that dtype with weights [outer, inner] on one core that has nothing else to do: by the CPU
    time of all threads, so that other work at the start does not count for ever."""
    x = torch.full((_ROWS, inner), 0.5, dtype=dtype)
    layer = Linear(inner, outer, bias=False).to(dtype)
    layer.load_state_dict({"weight": torch.full((outer, inner), 0.01)})
    layer.pack()
    layer(x)
    runs, spent, started = 0, 0.0, time.process_time()
    while spent < _MEASURE_S:
        layer(x)
        runs += 1
        # of all runs: what other threads took of one is told late
        spent = time.process_time() - started
    return 2.0 * _ROWS * inner * outer * runs / spent
