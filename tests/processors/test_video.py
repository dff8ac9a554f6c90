"""Videos to engine input: frames against plain decoding, everything else against transformers' own processors."""

from __future__ import annotations

import io
import itertools
import struct
import threading
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from PIL import Image

from processors.families.base import ProcessorLimits
from processors.families.registry import make_processor
from processors.inputs import Modality
from processors.video.decoding import Clip, _CalledOffError
from processors.video.options import VideoKnobs, VideoLimits, VideoOptions
from processors.video.video_file import VideoFile
from tests import hf_env  # noqa: F401
from tests.processors.clips import decode_all, frame, jpeg, make_clip, with_matrix
from tests.processors.helpers import picture, values
from tests.tiny_checkpoints import FAMILIES, make_checkpoint
from vlmserve_common.checkpoint.fields import read_json
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer
from vlmserve_common.errors import BadRequestError, CheckpointError

LIMITS = VideoLimits()
TRIPLE = "<|vision_start|><|video_pad|><|vision_end|>"
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


TWO = make_clip(2)

# ---------------------------------------------------------------- decoding


@pytest.mark.parametrize(
    "made",
    [
        {"frames": 40, "gop": 5},
        {"frames": 20, "container": "mov"},
        {"frames": 60, "codec": "libvpx-vp9", "container": "webm"},
        {"frames": 60, "codec": "libvpx", "container": "webm"},
        {"frames": 24, "codec": "libvpx-vp9", "container": "webm", "width": 101, "height": 67},
        {"frames": 10, "codec": "gif", "container": "gif"},
        {"frames": 1},
        {"frames": 1, "codec": "gif", "container": "gif"},
        {"frames": 70, "fps": Fraction(30000, 1001)},
        {"frames": 8, "times": [0, 40, 80, 400, 900, 1000, 1010, 2000]},
        {"frames": 8, "times": [0, 40, 80, 400, 900, 1000, 1010, 2000], "container": "matroska", "codec": "libx264"},
    ],
    ids=str,
)
def test_frames_are_those_of_plain_decoding(made):
    data = make_clip(**made)
    frames, rate = decode_all(data)
    clip = Clip(data, LIMITS)
    info = clip.info
    assert (info.num_frames, info.height, info.width) == frames.shape[:3]
    if made.get("container") == "matroska":  # FFmpeg's guess; shown for 100 ms each, says the header
        rate = 8 / 2.1
    assert info.rate == pytest.approx(rate, rel=1e-9)
    count = len(frames)
    if "times" in made:
        assert info.times == pytest.approx([t / 1000 for t in made["times"]])
    else:
        assert info.times == pytest.approx([i / rate for i in range(count)], abs=0.011)  # GIF and WebM round
    for indices in (range(count), range(0, count, 7), [count - 1], [0, 0, count // 2, count // 2]):
        assert_read(clip, list(indices), frames.__getitem__)


def assert_read(clip, indices, frame_of=lambda index: frame(index, 112, 84)):
    """Assert that these frames of a clip are those."""
    for index, got in zip(indices, clip.read(indices), strict=True):
        assert np.array_equal(got, frame_of(index)), index


class Container:
    """A container of which methods can be replaced."""

    def __init__(self, container):
        self._container = container

    def __getattr__(self, name):
        return getattr(self._container, name)


@pytest.fixture
def decoded(monkeypatch):
    """The times of all frames that come out of decoders."""
    seen, frames = [], Clip._frames

    def counted(*args):
        for one in frames(*args):
            seen.append(one.pts)
            yield one

    monkeypatch.setattr(Clip, "_frames", counted)
    return seen


def test_what_lies_between_is_not_decoded(decoded):
    clip = Clip(make_clip(400, gop=10, fps=30), LIMITS)
    assert_read(clip, [5, 203, 399])
    assert 0 < len(decoded) <= 6 + 4 + 10


def test_what_nothing_refers_to_is_decoded_only_where_it_is_wanted(decoded):
    """Frames that others refer to are as before, and so are wanted ones that none refers to."""
    clip = Clip(make_clip(60, gop=60, fps=30, codec="libx264"), LIMITS)
    every = [picture.copy() for picture in clip.read(range(60))]
    for start in range(6):
        decoded.clear()
        wanted = range(start, 60, 6)
        assert_read(clip, wanted, every.__getitem__)
        assert len(wanted) < len(decoded) < 50


@pytest.mark.parametrize("fails", [False, True])
def test_a_stretch_that_is_led_astray_begins_at_the_beginning(decoded, monkeypatch, fails):
    """Or cannot get there at all."""
    clip = Clip(make_clip(300, gop=30), LIMITS)
    first, second, *_ = clip.stretches(range(300), 2)
    opened = VideoFile.open

    def seek(offset, **options):
        raise av.error.InvalidDataError(0, "no way")

    @contextmanager
    def open_broken(self, threads):
        with opened(self, threads) as (container, stream):
            broken = Container(container)
            broken.seek = seek if fails else lambda at, **how: container.seek(at + 35 * clip._pts[1], **how)
            yield broken, stream

    monkeypatch.setattr(VideoFile, "open", open_broken)
    assert_read(clip, second)
    assert len(decoded) >= second.stop - first.start


def test_frames_that_vp8_hides_are_not_counted():
    data = bytearray(make_clip(80, codec="libvpx", container="webm"))
    with av.open(io.BytesIO(data)) as box:
        packets = [bytes(packet) for packet in box.demux(video=0)]
    data[data.index(packets[40])] &= ~0x10  # show_frame (RFC 6386, section 9.1)
    frames, _ = decode_all(bytes(data))
    assert len(frames) == 79
    clip = Clip(bytes(data), LIMITS)
    assert clip.info.num_frames == 79
    assert_read(clip, [0, 39, 40, 78], frames.__getitem__)


TURNS = [(a, b, c, d) for a, b, c, d in itertools.product((-1, 0, 1), repeat=4) if abs(a) == abs(d) != abs(b) == abs(c)]


@pytest.mark.parametrize("matrix", TURNS, ids=str)
def test_a_display_matrix_turns_and_mirrors(matrix):
    """Each stored point is looked for where the matrix leads it."""
    a, b, c, d = matrix
    stored = frame(0, 112, 84)
    rows, columns = np.mgrid[:84, :112]
    x, y = a * columns + c * rows, b * columns + d * rows
    shown = np.empty((84, 112, 3) if a else (112, 84, 3), np.uint8)
    shown[y - y.min(), x - x.min()] = stored
    clip = Clip(with_matrix(TWO, matrix), LIMITS)
    assert (clip.info.height, clip.info.width) == shown.shape[:2]
    assert np.array_equal(next(clip.read([0])), shown)


def test_a_display_matrix_that_leads_nowhere_counts_as_none():
    assert np.array_equal(*(next(Clip(one, LIMITS).read([0])) for one in (with_matrix(TWO, (0, 0, 0, 0)), TWO)))


def with_cover(data: bytes) -> bytes:
    """An MP4 that has a JPEG as its cover, told of before its tracks."""
    at = data.index(b"moov") - 4
    (size,) = struct.unpack_from(">I", data, at)
    movie = io.BytesIO()

    def box(name: bytes, *parts: bytes) -> bytes:
        return struct.pack(">I4s", 8 + len(b"".join(parts)), name) + b"".join(parts)

    cover = box(b"covr", box(b"data", struct.pack(">II", 13, 0), jpeg(0, 40, 40)))
    handler = box(b"hdlr", bytes(8), b"mdirappl", bytes(9))
    told = box(b"udta", box(b"meta", bytes(4), handler, box(b"ilst", cover)))
    head = data[at + 8 : at + size]  # what it says of places in the file stands, as the movie's header is its end
    assert at + size == len(data)
    movie.write(data[:at] + box(b"moov", head[: head.index(b"trak") - 4], told, head[head.index(b"trak") - 4 :]))
    return movie.getvalue()


def test_a_cover_is_not_the_video():
    data = with_cover(make_clip(6))
    with av.open(io.BytesIO(data)) as box:
        assert [(stream.width, stream.height) for stream in box.streams.video] == [(40, 40), (112, 84)]
    clip = Clip(data, LIMITS)
    assert (clip.info.num_frames, clip.info.width) == (6, 112)
    assert np.array_equal(next(clip.read([3])), frame(3, 112, 84))


@pytest.mark.parametrize("container", ["mp4", "mov", "matroska"])
def test_a_title_in_another_alphabet(container):
    """Of bytes that are no UTF-8."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as box:
        box.metadata["title"] = "Caf~"
        stream = box.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        box.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")))
        box.mux(stream.encode(None))
    data = file.getvalue().replace(b"Caf~", b"Caf\xe9")
    assert b"Caf\xe9" in data
    assert Clip(data, LIMITS).info.num_frames == 1


# ---------------------------------------------------------------- times and rates


def trimmed(data: bytes, seconds: float) -> bytes:
    """What begins there, by an edit list, without encoding anew: frames from the keyframe on are in the file."""
    file = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(file, "w", format="mp4") as box:
        old = source.streams.video[0]
        new = box.add_stream_from_template(old)
        for packet in source.demux(old):
            if packet.dts is not None:
                packet.pts -= round(seconds / packet.time_base)
                packet.dts -= round(seconds / packet.time_base)
                packet.stream = new
                box.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize("gop", [12, 250])
def test_a_clip_that_begins_between_keyframes(gop):
    data = make_clip(40, gop=gop, codec="libx264")
    cut = trimmed(data, 1.6)
    frames, _ = decode_all(cut)
    assert np.array_equal(frames, decode_all(data)[0][16:])
    clip = Clip(cut, LIMITS)
    assert clip.info.num_frames == 24
    assert clip.info.times == pytest.approx([0.1 * number for number in range(24)])
    for indices in (range(24), [0, 23], [3, 4, 20]):
        assert_read(clip, indices, frames.__getitem__)


def without_rate(data: bytes) -> bytes:
    """A Matroska file without DefaultDuration, as browsers record: a Void (0xEC) in its place."""
    at = data.index(b"\x23\xe3\x83")
    length = data[at + 3] & 0x7F
    return data[:at] + bytes([0xEC, 0x80 | length + 2]) + bytes(length + 2) + data[at + 4 + length :]


# a screen: lively for three seconds, then a frame each second
SCREEN = [*range(0, 3000, 33), *range(3000, 60001, 1000)]


@pytest.mark.parametrize("container", ["webm", "matroska"])
@pytest.mark.parametrize("change", [bytes, without_rate])
def test_the_rate_of_a_clip_without_one(container, change):
    codec = "libvpx-vp9" if container == "webm" else "libx264"
    clip = Clip(change(make_clip(len(SCREEN), times=SCREEN, codec=codec, container=container, fps=30)), LIMITS)
    assert clip.info.num_frames == len(SCREEN)
    assert clip.info.rate == pytest.approx(len(SCREEN) / 60.0, rel=0.01)
    assert clip.info.times[-1] == 60.0


@pytest.mark.parametrize("told", [1, 2**32 - 1])
def test_a_matroska_file_that_lies_about_its_rate(told):
    data = bytearray(make_clip(40, codec="libx264", container="matroska"))
    at = data.index(b"\x23\xe3\x83")
    assert data[at + 3] == 0x84
    data[at + 4 : at + 8] = told.to_bytes(4, "big")  # DefaultDuration, in nanoseconds
    assert Clip(bytes(data), LIMITS).info.rate == pytest.approx(10.0, rel=0.03)


@pytest.mark.parametrize(
    ("fps", "frames"), [(Fraction(30000, 1001), 2), (Fraction(30000, 1001), 300), (24, 59), (7, 61)]
)
def test_an_even_rate_stays_as_the_file_says_it(fps, frames):
    """Its times are in whole milliseconds, and would give another."""
    data = make_clip(frames, fps=fps, codec="libvpx", container="webm", width=32, height=32)
    assert Clip(data, LIMITS).info.rate == decode_all(data)[1] == pytest.approx(float(fps), rel=1e-3)


def test_a_recording_that_begins_late():
    late = [8_000_000 + 100 * number for number in range(16)]
    clip = Clip(make_clip(16, times=late, codec="libx264", container="matroska"), LIMITS)
    assert (clip.info.num_frames, clip.info.times[0], clip.info.times[-1]) == (16, 0.0, 1.5)


# ---------------------------------------------------------------- against transformers


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param) / "model")


def ours(folder, reference="published", limits=LIMITS, **options):
    tokenizer = load_text_tokenizer(folder)
    video = VideoOptions(reference=reference, **options)
    return (
        make_processor(
            folder,
            read_json(folder, "config.json"),
            ProcessorLimits(video=limits, video_options=video),
            tokenizer.continue_text,
        ),
        tokenizer,
    )


def theirs(folder, text, clips, images=(), **sampling):
    """transformers' model inputs; clips: [(frames uint8 [T, H, W, 3], rate)]."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    metadata = [{"total_num_frames": len(frames), "fps": rate} for frames, rate in clips]
    return processor(
        text=[text],
        videos=[frames for frames, _ in clips],
        images=list(images) or None,
        video_metadata=metadata,
        return_tensors="pt",
        **({"do_sample_frames": True, "fps": 2} | sampling),
    )


def reference_positions(folder, inputs):
    """get_rope_index of the checkpoint's model class."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    given = {name: inputs[name] for name in names if inputs.get(name) is not None}
    if "second_per_grid_ts" in given:
        given["second_per_grid_ts"] = torch.as_tensor(given["second_per_grid_ts"])
    positions, delta = model.model.get_rope_index(**given)
    return positions[:, 0].numpy(), int(delta)


CLIPS = [
    {"frames": 25, "fps": 10},
    {"frames": 90, "fps": 60},
    {"frames": 70, "fps": Fraction(30000, 1001)},
    {"frames": 61, "fps": 5, "width": 60, "height": 100},
    {"frames": 3, "fps": 10},
    {"frames": 40, "fps": 25, "width": 201, "height": 67, "codec": "libvpx-vp9", "container": "webm"},
    {"frames": 20, "fps": 10, "codec": "gif", "container": "gif"},
    {"frames": 8, "times": [0, 40, 80, 400, 900, 1000, 1010, 2000]},
]


@pytest.mark.parametrize("made", CLIPS, ids=str)
def test_a_clip_is_what_transformers_makes_of_it(folder, made):
    """Patches, grid, ids and positions, bit for bit; the setting is transformers' form of the prompt."""
    data = make_clip(**made)
    text = f"<|im_start|>user\nLook at this: {TRIPLE}What happens?<|im_end|>\n"
    want = theirs(folder, text, [decode_all(data)])
    processor, tokenizer = ours(folder, "transformers")
    video = processor.process_video(data)
    assert video.grid_thw == tuple(want["video_grid_thw"][0].tolist())
    assert np.array_equal(values(video), want["pixel_values_videos"].numpy())
    ids, media = processor.expand(tokenizer.encode(text), [video])
    assert ids.tolist() == want["input_ids"][0].tolist()
    positions, delta = reference_positions(folder, want)
    assert np.array_equal(media.mrope_positions, positions)
    assert media.mrope_position_delta == delta
    (item,) = media.items
    assert item.modality is Modality.VIDEO
    if "second_per_grid_ts" in want:
        assert np.float32(item.second_per_grid_t) == float(want["second_per_grid_ts"][0])
    covered = np.zeros(len(ids), bool)
    for start, end in item.offsets:
        covered[start:end] = True
    assert np.array_equal(covered, ids == processor.token_ids.video_pad)
    assert len(item.offsets) == (video.grid_thw[0] if "qwen3" in str(folder) else 1)


@pytest.mark.parametrize("before", ["", "Look: ", "See (", "Bild ", "a\n", "<|im_start|>user\n", "é"])
def test_the_published_prompt_of_videos_and_pictures_together(folder, before):
    """Qwen3-VL: what transformers makes of a bare placeholder. Others: the prompt is the same in both forms."""
    clips = [make_clip(25), make_clip(12, fps=5, width=84, height=112)]
    image = picture(100, 70)
    text = f"{before}{TRIPLE}, then {PICTURE}{TRIPLE}. Compare!"
    bare = text.replace(TRIPLE, "<|video_pad|>") if "qwen3" in str(folder) else text
    want = theirs(folder, bare, [decode_all(clip) for clip in clips], [image])
    processor, tokenizer = ours(folder)
    first, second = (processor.process_video(clip) for clip in clips)
    ids, media = processor.expand(tokenizer.encode(text), [first, processor.process_image(image), second])
    assert ids.tolist() == want["input_ids"][0].tolist()
    assert [item.modality.value for item in media.items] == ["video", "image", "video"]
    assert [item.grid_thw for item in media.items[::2]] == [tuple(g) for g in want["video_grid_thw"].tolist()]
    again, _ = processor.expand(tokenizer.encode(bare), [first, processor.process_image(image), second])
    assert again.tolist() == ids.tolist()


def test_a_one_frame_clip_is_shown_twice(folder):
    processor, tokenizer = ours(folder)
    video = processor.process_video(make_clip(1))
    assert video.grid_thw[0] == 1
    assert video.frame_indices == (0,)
    halves = video.feature.reshape(len(video.feature), 3, 2, -1)
    assert np.array_equal(halves[:, :, 0], halves[:, :, 1])
    assert len(processor.expand(tokenizer.encode(TRIPLE), [video]).mm_inputs.items) == 1


def test_qwen_vl_utils_sampling_and_sizes(folder):
    """`fetch_video` on the frames of the clip."""
    from unittest import mock

    from qwen_vl_utils import vision_process

    data = make_clip(50, fps=25, width=320, height=240)
    frames, rate = decode_all(data)

    def read(element):
        count = vision_process.smart_nframes(element, len(frames), rate)
        index = torch.linspace(0, len(frames) - 1, count).round().long()
        return torch.from_numpy(frames[index]).permute(0, 3, 1, 2), {}, count / len(frames) * rate

    processor, _ = ours(folder, sampling="qwen-vl-utils")
    patches = processor.config.video_patches
    with mock.patch.dict(vision_process.VIDEO_READER_BACKENDS, {"torchvision": read}):
        want, sample_fps = vision_process.fetch_video(
            {"video": "x", "fps": 3.0, "max_pixels": 200 * patches.factor**2},
            image_patch_size=patches.patch_size,
            return_video_sample_fps=True,
        )
    video = processor.process_video(data, VideoKnobs(fps=3.0, max_pixels=200 * patches.factor**2))
    grid = (len(want) // 2, want.shape[2] // patches.patch_size, want.shape[3] // patches.patch_size)
    assert video.grid_thw == grid
    assert video.second_per_grid_t == 2 / sample_fps
    from processors.resize import frames_to_patches

    expected, _ = frames_to_patches(want.permute(0, 2, 3, 1).round().clamp(0, 255).byte().numpy(), patches)
    assert np.array_equal(video.feature, expected)


# ---------------------------------------------------------------- side by side


@pytest.mark.parametrize(
    "made",
    [
        {"frames": 301, "gop": 30, "fps": 10},
        {"frames": 301, "gop": 47, "fps": 10, "codec": "libx264"},
        {"frames": 301, "gop": 25, "codec": "libx264", "options": {"x264-params": "open-gop=1:bframes=3:b-adapt=0"}},
        {"frames": 301, "gop": 30, "codec": "libx264", "options": {"x264-params": "intra-refresh=1"}},
        {"frames": 200, "gop": 25, "fps": 10, "codec": "libvpx-vp9", "container": "webm", "width": 60, "height": 60},
        {"frames": 200, "gop": 25, "codec": "libx264", "container": "matroska", "container_options": {"live": "1"}},
    ],
    ids=str,
)
def test_a_clip_decoded_side_by_side_is_the_same(folder, made):
    """Though no stretch begins with the clip, nor need one at a keyframe that is used."""
    data = make_clip(**made)
    knobs = VideoKnobs(video_start=0.3, fps=9.0)
    want = ours(folder, limits=VideoLimits(decode_threads=1))[0].process_video(data, knobs)
    clip = Clip(data, LIMITS)
    assert len(clip.stretches(want.frame_indices, 2)) > 1
    frames, _ = decode_all(data)
    picked = [Image.fromarray(frames[index]) for index in want.frame_indices]
    got = ours(folder, limits=VideoLimits(decode_threads=4))[0].process_video(data, knobs)
    assert np.array_equal(got.feature, want.feature)
    assert got.patch_digests == want.patch_digests
    for part in clip.stretches(want.frame_indices, 2):
        chosen = want.frame_indices[part.start : part.stop]
        for place, shown in zip(part, clip.read(chosen), strict=True):
            assert np.array_equal(shown, np.asarray(picked[place])), place


class Picked(Clip):
    """A clip some of whose frames cannot be had."""

    bad: tuple[int, ...] = ()

    def read(self, indices, threads=1):
        for index, got in zip(indices, super().read(indices, threads), strict=True):
            if index in self.bad:
                raise BadRequestError(f"frame {index} is bad")
            yield got


@pytest.fixture
def picked(monkeypatch):
    monkeypatch.setattr("processors.video.decoding.Clip", Picked)
    return monkeypatch


@pytest.mark.parametrize(("bad", "first"), [((20,), 20), ((280,), 280), ((20, 160), 20), ((280, 290), 280)])
def test_the_first_frame_that_cannot_be_decoded_is_named_whoever_meets_it(folder, picked, bad, first):
    picked.setattr(Picked, "bad", bad)
    processor, _ = ours(folder, limits=VideoLimits(decode_threads=2))
    before = threading.active_count()
    with pytest.raises(BadRequestError, match=f"frame {first} is bad"):
        processor.process_video(make_clip(300, gop=30, fps=10), VideoKnobs(fps=10.0))
    assert threading.active_count() == before


def test_a_clip_that_was_called_off_is_not_read_any_more():
    clip = Clip(make_clip(60), LIMITS)
    frames = clip.read(range(60))
    next(frames)
    clip.call_off()
    with pytest.raises(_CalledOffError):
        list(frames)


def test_large_frames_are_decoded_by_fewer_in_the_same_stretches(folder):
    data = make_clip(300, gop=30, fps=10)
    clips = {
        threads: Clip(data, VideoLimits(decode_threads=threads, max_frame_pixels=2 * room * 112 * 84 + 5000))
        for threads, room in ((1, 9), (2, 9), (4, 1), (5, 3))
    }
    assert [clip.threads for clip in clips.values()] == [1, 2, 1, 3]
    one, *others = (clip.stretches(range(300), 2) for clip in clips.values())
    assert len(one) == 4
    assert all(other == one for other in others)


def test_frames_of_many_bits_take_more_room():
    limits = VideoLimits(decode_threads=4, max_frame_pixels=112 * 84 * 4)
    assert Clip(make_clip(10, codec="libx264"), limits).threads == 4  # 12 bits a pixel
    assert Clip(make_clip(10, codec="libx264rgb"), limits).threads == 2  # 24


# ---------------------------------------------------------------- lists of frames


def test_a_list_of_frames_has_the_time_of_a_clip(folder, monkeypatch):
    monkeypatch.setattr("processors.video.clips.time.monotonic", itertools.count(1000.0).__next__)
    pictures = [Image.open(io.BytesIO(jpeg(i))) for i in range(6)]
    assert len(ours(folder, limits=VideoLimits(max_decode_s=6))[0].process_video(pictures).frame_indices) == 6
    with pytest.raises(BadRequestError, match=r"longer than 3 s, .*--max-video-decode-s\), at frame 3"):
        ours(folder, limits=VideoLimits(max_decode_s=3))[0].process_video(pictures)


def test_a_list_of_frames(folder):
    pictures = [Image.open(io.BytesIO(jpeg(i))) for i in range(6)]
    # as many frames as there are
    want = theirs(folder, TRIPLE, [(np.stack([np.asarray(p) for p in pictures]), 2.0)], fps=None, num_frames=6)
    video = ours(folder)[0].process_video(pictures)
    assert np.array_equal(values(video), want["pixel_values_videos"].numpy())
    assert video.second_per_grid_t == 1.0
    assert video.patch_times == (0.25, 1.25, 2.25)
    faster = ours(folder)[0].process_video(pictures[:5], VideoKnobs(fps=10.0))
    assert faster.grid_thw[0] == 3
    assert faster.patch_times == pytest.approx((0.05, 0.25, 0.4))


# ---------------------------------------------------------------- identity


def test_identity_is_content_grid_and_speed(folder):
    processor, tokenizer = ours(folder)
    frames = [picture(64, 64, seed) for seed in range(4)]

    def key(video):
        return processor.expand(tokenizer.encode(TRIPLE), [video]).mm_inputs.items[0].patch_keys

    slow = processor.process_video(frames, VideoKnobs(fps=1.0))
    assert key(slow) == key(processor.process_video(list(frames), VideoKnobs(fps=1.0)))
    assert key(slow) != key(processor.process_video(frames, VideoKnobs(fps=2.0)))
    assert key(slow) != key(processor.process_video(frames[::-1], VideoKnobs(fps=1.0)))
    still = processor.process_image(frames[0])
    assert still.digest != processor.process_video(frames[:1]).digest


def test_placeholders_and_media_must_match_in_kind_and_order(folder):
    processor, tokenizer = ours(folder)
    video, image = processor.process_video([picture(64, 64)]), processor.process_image(picture(64, 64))
    for text, media, match in (
        (TRIPLE, [], "contains 1 video placeholder but the request has 0 videos"),
        (TRIPLE, [image], "0 image placeholders but the request has 1 picture:"),
        (PICTURE, [video], "1 image placeholder but the request has 0 pictures"),
        (PICTURE + TRIPLE, [video, image], "another order"),
    ):
        with pytest.raises(BadRequestError, match=match):
            processor.expand(tokenizer.encode(text), media)


# ---------------------------------------------------------------- limits


def refused(processor, source, knobs, match):
    with pytest.raises(BadRequestError, match=match) as caught:
        processor.process_video(source, knobs)
    assert 400 <= caught.value.status < 500


@pytest.mark.parametrize(
    ("knobs", "match"),
    [
        (VideoKnobs(num_frames=0), "nframes is 0; it must be a positive integer"),
        (VideoKnobs(fps=1.0, do_sample_frames=False), "takes every frame of a video file, so fps cannot be given"),
        (VideoKnobs(do_sample_frames=False), r"asks for 30 frames; the limit is 12 \(setting --max-video-frames\)"),
        (VideoKnobs(resized_height=100), "must be given together"),
        (VideoKnobs(video_start=-1.0), "video_start is -1.0; it must be a number of seconds of at least 0 and"),
        (VideoKnobs(video_start=9.0), "leave no two frames"),
    ],
    ids=str,
)
def test_knobs_are_checked(folder, knobs, match):
    processor, _ = ours(folder, limits=replace(LIMITS, max_frames=12))
    refused(processor, make_clip(30), knobs, match)


def test_limits_name_their_settings(folder):
    clip = make_clip(30)
    refused(ours(folder, limits=replace(LIMITS, max_duration_s=2.0))[0], clip, None, "3.0 s long; the limit is 2 s")
    refused(
        ours(folder, limits=replace(LIMITS, max_frame_pixels=9000))[0],
        clip,
        None,
        r"112x84 = 9408 pixels a frame; the limit is 9000 \(setting --max-video-frame-pixels\)",
    )
    few = ours(folder, limits=replace(LIMITS, max_frames=4))[0]
    refused(few, [picture(64, 64)] * 5, None, r"has 5 frames; the limit is 4 \(setting --max-video-frames\)")
    assert few.process_video(clip).grid_thw[0] == 2  # the sampling rule keeps to the limit by itself
    short = ours(folder, limits=replace(LIMITS, max_tokens=10))[0]
    refused(short, clip, None, r"the context has 10 \(setting --max-model-len\)")


# ---------------------------------------------------------------- where settings come from


def test_video_settings_are_found_where_transformers_finds_them(folder, tmp_path):
    import json
    import shutil

    from processors.families.config import read_processor_config

    config = read_json(folder, "config.json")
    path = tmp_path / "model"
    shutil.copytree(folder, path)

    def found():
        return read_processor_config(path, config).video

    written = read_json(path, "video_preprocessor_config.json")
    assert found().max_pixels == written["size"]["longest_edge"]
    assert found().fps is None
    more = {"fps": 3, "num_frames": 6, "max_frames": 10, "min_frames": 5, "cap_pixels_per_frame": True}
    (path / "video_preprocessor_config.json").write_text(json.dumps(written | more))
    assert {name: getattr(found(), name) for name in more} == more
    nested = {"video_processor": written | {"fps": 4}}
    (path / "processor_config.json").write_text(json.dumps(nested))
    assert found().fps == 4
    (path / "processor_config.json").unlink()
    (path / "video_preprocessor_config.json").unlink()
    images = read_processor_config(path, config)
    assert (images.video.min_pixels, images.video.max_pixels) == (images.min_pixels, images.max_pixels)
    (path / "video_preprocessor_config.json").write_text(json.dumps(written | {"fps": "fast"}))
    with pytest.raises(CheckpointError, match=r"video_preprocessor_config\.json: unusable video settings"):
        found()
