"""Sounds: decoding within limits, features as transformers makes them, and places and positions in prompts."""

from __future__ import annotations

import io
import struct
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from tests import hf_env  # noqa: F401

# isort: split
from transformers import AutoConfig, WhisperFeatureExtractor

from processors.audio.decoding import decode_sound
from processors.audio.options import AudioLimits
from processors.families.base import MultimodalProcessor, ProcessorLimits, data_items
from processors.families.registry import make_processor
from processors.families.report import report_medium
from processors.inputs import Modality, MultimodalInputs
from processors.video.options import VideoKnobs
from tests.omni_checkpoints import FAMILIES, THINKERS, clip, heard, make_omni_checkpoint, tone, wav
from vision.towers.temporal_patch import temporal_patches
from vlmserve_common.checkpoint.hf_config import read_hf_config
from vlmserve_common.errors import BadRequestError

RATE = 16000
LIMITS = AudioLimits()


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_omni_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def processor(folder: Path) -> MultimodalProcessor:
    return make_processor(folder, read_hf_config(folder))


def encoded(samples: np.ndarray, container: str, codec: str, rate: int = RATE, layout: str = "mono") -> bytes:
    """A sound file of another format, whose channels are all the same."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray((samples * 32767).astype(np.int16)[None], format="s16", layout="mono")
        frame.sample_rate = rate
        resampler = av.AudioResampler(format=stream.format, layout=layout, rate=rate, frame_size=stream.frame_size)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            out.mux(stream.encode(part))
        out.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize("seconds", [0.05, 0.5, 1.0, 1.2345, 2.0, 4.01, 6.0, 7.3])
def test_features_are_those_of_transformers(processor: MultimodalProcessor, folder: Path, seconds: float) -> None:
    data = wav(tone(seconds))
    sound = processor.process_audio(data)
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    padding = "max_length" if "2_5" in processor.__class__.__name__ else False
    wanted = extractor(
        heard(data), sampling_rate=RATE, padding=padding, truncation=bool(padding), return_attention_mask=True
    )
    [features], [mask] = wanted["input_features"], wanted["attention_mask"]
    count = int(np.sum(mask)) if padding else features.shape[1]
    np.testing.assert_allclose(sound.feature[:count], features[:, :count].T, atol=1e-5)
    assert not sound.feature[count:].any()


@pytest.mark.parametrize(
    ("container", "codec"), [("flac", "flac"), ("wav", "pcm_s24le"), ("mp4", "alac"), ("wav", "pcm_f32le")]
)
def test_lossless_formats_have_the_same_samples(container: str, codec: str) -> None:
    samples = tone(0.7)
    whole = decode_sound(encoded(samples, container, codec), RATE, LIMITS).samples
    np.testing.assert_allclose(whole, np.trunc(samples * 32767) / 32768, atol=1e-6)


@pytest.mark.parametrize(("container", "codec"), [("mp3", "libmp3lame"), ("ogg", "libopus"), ("adts", "aac")])
def test_lossy_formats_are_read(container: str, codec: str) -> None:
    samples = tone(1.0, 48000)
    found = decode_sound(encoded(samples, container, codec, 48000), RATE, LIMITS)
    assert found.source_rate == 48000
    assert abs(len(found.samples) - RATE) < 0.1 * RATE


def test_channels_are_averaged_and_rates_changed() -> None:
    left, right = tone(1.0, 8000, seed=1), tone(1.0, 8000, seed=2)
    stereo = decode_sound(wav(np.stack([left, right], axis=1), 8000), RATE, LIMITS)
    mono = decode_sound(wav((left + right) / 2, 8000), RATE, LIMITS)
    assert (stereo.channels, mono.channels, len(mono.samples)) == (2, 1, len(stereo.samples))
    np.testing.assert_allclose(stereo.samples, mono.samples, atol=1e-3)
    spectrum = np.abs(np.fft.rfft(mono.samples))
    assert spectrum[int(4300 * len(mono.samples) / RATE) :].max() < 0.02 * spectrum.max(), "nothing above half the rate"


@pytest.mark.parametrize("channels", [3, 7, 8, 9, 16])
def test_any_number_of_channels_is_averaged_exactly(channels: int) -> None:
    samples = np.stack([tone(0.1, seed=seed) for seed in range(channels)], axis=1)
    found = decode_sound(wav(samples), RATE, LIMITS)
    assert found.channels == channels
    whole = (samples * 32767).round().astype("<i2").astype(np.float32) / 32768
    np.testing.assert_array_equal(found.samples, np.ascontiguousarray(whole.T).mean(0, dtype=np.float32))


@pytest.mark.parametrize(
    ("then", "told"), [({"rate": 48000}, "to 48000 Hz, mono,"), ({"layout": "stereo"}, "to 16000 Hz, stereo,")]
)
def test_a_sound_that_becomes_another_kind_is_refused(then: dict[str, Any], told: str) -> None:
    data = encoded(tone(0.5), "adts", "aac") + encoded(tone(0.5), "adts", "aac", **then)
    with pytest.raises(BadRequestError, match=f"the sound changes from 16000 Hz, mono, .* {told}") as error:
        decode_sound(data, RATE, LIMITS)
    assert error.value.code == "invalid_audio"


@pytest.mark.parametrize("value", [np.nan, -np.inf, 3e38])
def test_samples_that_are_no_sound_are_refused(value: float) -> None:
    samples = np.concatenate([tone(0.1), [value]]).astype("<f4").tobytes()
    header = struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF",
        36 + len(samples),
        b"WAVE",
        b"fmt ",
        16,
        3,
        1,
        RATE,
        4 * RATE,
        4,
        32,
        b"data",
        len(samples),
    )
    assert len(decode_sound(header + samples[:-4], RATE, LIMITS).samples) == 1600
    with pytest.raises(BadRequestError, match="samples that are not finite, or beyond 65504"):
        decode_sound(header + samples, RATE, LIMITS)


def pcm(*, rate: int = RATE, channels: int = 1, frames: int = 10) -> bytes:
    """A WAV file of silence, with 8 bits a sample."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(1)
        out.setframerate(rate)
        out.writeframes(bytes(frames * channels))
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "the sound is empty"),
        (b"no sound at all", 'not a sound of a supported format .*it begins with "no sound"'),
        (b"\x89PNG\r\n\x1a\n" + bytes(64), "it is a PNG picture"),
        (b"RIFF\x24\0\0\0WAVE" + bytes(20), "the sound is broken or cut off|no sound track|holds no samples"),
        (
            pcm(rate=1000, frames=36_000_000),
            r"36000.0 s long, or longer; the limit is 3600 s \(setting --max-audio-d",
        ),
        (pcm(channels=96), r"96 channels; the limit is 16 \(setting --max-audio-channels\)"),
        (pcm(rate=1), "1 samples a second; it must have 1000 to 768000"),
        (clip(0.5, None), "the file has no sound track"),
        (wav(np.zeros(0, np.float32)), "holds no samples"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_sounds_are_refused_in_words(data: bytes, told: str) -> None:
    with pytest.raises(BadRequestError, match=told):
        decode_sound(data, RATE, LIMITS)


def test_what_a_header_hides_counts_too() -> None:
    """A file that is longer than its header says."""
    data = encoded(tone(3.0), "adts", "aac")
    with pytest.raises(BadRequestError, match="the limit is 2 s"):
        decode_sound(data, RATE, AudioLimits(max_duration_s=2.0))


def test_sounds_of_no_token_and_of_too_many_are_refused(folder: Path) -> None:
    limits = ProcessorLimits(audio=AudioLimits(max_tokens=20))
    processor = make_processor(folder, read_hf_config(folder), limits)
    with pytest.raises(BadRequestError, match=r"5\.0 ms long; the model hears sounds of 40 ms and more"):
        processor.process_audio(wav(tone(0.005)))
    with pytest.raises(BadRequestError, match=r"tokens, the context has 20 \(setting --max-model-len\)"):
        processor.process_audio(wav(tone(3.0)))


def test_parts_cover_a_sound_and_are_known_by_content(processor: MultimodalProcessor) -> None:
    sound = processor.process_audio(wav(tone(5.03)))
    items = data_items(sound, 2)
    patches = [patch for item in items for patch in temporal_patches(item)]
    assert all(patch.sound for patch in patches)
    assert [patch.digest for patch in patches] == list(sound.patch_digests)
    assert sum(patch.num_patches // 4 for patch in patches) == sound.num_tokens
    np.testing.assert_array_equal(np.concatenate([patch.pixels for patch in patches]), sound.feature)
    other = processor.process_audio(wav(tone(5.03, seed=1)))
    assert not set(other.patch_digests) & set(sound.patch_digests)


def prompt_of(processor: MultimodalProcessor, *kinds: str) -> list[int]:
    ids = processor.token_ids
    marks = {
        "image": [ids.vision_start, ids.image_pad, ids.vision_end],
        "video": [ids.vision_start, ids.video_pad, ids.vision_end],
        "audio": [ids.audio_start, ids.audio_pad, ids.audio_end],
    }
    found = [50, 51, 52]
    for kind in kinds:
        found += [*marks[kind], 60, 61]
    return found


@pytest.mark.parametrize(("frames_s", "sound_s"), [(3.0, 3.0), (1.0, 3.4), (4.0, 1.1), (1.0, 0.3)])
def test_positions_are_those_of_transformers(
    processor: MultimodalProcessor, folder: Path, frames_s: float, sound_s: float
) -> None:
    """A clip with sound between two sounds: its tokens alternate, and follow the clock."""
    video = processor.process_video(clip(frames_s, tone(sound_s)), VideoKnobs(use_audio_in_video=True))
    assert video.sound is not None
    first, last = (processor.process_audio(wav(tone(s))) for s in (1.0, 0.7))
    expanded = processor.expand(prompt_of(processor, "audio", "video", "audio"), [first, video, last])
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = THINKERS[config.model_type](config.thinker_config)
    ids = torch.from_numpy(expanded.input_ids)[None]
    sounds = [first, video.sound, last]
    if "3" in config.model_type:
        model.rope_deltas = None
    lengths = torch.tensor([frames_of(processor, sound.seconds) for sound in sounds])
    wanted, _ = model.get_rope_index(
        ids,
        video_grid_thw=torch.tensor([video.grid_thw]),
        attention_mask=torch.ones_like(ids),
        use_audio_in_video=True,
        audio_seqlens=lengths,
        second_per_grids=torch.tensor([1.0]),
    )
    inputs = checked(expanded.mm_inputs)
    np.testing.assert_array_equal(inputs.mrope_positions, wanted[:, 0].numpy())
    assert inputs.mrope_position_delta == int(wanted.max()) + 1 - ids.shape[1]
    for item in inputs.items:
        pad = processor.token_ids.video_pad if item.modality is Modality.VIDEO else processor.token_ids.audio_pad
        assert all(set(expanded.input_ids[start:end].tolist()) == {pad} for start, end in item.offsets)
        assert item.num_tokens == item.grid_thw[0] * item.grid_thw[1] * item.grid_thw[2] // 4


def frames_of(processor: MultimodalProcessor, seconds: float) -> int:
    samples = round(seconds * RATE)
    return -(-samples // 160) if "2_5" in type(processor).__name__ else samples // 160


def checked(inputs: MultimodalInputs | None) -> MultimodalInputs:
    assert inputs is not None
    return inputs


def test_a_clip_without_sound_is_as_without_the_flag(processor: MultimodalProcessor) -> None:
    silent = clip(2.0, None)
    made = processor.process_video(silent, VideoKnobs(use_audio_in_video=True))
    assert made.sound is None
    assert made.ignored == ("use_audio_in_video",)
    plain = processor.process_video(silent, VideoKnobs())
    ids = prompt_of(processor, "video")
    np.testing.assert_array_equal(processor.expand(ids, [made]).input_ids, processor.expand(ids, [plain]).input_ids)


def test_a_part_of_a_clip_is_heard_with_its_part_of_the_sound(folder: Path) -> None:
    samples = tone(6.0)
    limits = ProcessorLimits(audio=AudioLimits(max_duration_s=2.0))
    processor = make_processor(folder, read_hf_config(folder), limits)
    data = clip(6.0, samples)
    part = VideoKnobs(use_audio_in_video=True, video_start=2.5, video_end=4.0)
    made = processor.process_video(data, part)
    assert made.sound is not None
    alone = processor.process_audio(wav(heard(wav(samples))[40000:64000] * (32768 / 32767)))
    assert (made.sound.digest, made.sound.seconds) == (alone.digest, 1.5)
    with pytest.raises(BadRequestError, match=r"the sound is 2\.5 s long, or longer; the limit is 2 s"):
        processor.process_video(data, replace(part, video_end=5.0))
    short = clip(6.0, samples[:32000])
    assert processor.process_video(short, part).ignored == ("use_audio_in_video",)


def test_exact_repeats_leave_a_clip_that_is_heard(processor: MultimodalProcessor) -> None:
    """Its prompt is shorter, and what stays has the places in time that it always has."""
    frames = [np.full((256, 256, 3), 30, np.uint8)] * 4
    prompts = []
    for skip in (None, True):
        knobs = VideoKnobs(use_audio_in_video=True, skip_repeats=skip, fps=8.0)
        made = processor.process_video(clip(0.5, tone(0.1), side=256, rate=8, pictures=frames), knobs)
        assert made.sound is not None
        assert not made.ignored
        expanded = processor.expand(prompt_of(processor, "video"), [made])
        prompts.append((made, expanded, checked(expanded.mm_inputs)))
    (whole, long, all_of_it), (fewer, short, rest) = prompts
    assert fewer.num_tokens < whole.num_tokens / 2
    assert len(long.input_ids) - len(short.input_ids) == whole.num_tokens - fewer.num_tokens
    pads = processor.token_ids
    for pad in (pads.video_pad, pads.audio_pad):
        at, before = short.input_ids == pad, long.input_ids == pad
        columns = [
            set(map(tuple, one.mrope_positions[:, x].T.tolist())) for one, x in ((rest, at), (all_of_it, before))
        ]
        assert columns[0] <= columns[1]
    np.testing.assert_array_equal(rest.mrope_positions[:, -2:], all_of_it.mrope_positions[:, -2:])
    nexts = [len(one.input_ids) + inputs.mrope_position_delta for one, inputs in ((short, rest), (long, all_of_it))]
    assert nexts[0] == nexts[1]
    [item] = [item for item in rest.items if item.modality is Modality.VIDEO]
    assert sum(end - start for start, end in item.offsets) == fewer.num_tokens
    report = report_medium(processor, fewer, "").pruning
    assert report is not None
    assert report.repeats == whole.num_tokens - fewer.num_tokens


def test_a_heard_clip_tells_what_was_cut_off(folder: Path) -> None:
    processor = make_processor(folder, read_hf_config(folder))
    made = processor.process_video(clip(2.0, tone(7.0)), VideoKnobs(use_audio_in_video=True))
    assert made.sound is not None
    warnings = report_medium(processor, made, "x").warnings()
    assert any("7" in line and "chunk_length" in line for line in warnings) == ("2_5" in type(processor).__name__)


def test_lists_of_frames_are_silent(processor: MultimodalProcessor) -> None:
    made = processor.process_video([Image.new("RGB", (64, 64))] * 4, VideoKnobs(use_audio_in_video=True))
    assert made.ignored == ("use_audio_in_video",)


def test_a_sound_is_no_video(processor: MultimodalProcessor) -> None:
    with pytest.raises(BadRequestError, match=r"not a video of a supported format .*it is a sound \(WAV\)"):
        processor.process_video(wav(tone(0.1)))


def test_a_clip_and_its_sound_are_not_taken_for_the_clip_alone(processor: MultimodalProcessor) -> None:
    data = clip(2.0, tone(2.0))
    keys = []
    for asked in (True, None):
        made = processor.process_video(data, VideoKnobs(use_audio_in_video=asked))
        items = checked(processor.expand(prompt_of(processor, "video"), [made]).mm_inputs).items
        keys.append({item.digest for item in items})
    assert not keys[0] & keys[1]


def test_sounds_need_placeholders_of_their_own(processor: MultimodalProcessor) -> None:
    sound = processor.process_audio(wav(tone(1.0)))
    with pytest.raises(BadRequestError, match="1 image placeholder but the request has 0 pictures:"):
        processor.expand(prompt_of(processor, "image"), [sound])


def test_a_rate_of_pruning_goes_with_no_sound(processor: MultimodalProcessor) -> None:
    """Which places stay would be known when tokens of sound stand between them already."""
    with pytest.raises(BadRequestError, match=r"video_pruning_rate is 0\.5, and must be 0 with use_audio_in_video"):
        processor.process_video(clip(2.0, tone(2.0)), VideoKnobs(use_audio_in_video=True, video_pruning_rate=0.5))
