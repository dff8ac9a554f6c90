"""The processors of the model families, and which one a checkpoint gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from processors.families.base import ContinueText, ExpandedPrompt, MultimodalProcessor, ProcessorLimits, VideoBlock
from processors.families.config import ProcessorConfig, read_processor_config
from processors.families.omni import Qwen2_5OmniProcessor, Qwen3OmniProcessor
from processors.inputs import Modality, MultimodalDataItem
from processors.processed import ProcessedMedium
from processors.video.clips import ProcessedVideo
from processors.video.rules import qwen2_rules, qwen3_rules
from vlmserve_common.checkpoint.hf_config import TEXT_ARCHITECTURES
from vlmserve_common.errors import CheckpointError


class Qwen2VLProcessor(MultimodalProcessor):
    """Processor of model_type qwen2_vl (arXiv:2409.12191)."""

    video_rules = staticmethod(qwen2_rules)
    coordinates = "0-1000"


class Qwen2_5VLProcessor(MultimodalProcessor):
    """Processor of model_type qwen2_5_vl (arXiv:2502.13923). "Absolute time encoding": positions follow the clock."""

    video_rules = staticmethod(qwen2_rules)
    even_times = True
    coordinates = "absolute"

    def __init__(self, config: ProcessorConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        if config.tokens_per_second is None:
            raise CheckpointError("config.json: vision_config lacks tokens_per_second, which Qwen2.5-VL needs")
        self._tokens_per_second = config.tokens_per_second

    def time_interval(self, item: MultimodalDataItem) -> float:
        """Return the positions between two temporal patches: tokens_per_second for each second of a video, 1 for a
        picture."""
        if item.modality is Modality.VIDEO:
            return self._tokens_per_second * item.second_per_grid_t
        return 1.0


class Qwen3VLProcessor(MultimodalProcessor):
    """Processor of model_type qwen3_vl (arXiv:2511.21631): timestamps in the text tell the time.

    A video item has one offset range for each temporal patch.
    """

    video_rules = staticmethod(qwen3_rules)
    coordinates = "0-1000"

    def place_video(self, before: list[int], video: ProcessedVideo, after: int | None) -> VideoBlock:
        """Write `<T seconds>`, vision start, pads and vision end for each temporal patch (transformers'
        `Qwen3VLProcessor`).

        In the published form these replace the template's own markers.
        """
        if self._continue_text is None:
            raise ValueError("a Qwen3-VL video needs the tokenizer: make_processor(continue_text=...)")
        tokens = self.token_ids
        published = self.limits.video_options.reference == "published"
        marked = bool(before) and before[-1] == tokens.vision_start and after == tokens.vision_end
        replaced = published and marked
        first, *further = (f"<{time:.1f} seconds>" for time in video.patch_times)
        # The first one may stand behind text, which it is tokenized together with.
        stamps = [self._continue_text(before[:-1] if replaced else before, first), *map(self._stamp, further)]
        counts = video.patch_tokens
        ids = np.full(sum(map(len, stamps)) + sum(counts) + 2 * len(counts), tokens.video_pad, np.int64)
        offsets, at = list[tuple[int, int]](), 0
        for stamp, count in zip(stamps, counts, strict=True):
            start = at + len(stamp) + 1
            ids[at:start] = *stamp, tokens.vision_start
            offsets.append((start, start + count))
            ids[start + count] = tokens.vision_end
            at = start + count + 1
        return VideoBlock(ids=ids, offsets=offsets, skip=int(replaced))

    @cached_property
    def _stamp(self) -> Callable[[str], tuple[int, ...]]:
        """Tokenizes the text of a time. A live video is expanded again with each temporal patch that comes."""
        encode = self._continue_text
        assert encode is not None
        return lru_cache(4096)(lambda text: tuple(encode((), text)))


class HybridProcessor(Qwen3VLProcessor):
    """Processor of models that have recurrent layers: their state is of all that came before."""

    can_slide = False


class TextProcessor(MultimodalProcessor):
    """Processor of models that read text only."""

    sees = False
    video_rules = staticmethod(qwen3_rules)
    coordinates = "0-1000"

    def expand(self, prompt_ids: Sequence[int] | np.ndarray, media: Sequence[ProcessedMedium]) -> ExpandedPrompt:
        """Return the prompt as it is: no token stands for media."""
        assert not media
        return ExpandedPrompt(np.asarray(prompt_ids, np.int64), None)


_PROCESSORS: Mapping[str, type[MultimodalProcessor]] = {
    "qwen2_vl": Qwen2VLProcessor,
    "qwen2_5_vl": Qwen2_5VLProcessor,
    "qwen3_vl": Qwen3VLProcessor,
    "qwen3_vl_moe": Qwen3VLProcessor,
    "qwen3_5": HybridProcessor,
    "qwen3_5_moe": HybridProcessor,
    "qwen4_exp": HybridProcessor,
    "qwen2_5_omni": Qwen2_5OmniProcessor,
    "qwen3_omni_moe": Qwen3OmniProcessor,
    **dict.fromkeys(TEXT_ARCHITECTURES, TextProcessor),
}


def make_processor(
    model_path: str | Path,
    hf_config: Mapping[str, Any],
    limits: ProcessorLimits | None = None,
    continue_text: ContinueText | None = None,
) -> MultimodalProcessor:
    """Make the processor of a checkpoint folder.

    `hf_config`: the content of its config.json. `continue_text`: its tokenizer, for videos of families that write the
    time into the prompt. Raises CheckpointError for an unknown model_type or unusable picture settings.
    """
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _PROCESSORS:
        raise CheckpointError(f"model_type {model_type!r} is not supported, only {sorted(_PROCESSORS)}")
    config = read_processor_config(model_path, hf_config)
    return _PROCESSORS[model_type](config, limits or ProcessorLimits(), continue_text)
