"""transformers' vision tower of the same checkpoint, and whether ours does the same work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vision.towers.grids import Grid
from vlmserve_common.compute.torchvision_shim import make_torchvision_importable

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


def load_reference(folder: Path, *, dtype: torch.dtype) -> Any:
    """transformers' model of a checkpoint folder, on the CPU, with sdpa attention."""
    make_torchvision_importable()
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    load: Callable[..., Any] = AutoModelForImageTextToText.from_pretrained
    return load(folder, dtype=dtype, attn_implementation="sdpa").eval()


class ReferenceTower:
    """`model.visual` of what `load_reference` gives, moved to a device."""

    def __init__(self, model: Any, *, device: torch.device, dtype: torch.dtype) -> None:
        self._visual: Any = model.model.visual.to(device)
        self._device = device
        self._dtype = dtype

    @torch.inference_mode()
    def encode(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """pixels float32 [P, patch elements] of several media, packed; grids: (t, h, w) of each. Rows [n, row width],
        DeepStack's beside the main ones."""
        made = self._visual(
            pixels.to(self._device, self._dtype), grid_thw=torch.tensor(grids, device=self._device), return_dict=True
        )
        return torch.cat([made.pooler_output, *(getattr(made, "deepstack_features", None) or [])], dim=1)


def check_rows(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest distance of a row of ours [n, width] from theirs, as a part of its length. What is compared in speed
    must be the same work: AssertionError for rows further away than rounding in their dtype takes them."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise AssertionError(f"rows differ: {list(ours.shape)} {ours.dtype}, not {list(theirs.shape)} {theirs.dtype}")
    wide = theirs.float()
    off = float(((ours.float() - wide).norm(dim=1) / wide.norm(dim=1)).max())
    limit = _TOLERANCE[ours.dtype]
    if not off < limit:
        raise AssertionError(f"rows differ by {off:.2g} of their length; {limit} is allowed in {ours.dtype}")
    return off
