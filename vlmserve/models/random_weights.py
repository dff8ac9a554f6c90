"""Random weights in place of a checkpoint's, for measurements that need no sensible answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from vlmserve.models.registry import load_config, make_model
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.checkpoint.hf_config import read_hf_config
from vlmserve_common.checkpoint.weights import stored_tensors
from vlmserve_common.compute.communicator import ALONE, Communicator

_EMBED_STD, _LOGIT_STD = 0.05, 2.5


def random_model(
    folder: Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    with_tower: bool = True,
    comm: Communicator = ALONE,
    mtp: bool = False,
    embeds_last: bool = False,
) -> VisionLanguageModel:
    """Make the model of a checkpoint folder, which needs no weights. Parameters and errors are those of `load_model`.

    On the meta device it is an outline.
    """
    config = load_config(folder, comm.shard, mtp=mtp, embeds_last=embeds_last)
    model = make_model(
        read_hf_config(folder), config, torch.device(device), dtype or config.dtype, with_tower=with_tower, comm=comm
    )
    fill_randomly(model)
    return model


def fill_randomly(model: nn.Module, *, seed: int = 0) -> None:
    """Fill all parameters where they are, without a copy on the host. The same seed on the same device, the same
    weights."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, tensor in stored_tensors(model):
        if tensor.is_meta:  # a tower that is elsewhere
            continue
        generator = generators.get(tensor.device)
        if generator is None:
            generator = generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
        mean, std = moments(name, tensor.shape)
        tensor.normal_(mean, std, generator=generator)


def moments(name: str, shape: Sequence[int]) -> tuple[float, float]:
    """Return mean and standard deviation of a weight, by its name and shape in a checkpoint. Matrices keep the size of
    their inputs; norms are near one, and the last one sets the logits' size."""
    if name.endswith("embed_tokens.weight"):
        return 0.0, _EMBED_STD
    if name.endswith("language_model.norm.weight"):
        return _LOGIT_STD / (_EMBED_STD * math.sqrt(shape[0])), 0.0
    if name.endswith("pos_embed.weight"):
        return 0.0, 0.3
    if len(shape) == 1:
        return float(name.endswith("weight")), 0.02
    # experts lie one behind the other
    return 0.0, 1 / math.sqrt(shape[-1] if ".experts." in name else math.prod(shape[1:]))
