"""Qwen2-VL: a video's temporal patches are one position apart."""

from __future__ import annotations

from processors.families.base import MultimodalProcessor
from processors.inputs import MultimodalDataItem
from processors.video.rules import qwen2_rules


class Qwen2VLProcessor(MultimodalProcessor):
    """Processor of model_type qwen2_vl (arXiv:2409.12191)."""

    video_rules = staticmethod(qwen2_rules)
    coordinates = "0-1000"

    def time_interval(self, item: MultimodalDataItem) -> float:
        """One position per temporal patch."""
        return 1.0
