"""The part of a processor that all families share: media to patches, and a prompt with placeholders to
engine input.

The two halves are separate on purpose. `process_image` and `process_video` are expensive: they run in the media
workers, and their results are cached by content. `expand` is cheap and needs the whole request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
from PIL import Image

from processors.audio.options import AudioLimits
from processors.embeds import GridLimits, check_embeds, check_times
from processors.families.config import ProcessorConfig, TokenIds
from processors.families.processor_kwargs import RequestKnobs, parse_processor_kwargs
from processors.hashing import embeds_digest, fewer_digest, media_digest, original_digest, patch_digest
from processors.image.decoding import DecodeLimits, normalize_image
from processors.image.sizes import ImageSizes
from processors.inputs import Modality, MultimodalDataItem, MultimodalInputs
from processors.knobs import ImageKnobs
from processors.mrope import MediaSpan, mrope_positions
from processors.processed import ProcessedAudio, ProcessedImage, ProcessedMedium, ProcessedVideo
from processors.pruning import NOTHING_LEAVES, Pruning, grid_mask, without_repeats
from processors.resize import Allocate, PatchConfig, fit_to_resize_later, frames_to_patches, planes, resize_frames
from processors.video.adaptive import FirstLook
from processors.video.clips import VideoProcessor
from processors.video.options import RuleSettings, VideoKnobs, VideoLimits, VideoOptions
from processors.video.rules import SHARED_RULES, VideoRules
from vlmserve_common.errors import BadRequestError

ContinueText: TypeAlias = Callable[[Sequence[int], str], list[int]]
"""Tokenizes more text behind some ids: (ids of a text, more text) -> ids of both together. These can differ from the
two parts' ids joined."""


