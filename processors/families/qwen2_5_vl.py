"""Qwen2.5-VL: time positions follow the clock, so a video's speed shows."""

from __future__ import annotations

import numpy as np

from processors.families.base import ContinueText, MultimodalProcessor, ProcessorLimits
from processors.families.config import ProcessorConfig
from processors.inputs import Modality, MultimodalDataItem
from processors.resize import Allocate
from processors.video.rules import qwen2_rules
from vlmserve_common.errors import CheckpointError


class Qwen2_5VLProcessor(MultimodalProcessor):
    """Processor of model_type qwen2_5_vl (arXiv:2502.13923, "absolute time encoding")."""

    video_rules = staticmethod(qwen2_rules)
    coordinates = "absolute"

    def __init__(
        self,
        config: ProcessorConfig,
        limits: ProcessorLimits,
        continue_text: ContinueText | None = None,
        *,
        allocate: Allocate = np.empty,
    ) -> None:
        super().__init__(config, limits, continue_text, allocate=allocate)
        if config.tokens_per_second is None:
            raise CheckpointError("config.json: vision_config lacks tokens_per_second, which Qwen2.5-VL needs")
        self._tokens_per_second = config.tokens_per_second

    def time_interval(self, item: MultimodalDataItem) -> float:
        """tokens_per_second positions for each second between a video's temporal patches; 1 for a picture."""
        if item.modality is Modality.VIDEO:
            return self._tokens_per_second * item.second_per_grid_t
        return 1.0
