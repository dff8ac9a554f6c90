"""The Omni families (arXiv:2503.20215, arXiv:2509.17765): pictures, videos and sounds, and videos with their sound.

Positions follow the clock: sounds have so many a second, and a clip's frames stand at their time. A clip's frames and
its sound alternate in the prompt.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image

from processors.families.base import (
    ExpandedPrompt,
    MultimodalProcessor,
    data_item,
    ranges,
    sound_items,
)
from processors.families.config import ProcessorConfig
from processors.formats import INVALID_AUDIO, file_format
from processors.hashing import digest_fields, media_digest, sound_digest
from processors.inputs import Modality, MultimodalDataItem, MultimodalInputs
from processors.knobs import Clamp
from processors.mrope import grid_positions
from processors.processed import ProcessedAudio, ProcessedMedium, ProcessedVideo
from processors.pruning import grid_mask
from processors.video.options import VideoKnobs
from processors.video.rules import MAX_TOKENS, MIN_TOKENS, qwen2_rules
from vlmserve_common.errors import BadRequestError, CheckpointError

if TYPE_CHECKING:
    from processors.audio.decoding import Sound


class OmniProcessor(MultimodalProcessor):
    """The part that both families share.

    `marks_share`: the marks around a clip with sound have one position on either side. `turn_s`: clip and sound take
    turns of so many seconds; 0 to merge them by time.
    """

    video_rules = staticmethod(qwen2_rules)
    even_times = True
    can_slide = False  # their positions follow the clock in another way
    marks_share: ClassVar[bool]

    def __init__(self, config: ProcessorConfig, *args: Any, **options: Any) -> None:
        if config.audio is None:
            raise CheckpointError("config.json: there is no audio_config, which Omni models need")
        token = config.video_patches.factor**2
        # no file has these limits
        video = replace(config.video, min_pixels=MIN_TOKENS * token, max_pixels=MAX_TOKENS * token)
        super().__init__(replace(config, video=video), *args, **options)
        self._audio = config.audio

    @property
    def turn_s(self) -> float:
        return 0.0

    @abstractmethod
    def count_tokens(self, frames: int) -> int:
        """Return the tokens of a sound of so many frames."""

    @abstractmethod
    def fit_samples(self, samples: np.ndarray) -> tuple[np.ndarray, int, int]:
        """Return the samples to transform, their frames, and the frames that the tower gets: zeros follow."""

    def process_audio(self, data: bytes) -> ProcessedAudio:
        """Decode a sound, or a clip's, and make its features. Raises BadRequestError."""
        from processors.audio.decoding import decode_sound  # only who gets a sound needs PyAV

        return self._features(decode_sound(data, self._audio.rate, self.limits.audio))

    def process_video(self, source: bytes | Sequence[Image.Image], knobs: VideoKnobs | None = None) -> ProcessedVideo:
        """Process a clip, and its sound if the request asks for it. Raises BadRequestError."""
        if knobs is None or not knobs.use_audio_in_video:
            return self._timed(super().process_video(source, knobs), knobs)
        if knobs.video_pruning_rate:  # which places stay is known when tokens of sound stand between them already
            what = f"video_pruning_rate is {knobs.video_pruning_rate}, and must be 0 with use_audio_in_video"
            raise BadRequestError(what, code="invalid_value")
        knobs = replace(knobs, video_pruning_rate=0.0)
        made = self._timed(super().process_video(source, knobs), knobs)
        track = None
        if isinstance(source, bytes) and (found := file_format(source)) is not None and found.ffmpeg is not None:
            from processors.audio.decoding import decode_track

            start, end = knobs.video_start or 0.0, knobs.video_end
            track = decode_track(source, found.ffmpeg, self._audio.rate, self.limits.audio, start=start, end=end)
        if track is None:
            return _not_heard(made)
        return replace(made, sound=self._features(track))

    def process_frames(
        self, frames: Iterable[Image.Image], count: int, knobs: VideoKnobs | None = None
    ) -> ProcessedVideo:
        """Process a list of frames, which has no sound. Raises BadRequestError."""
        made = self._timed(super().process_frames(frames, count, knobs), knobs)
        asked = knobs is not None and knobs.use_audio_in_video
        return _not_heard(made) if asked else made

    def time_interval(self, item: MultimodalDataItem) -> float:
        """Return the positions between two temporal patches of a clip."""
        return self._audio.positions_per_s * item.second_per_grid_t if item.modality is Modality.VIDEO else 1.0

    def expand(self, prompt_ids: Sequence[int] | np.ndarray, media: Sequence[ProcessedMedium]) -> ExpandedPrompt:
        """Replace each medium's placeholder by its pad tokens; see `MultimodalProcessor.expand`."""
        ids = np.asarray(prompt_ids, np.int64)
        places = np.flatnonzero(np.isin(ids, self.token_ids.pads))
        self._check_places(ids[places], media)
        if not media:
            return ExpandedPrompt(ids, None)
        prompt, done = _Prompt(), 0
        for place, medium in zip(places.tolist(), media, strict=True):
            prompt.add_text(ids[done:place])
            done = place + 1
            if isinstance(medium, ProcessedAudio):
                rows = self._sound_positions(medium)
                prompt.items += sound_items(medium, self._merge, prompt.add(self.token_ids.audio_pad, rows))
            elif isinstance(medium, ProcessedVideo) and medium.sound is not None:
                self._add_clip(prompt, medium, medium.sound)
            else:
                item = data_item(medium)
                video = item.modality is Modality.VIDEO
                pad = self.token_ids.video_pad if video else self.token_ids.image_pad
                positions, mask = self._grid_positions(item)
                end = prompt.next + int(positions.max()) + 1  # also of places without a token
                shown = prompt.add(pad, positions if mask is None else positions[:, mask])
                prompt.items.append(replace(item, offsets=ranges(shown)))
                prompt.next = end
        prompt.add_text(ids[done:])
        return prompt.expanded()

    def _add_clip(self, prompt: _Prompt, clip: ProcessedVideo, sound: ProcessedAudio) -> None:
        tokens, item = self.token_ids, data_item(clip)
        (seen, mask), heard = self._grid_positions(item), self._sound_positions(sound)
        turn = self.turn_s * self._audio.positions_per_s
        times = np.concatenate((seen[0], heard[0]))
        order = np.argsort(times // turn if turn else times, kind="stable")  # frames before sound where equal
        positions = np.concatenate((seen, heard), axis=1)[:, order]
        is_video = order < seen.shape[1]
        # Behind it counts only the last run of placeholders of one kind: that is the reference.
        run = np.flatnonzero(np.diff(is_video, prepend=not is_video[0]))[-1]
        last = int(positions[:, run:].max())  # also of places without a token
        if mask is not None:
            stays = np.concatenate((mask, np.ones(heard.shape[1], bool)))[order]
            positions, is_video = positions[:, stays], is_video[stays]
        prompt.next -= self.marks_share
        prompt.add_text(np.array([tokens.audio_start]))
        end = prompt.next + last + 1
        places = prompt.add(np.where(is_video, tokens.video_pad, tokens.audio_pad), positions)
        prompt.next = end
        prompt.add_text(np.array([tokens.audio_end]))
        prompt.next -= self.marks_share
        # a clip without its sound has other positions
        digest = digest_fields([b"vlmserve clip with sound 1", clip.digest, sound.digest])
        items = [replace(item, offsets=ranges(places[is_video]))]
        items += sound_items(sound, self._merge, places[~is_video])
        prompt.items += sorted((replace(one, digest=digest) for one in items), key=lambda one: one.offsets[0])

    @property
    def _merge(self) -> int:
        return self.config.patches.merge_size

    def _grid_positions(self, item: MultimodalDataItem) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the positions of all places of a grid, and which of them have a token; None for all."""
        t, h, w = item.grid_thw[0], item.grid_thw[1] // self._merge, item.grid_thw[2] // self._merge
        mask = grid_mask(h * w, t, item.kept, item.counts)
        return grid_positions((t, h, w), self.time_interval(item)), None if mask is None else mask.reshape(-1)

    def _sound_positions(self, sound: ProcessedAudio) -> np.ndarray:
        return np.broadcast_to(np.arange(sound.num_tokens), (3, sound.num_tokens))

    def _timed(self, made: ProcessedVideo, knobs: VideoKnobs | None) -> ProcessedVideo:
        """Return the clip with the time that was asked for between its temporal patches, as the reference counts it
        even where a short clip was sampled more densely."""
        fps = (knobs.fps if knobs else None) or self._rules.sizer.settings.default_fps
        return replace(made, second_per_grid_t=self.config.video_patches.temporal_patch_size / fps)

    def _features(self, sound: Sound) -> ProcessedAudio:
        from processors.audio.log_mel import log_mel  # with torch, which only media processes have

        config = self._audio
        samples, frames, shown = self.fit_samples(sound.samples)
        tokens = self.count_tokens(frames)
        self._check_tokens(tokens, len(sound.samples))
        feature = self._allocate((shown, config.mels), np.float32)
        feature[frames:] = 0
        log_mel(samples, frames, rate=config.rate, n_fft=config.n_fft, hop=config.hop, out=feature)
        feature.flags.writeable = False
        part = config.window_frames
        part_tokens = self.count_tokens(part)
        digests = tuple(
            sound_digest(feature[start : start + part], min(part_tokens, tokens - first))
            for start, first in zip(range(0, shown, part), range(0, tokens, part_tokens), strict=False)
        )
        grid = (1, self._merge * tokens, self._merge)
        whole, used = len(sound.samples) / config.rate, min(len(samples), len(sound.samples)) / config.rate
        return ProcessedAudio(
            digest=media_digest(Modality.AUDIO, grid, digests),
            patch_digests=digests,
            grid_thw=grid,
            feature=feature,
            num_tokens=tokens,
            source_size=(0, 0),
            clamps=()
            if used == whole
            else (Clamp(knob="seconds", asked=whole, used=used, limit=used, setting="the checkpoint's chunk_length"),),
            part_frames=part,
            part_tokens=part_tokens,
            source_rate=sound.source_rate,
            channels=sound.channels,
            seconds=used,
        )

    def _check_tokens(self, tokens: int, samples: int) -> None:
        if tokens < 1:
            raise BadRequestError(
                f"the sound is {samples / self._audio.rate * 1000:.1f} ms long; the model hears sounds of "
                f"{4 * self._audio.hop * 1000 // self._audio.rate} ms and more (no setting changes that)",
                code=INVALID_AUDIO,
            )
        limit = self.limits.audio.max_tokens
        if limit is not None and tokens >= limit:
            raise BadRequestError(
                f"the sound takes {tokens} tokens, the context has {limit} (setting --max-model-len)",
                code="context_length_exceeded",
            )


def _not_heard(made: ProcessedVideo) -> ProcessedVideo:
    return replace(made, ignored=tuple(dict.fromkeys((*made.ignored, "use_audio_in_video"))))


class Qwen2_5OmniProcessor(OmniProcessor):
    """Processor of model_type qwen2_5_omni."""

    coordinates = "absolute"
    marks_share = True

    @property
    def turn_s(self) -> float:
        """The seconds of clip, and then of sound."""
        return self._audio.seconds_per_chunk

    def count_tokens(self, frames: int) -> int:
        """Return the tokens: the second convolution halves the frames, and pairs are averaged."""
        return ((frames - 1) // 2 - 1) // 2 + 1

    def fit_samples(self, samples: np.ndarray) -> tuple[np.ndarray, int, int]:
        """Cut at the longest sound; a shorter one is followed by silence."""
        config = self._audio
        most = config.longest_s * config.rate
        count = min(len(samples), most)
        # of the silence up to `most`, the last frame sees this much
        padded = np.zeros(min(most, count + config.n_fft), np.float32)
        padded[:count] = samples[:count]
        frames = -(-count // config.hop)
        return padded, frames, frames


class Qwen3OmniProcessor(OmniProcessor):
    """Processor of model_type qwen3_omni_moe."""

    coordinates = "0-1000"
    marks_share = False

    def count_tokens(self, frames: int) -> int:
        """Return the tokens: three convolutions halve the frames of each chunk."""
        chunks, rest = divmod(frames, self._audio.chunk_frames)
        return chunks * _eighth(self._audio.chunk_frames) + _eighth(rest)

    def fit_samples(self, samples: np.ndarray) -> tuple[np.ndarray, int, int]:
        """Leave the samples as they are. Zeros fill the last chunk of frames if it is not the only one."""
        config = self._audio
        frames, chunk = len(samples) // config.hop, config.chunk_frames
        return samples, frames, frames if frames <= chunk else -(-frames // chunk) * chunk


def _eighth(frames: int) -> int:
    for _ in range(3):
        frames = (frames - 1) // 2 + 1
    return frames


class _Prompt:
    """A prompt that is put together. `next`: the next position."""

    def __init__(self) -> None:
        self.next = 0
        self.items: list[MultimodalDataItem] = []
        self._ids: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []
        self._length = 0

    def add_text(self, ids: np.ndarray) -> None:
        """Add tokens whose positions count up."""
        self.add(ids, np.broadcast_to(np.arange(len(ids)), (3, len(ids))))

    def add(self, ids: int | np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Add tokens at positions [3, n] from the next one on; return their places in the prompt."""
        count = positions.shape[1]
        if not count:
            return np.arange(0)
        self._ids.append(np.broadcast_to(ids, count))
        self._positions.append(positions + self.next)
        self.next += int(positions.max()) + 1
        self._length += count
        return np.arange(self._length - count, self._length)

    def expanded(self) -> ExpandedPrompt:
        positions = np.concatenate(self._positions, axis=1)
        delta = int(positions.max()) + 1 - self._length
        inputs = MultimodalInputs(items=tuple(self.items), mrope_positions=positions, mrope_position_delta=delta)
        return ExpandedPrompt(np.concatenate(self._ids).astype(np.int64), inputs)