Coordinates = Literal["absolute", "0-1000"]
"""How a family's models give places in a picture: in pixels of the resized picture, or in thousandths of its width and
height."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorLimits:
    """Server-side limits and options.

    `max_pixels`: the largest area that a picture or frame is resized to; None for the checkpoint's own maximum.
    `tell_max_pixels`: report a `Clamp` for each medium that this limit makes smaller. It is on when the server chose
    the limit itself. `low_detail_tokens`: most tokens of a picture of detail "low". `embeds`: accept media as
    embeddings. `resize_later`: leave resizing and cutting to the tower's device, for originals that are not too large.
    `pruning`: what leaves media unless a request says.
    """

    decode: DecodeLimits = field(default_factory=DecodeLimits)
    max_pixels: int | None = None
    tell_max_pixels: bool = field(default=False, repr=False)  # of no effect on pixels, which the text stands for
    low_detail_tokens: int = 64
    embeds: bool = False
    resize_later: bool = False
    pruning: Pruning = NOTHING_LEAVES
    video: VideoLimits = field(default_factory=VideoLimits)
    audio: AudioLimits = field(default_factory=AudioLimits)
    video_options: VideoOptions = field(default_factory=VideoOptions)


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoBlock:
    """A video's place in a prompt.

    `ids`: prompt ids from the end of the previous medium to the end of this video. `offsets`: ranges of pad tokens,
    counted from the start of `ids`. `skip`: how many prompt ids after the placeholder the block has replaced.
    """

    ids: Sequence[int] | np.ndarray
    offsets: list[tuple[int, int]]
    skip: int = 0


class ExpandedPrompt(NamedTuple):
    """An expanded prompt. `input_ids`: int64 [L], with pad tokens in place of each placeholder. `mm_inputs`: None for a
    prompt without media."""

    input_ids: np.ndarray
    mm_inputs: MultimodalInputs | None


class MultimodalProcessor(ABC):
    """Processes the pictures, videos and prompts of one checkpoint. Any number of threads can use it.

    `continue_text`: the checkpoint's tokenizer, for families that write the time into a video's tokens. `allocate`:
    makes the arrays that patches are written to. `sees`: whether the model takes any. `even_times`: positions take all
    temporal patches of a clip to be equally far apart in time. `can_slide`: KV goes on without what has left before it.
    """

    sees: ClassVar[bool] = True
    even_times: ClassVar[bool] = False
    can_slide: ClassVar[bool] = True
    coordinates: ClassVar[Coordinates]

    def __init__(
        self,
        config: ProcessorConfig,
        limits: ProcessorLimits,
        continue_text: ContinueText | None = None,
        *,
        allocate: Allocate = np.empty,
    ) -> None:
        self.config = config
        self.limits = limits
        self._allocate = allocate
        self._continue_text = continue_text
        self.sizes = ImageSizes(
            factor=config.patches.factor,
            min_pixels=config.min_pixels,
            max_pixels=config.max_pixels,
            limit=limits.max_pixels,
            tell_limit=limits.tell_max_pixels,
            low_detail_tokens=limits.low_detail_tokens,
        )
        self._rules = self._make_rules()
        self._video = VideoProcessor(
            self._rules,
            config.video_patches,
            limits.video,
            allocate,
            resize_later=limits.resize_later,
            pruning=limits.pruning,
            even_times=self.even_times,
        )

    @property
    def defaults(self) -> dict[str, float | None]:
        """The knobs of pictures and clips that a request leaves out: area limits of a picture, and frames a second."""
        high = min(self.sizes.max_pixels, self.sizes.highest)
        settings = self._rules.sizer.settings
        fps = settings.default_fps if settings.config.num_frames is None else None
        return {"min_pixels": min(self.sizes.min_pixels, high), "max_pixels": high, "fps": fps}

    @staticmethod
    @abstractmethod
    def video_rules(settings: RuleSettings) -> VideoRules:
        """Make the family's own rules. `--video-sampling` can replace them."""

    def time_interval(self, item: MultimodalDataItem) -> float:
        """Return the M-RoPE positions between two temporal patches of `item`."""
        return 1.0

    @property
    def hears(self) -> bool:
        """Whether the model takes sounds."""
        return self.config.audio is not None

    def parse_kwargs(self, given: Mapping[str, Any]) -> RequestKnobs:
        """Parse a request's `mm_processor_kwargs`. Raises BadRequestError for unknown keys and impossible values."""
        return parse_processor_kwargs(given, video_counts_clip=self._rules.sizer.counts_clip, hears=self.hears)

    @property
    def token_ids(self) -> TokenIds:
        return self.config.token_ids

    def process_image(self, image: Image.Image, knobs: ImageKnobs | None = None) -> ProcessedImage:
        """Bring one picture upright, to RGB and to size, and cut it into patches. Raises BadRequestError."""
        rgb = normalize_image(image, self.limits.decode)
        knobs = knobs or ImageKnobs()
        height, width, clamps = self.sizes.fit(rgb.height, rgb.width, knobs)
        patches = self.config.patches
        grid = (1, height // patches.patch_size, width // patches.patch_size)
        skips = self.limits.pruning.skip_repeats if knobs.skip_repeats is None else knobs.skip_repeats
        later = (  # repeats are found in resized pixels
            self.limits.resize_later and not skips and fit_to_resize_later(1, (rgb.height, rgb.width), (height, width))
        )
        digests: tuple[bytes, ...]
        if later:
            feature = self._allocate((1, rgb.height, rgb.width, 3), np.uint8)
            feature[0] = rgb
            digests = (original_digest(grid[1:], feature, patches),)
        else:
            pixels = planes(resize_frames(np.array(rgb)[None], height, width, patches.resample))
            feature = self._allocate((grid[1] * grid[2], patches.row_width(frames=1)), np.uint8)
            frames_to_patches(pixels.transpose(0, 2, 3, 1), patches, feature)
            digests = (patch_digest(grid[1:], pixels, patches),)
        kept: tuple[bytes, ...] = ()
        if skips:
            kept, feature, digests = without_repeats(feature, grid, digests, patches.merge_size, self._allocate)
        feature.flags.writeable = False
        return ProcessedImage(
            digest=fewer_digest(media_digest(Modality.IMAGE, grid, digests), kept, ()),
            patch_digests=digests,
            grid_thw=grid,
            feature=feature,
            normalization=patches.normalization(frames=1),
            resizing=patches.resizing if later else None,
            num_tokens=sum(part.count(1) for part in kept) or self._num_tokens(grid),
            kept=kept,
            pruning=Pruning(skip_repeats=skips),
            source_size=rgb.size,
            clamps=clamps,
            ignored=self.sizes.ignored(knobs),
        )

    def check_embeds_allowed(self) -> None:
        """Raise BadRequestError unless pictures and videos may come as embeddings."""
        if not self.limits.embeds:
            what = "pictures and videos that come encoded are refused (setting --enable-mm-embeds)"
            raise BadRequestError(what, code="unsupported_content")
        if self.config.embeds is None:
            raise BadRequestError("this checkpoint's config.json does not say how wide rows are")

    def process_embeds(self, tensors: Mapping[str, Any]) -> ProcessedImage:
        """Process a picture that comes as embeddings (see `processors.embeds`). Raises BadRequestError."""
        rows, grid = self._check_embeds(tensors, Modality.IMAGE, self.config.patches)
        digest = embeds_digest(grid, rows)
        return ProcessedImage(
            digest=digest,
            patch_digests=(digest,),
            grid_thw=grid,
            feature=rows,
            num_tokens=len(rows),
            source_size=_pixel_size(grid, self.config.patches),
            encoded=True,
        )

    def process_video_embeds(self, tensors: Mapping[str, Any]) -> ProcessedVideo:
        """Process a video that comes as embeddings (see `processors.embeds`). Raises BadRequestError."""
        patches = self.config.video_patches
        depth = patches.temporal_patch_size
        rows, grid = self._check_embeds(tensors, Modality.VIDEO, patches)
        interval, times = check_times(tensors, grid[0], depth)
        digests = tuple(embeds_digest((1, *grid[1:]), part) for part in np.split(rows, grid[0]))
        return ProcessedVideo(
            digest=media_digest(Modality.VIDEO, grid, digests),
            patch_digests=digests,
            grid_thw=grid,
            feature=rows,
            num_tokens=len(rows),
            source_size=_pixel_size(grid, patches),
            encoded=True,
            frame_indices=(),
            frame_times=(),
            patch_times=times,
            second_per_grid_t=interval,
            source_fps=depth / interval,
            source_frames=grid[0] * depth,
            sampling="encoded",
            sample_fps=depth / interval,
        )

    def _check_embeds(
        self, tensors: Mapping[str, Any], modality: Modality, patches: PatchConfig
    ) -> tuple[np.ndarray, tuple[int, int, int]]:
        self.check_embeds_allowed()
        assert self.config.embeds is not None
        limits = GridLimits(
            merge_size=patches.merge_size,
            patch_size=patches.patch_size,
            max_pixels=self.sizes.highest,
            max_patches=max(1, self.limits.video.max_frames // patches.temporal_patch_size),
        )
        return check_embeds(tensors, self.config.embeds, limits, modality)

    def process_video(self, source: bytes | Sequence[Image.Image], knobs: VideoKnobs | None = None) -> ProcessedVideo:
        """Choose, resize and cut the frames of a video file, or a list of frames. Raises BadRequestError."""
        if isinstance(source, bytes):
            return self._video.process_clip(source, knobs or VideoKnobs())
        return self.process_frames(source, len(source), knobs)

    def look(self, clip: bytes, knobs: VideoKnobs) -> FirstLook:
        """Return the frames of a video file that are to be compared with a question. Raises BadRequestError."""
        return self._video.look(clip, knobs)

    def process_frames(
        self, frames: Iterable[Image.Image], count: int, knobs: VideoKnobs | None = None
    ) -> ProcessedVideo:
        """Process a list of frames, which can be produced one by one. Raises BadRequestError."""
        arrays = (np.array(normalize_image(frame, self.limits.decode)) for frame in frames)
        return self._video.process_frames(arrays, count, knobs or VideoKnobs())

    def process_units(self, units: Sequence[bytes], knobs: VideoKnobs) -> ProcessedVideo:
        """Process frames of an H.264 stream, those of `knobs.h264_frames`. Raises BadRequestError."""
        return self._video.process_units(units, knobs)

    def process_audio(self, data: bytes) -> ProcessedAudio:
        """Decode a sound file, or the sound track of a clip, and make its features. Raises BadRequestError."""
        raise BadRequestError("the model takes no sounds", code="unsupported_content")

    def expand(self, prompt_ids: Sequence[int] | np.ndarray, media: Sequence[ProcessedMedium]) -> ExpandedPrompt:
        """Replace each medium's placeholder by its pad tokens, in prompt order.

        `prompt_ids`: the tokenized prompt, with one image pad id per picture and one video pad id per video. Raises
        BadRequestError when placeholders and media do not match.
        """
        ids = np.asarray(prompt_ids, np.int64)
        places = np.flatnonzero((ids == self.token_ids.image_pad) | (ids == self.token_ids.video_pad))
        self._check_places(ids[places], media)
        if not media:
            return ExpandedPrompt(ids, None)
        parts: list[np.ndarray] = []
        items: list[MultimodalDataItem] = []
        done = length = 0  # ids of the prompt used; ids of the result so far
        for place, medium in zip(places.tolist(), media, strict=True):
            before = ids[done:place]
            assert not isinstance(medium, ProcessedAudio), "no placeholder stands for a sound"
            if isinstance(medium, ProcessedVideo):
                block = self.place_video(before.tolist(), medium, int(ids[place + 1]) if place + 1 < len(ids) else None)
                offsets = tuple((length + start, length + end) for start, end in block.offsets)
                new = [np.asarray(block.ids, np.int64)]
                done = place + 1 + block.skip
            else:
                start = length + len(before)
                offsets = ((start, start + medium.num_tokens),)
                new = [before, np.full(medium.num_tokens, self.token_ids.image_pad, np.int64)]
                done = place + 1
            items.append(data_item(medium, offsets))
            parts += new
            length += sum(map(len, new))
        input_ids = np.concatenate([*parts, ids[done:]])
        positions, delta = self.positions(len(input_ids), items)
        inputs = MultimodalInputs(items=tuple(items), mrope_positions=positions, mrope_position_delta=delta)
        return ExpandedPrompt(input_ids, inputs)

    def place_video(self, before: list[int], video: ProcessedVideo, after: int | None) -> VideoBlock:
        """Return a video's tokens. `before`: prompt ids since the previous medium. `after`: the id behind the
        placeholder."""
        pads = [self.token_ids.video_pad] * video.num_tokens
        return VideoBlock(ids=before + pads, offsets=[(len(before), len(before) + len(pads))])

    def process(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        media: Sequence[Image.Image | ProcessedMedium] = (),
        knobs: ImageKnobs | None = None,
    ) -> ExpandedPrompt:
        """Run `process_image` on each picture that is not processed yet, then `expand`."""
        done = [self.process_image(x, knobs) if isinstance(x, Image.Image) else x for x in media]
        return self.expand(prompt_ids, done)

    def positions(self, length: int, items: Sequence[MultimodalDataItem]) -> tuple[np.ndarray, int]:
        """Return the M-RoPE positions int64 [3, length] and the delta of an expanded prompt with `items`, in prompt
        order.

        An item with one range is one block. An item with several ranges (a Qwen3-VL video) has one temporal patch in
        each.
        """
        merge = self.config.patches.merge_size
        spans = []
        for item in items:
            t, h, w = item.grid_thw
            grid = (t // len(item.offsets), h // merge, w // merge)
            interval = self.time_interval(item)
            mask = grid_mask(grid[1] * grid[2], t, item.kept, item.counts)
            masks = [None] * len(item.offsets) if mask is None else mask.reshape(len(item.offsets), -1)
            first, skipped = item.gone if len(item.offsets) == 1 else 0, item.skipped
            for (start, end), places in zip(item.offsets, masks, strict=True):
                span = MediaSpan(
                    start=start, grid=grid, time_interval=interval, mask=places, first=first, skipped=skipped
                )
                skipped = 0
                if span.end != end:
                    raise ValueError(f"range [{start}, {end}) of a media item does not hold a grid of {grid}")
                spans.append(span)
        return mrope_positions(length, spans, time_counts=self.limits.video_options.reference == "published")

    def positions_of(self, video: ProcessedVideo) -> int:
        """Return how many positions a video takes in a prompt, with its marks."""
        tokens = self.token_ids
        expanded = self.expand([tokens.vision_start, tokens.video_pad, tokens.vision_end], [video])
        assert expanded.mm_inputs is not None
        return len(expanded.input_ids) + expanded.mm_inputs.mrope_position_delta

    def _make_rules(self) -> VideoRules:
        options = self.limits.video_options
        return SHARED_RULES.get(options.sampling, self.video_rules)(
            RuleSettings(
                config=self.config.video,
                patches=self.config.video_patches,
                fps=options.fps,
                cap_pixels_per_frame=options.cap_pixels_per_frame,
                max_frames=self.limits.video.max_frames,
                max_pixels=self.limits.max_pixels,
                tell_max_pixels=self.limits.tell_max_pixels,
            )
        )

    def _check_places(self, pads: np.ndarray, media: Sequence[ProcessedMedium]) -> None:
        """Raise BadRequestError unless placeholders and media match. `pads`: the ids of the placeholders, in order."""
        kinds = [modality_of(medium) for medium in media]
        names = {
            Modality.IMAGE: (self.token_ids.image_pad, "picture"),
            Modality.VIDEO: (self.token_ids.video_pad, "video"),
            Modality.AUDIO: (self.token_ids.audio_pad, "sound"),
        }
        wanted = [next(kind for kind, (pad, _) in names.items() if pad == one) for one in pads.tolist()]
        for kind, (_, name) in names.items():
            places, count = wanted.count(kind), kinds.count(kind)
            if places != count:
                raise BadRequestError(
                    f"the prompt text contains {places} {kind.value} placeholder{'s' * (places != 1)} but the request "
                    f"has {count} {name}{'s' * (count != 1)}: each {name} needs exactly one, which the chat "
                    "template writes",
                    code="placeholder_mismatch",
                )
        if wanted != kinds:
            raise BadRequestError(
                "the prompt text has its placeholders in another order than the request's media",
                code="placeholder_mismatch",
            )

    def _num_tokens(self, grid: tuple[int, int, int]) -> int:
        return grid[0] * grid[1] * grid[2] // self.config.patches.merge_size**2


def modality_of(medium: ProcessedMedium) -> Modality:
    """Return what a medium is."""
    if isinstance(medium, ProcessedAudio):
        return Modality.AUDIO
    return Modality.VIDEO if isinstance(medium, ProcessedVideo) else Modality.IMAGE


def data_items(medium: ProcessedMedium, merge_size: int) -> list[MultimodalDataItem]:
    """Convert a medium that is only encoded."""
    sound = medium.sound if isinstance(medium, ProcessedVideo) else None
    if isinstance(medium, ProcessedAudio):
        return sound_items(medium, merge_size)
    return [data_item(medium), *(sound_items(sound, merge_size) if sound is not None else ())]


def sound_items(sound: ProcessedAudio, merge_size: int, places: np.ndarray | None = None) -> list[MultimodalDataItem]:
    """Convert a sound for the engine: its whole parts, and what is left behind them. `places`: of its tokens in the
    prompt, ascending."""
    whole = min(len(sound.feature) // sound.part_frames, sound.num_tokens // sound.part_tokens)
    frames, tokens = whole * sound.part_frames, whole * sound.part_tokens
    items = []
    for parts, feature, digests, first, last in (
        (whole, sound.feature[:frames], sound.patch_digests[:whole], 0, tokens),
        (1, sound.feature[frames:], sound.patch_digests[whole:], tokens, sound.num_tokens),
    ):
        if last > first:
            items.append(
                MultimodalDataItem(
                    modality=Modality.AUDIO,
                    digest=sound.digest,
                    patch_digests=digests,
                    grid_thw=(parts, merge_size * ((last - first) // parts), merge_size),
                    offsets=() if places is None else ranges(places[first:last]),
                    feature=feature,
                )
            )
    return items


def ranges(places: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Return ascending numbers as half-open ranges."""
    starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    ends = [*starts[1:], len(places)]
    return tuple((int(places[a]), int(places[b - 1]) + 1) for a, b in zip(starts, ends, strict=True))


def data_item(medium: ProcessedImage | ProcessedVideo, offsets: tuple[tuple[int, int], ...] = ()) -> MultimodalDataItem:
    """Convert a medium for the engine. `offsets`: its place in the prompt; empty for a medium that is only encoded."""
    video = medium if isinstance(medium, ProcessedVideo) else None
    return MultimodalDataItem(
        modality=modality_of(medium),
        digest=medium.digest,
        patch_digests=medium.patch_digests,
        grid_thw=medium.grid_thw,
        offsets=offsets,
        feature=medium.feature,
        normalization=medium.normalization,
        resizing=medium.resizing,
        encoded=medium.encoded,
        kept=medium.kept,
        counts=medium.counts,
        parts=medium.parts,
        second_per_grid_t=0.0 if video is None else video.second_per_grid_t,
        gone=0 if video is None else video.gone,
        skipped=0 if video is None else video.skipped,
    )


def _pixel_size(grid: tuple[int, int, int], patches: PatchConfig) -> tuple[int, int]:
    """Return (width, height) of a grid in pixels."""
    return grid[2] * patches.patch_size, grid[1] * patches.patch_size
