"""Qwen3-VL: timestamps in the text tell the time; each temporal patch of a video is a block of its own."""

from __future__ import annotations

from processors.base import MultimodalProcessor
from processors.inputs import MultimodalDataItem


class Qwen3VLProcessor(MultimodalProcessor):
    """Processor of model_type qwen3_vl (arXiv:2511.21631). A video item has one offset range per temporal patch."""

    def time_interval(self, item: MultimodalDataItem) -> float:
        """Of no effect, as blocks are one temporal patch long."""
        return 1.0
