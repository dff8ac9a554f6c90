"""Qwen3-VL: timestamps in the text tell the time; each temporal patch of a video is a block of its own."""

from __future__ import annotations

from processors.families.base import MultimodalProcessor, VideoBlock
from processors.inputs import MultimodalDataItem
from processors.video.clips import ProcessedVideo
from processors.video.rules import qwen3_rules


class Qwen3VLProcessor(MultimodalProcessor):
    """Processor of model_type qwen3_vl (arXiv:2511.21631). A video item has one offset range per temporal patch."""

    video_rules = staticmethod(qwen3_rules)
    coordinates = "0-1000"

    def time_interval(self, item: MultimodalDataItem) -> float:
        """Of no effect, as blocks are one temporal patch long."""
        return 1.0

    def place_video(self, before: list[int], video: ProcessedVideo, after: int | None) -> VideoBlock:
        """`<T seconds>`, vision start, pads, vision end, for each temporal patch (`Qwen3VLProcessor` of transformers).

        The published form has them in the place of the template's own markers.
        """
        if self._continue_text is None:
            raise ValueError("a Qwen3-VL video needs the tokenizer: make_processor(continue_text=...)")
        tokens = self.token_ids
        published = self.limits.video_options.reference == "published"
        marked = bool(before) and before[-1] == tokens.vision_start and after == tokens.vision_end
        replaced = published and marked
        pads = [tokens.video_pad] * (video.num_tokens // video.grid_thw[0])
        stamps = [f"<{time:.1f} seconds>" for time in video.patch_times]
        # The first one may stand behind text, which it is tokenized together with.
        ids = self._continue_text(before[:-1] if replaced else before, stamps[0])
        offsets: list[tuple[int, int]] = []
        for stamp in stamps:
            if offsets:
                ids += self._continue_text((), stamp)
            ids.append(tokens.vision_start)
            offsets.append((len(ids), len(ids) + len(pads)))
            ids += [*pads, tokens.vision_end]
        return VideoBlock(ids=ids, offsets=offsets, skip=int(replaced))
