"""`mm_processor_kwargs` against transformers' processors called with the same ones."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from processors.families.base import MultimodalProcessor, ProcessorLimits
from processors.families.processor_kwargs import parse_processor_kwargs
from processors.families.registry import make_processor
from processors.knobs import laid_over
from processors.video.options import VideoKnobs, VideoOptions
from tests import hf_env  # noqa: F401
from tests.processors.clips import decode_all, jpeg, make_clip
from tests.processors.helpers import picture, values
from tests.tiny_checkpoints import FAMILIES, make_checkpoint
from vlmserve_common.checkpoint.fields import read_json
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer
from vlmserve_common.errors import BadRequestError

TEXT = "See <|vision_start|><|image_pad|><|vision_end|> and <|vision_start|><|video_pad|><|vision_end|>!"


class Pair:
    """One checkpoint's processors, theirs and ours, and the area of its token."""

    def __init__(self, folder, family):
        from transformers import AutoProcessor

        self.family = family
        self.theirs = AutoProcessor.from_pretrained(folder)
        self.token = (32 if family == "qwen3_vl" else 28) ** 2
        self.tokenizer = load_text_tokenizer(folder)
        # Room for more than the checkpoint's own; transformers' form of the prompt.
        limits = ProcessorLimits(max_pixels=10**6, video_options=VideoOptions(reference="transformers"))
        config = read_json(folder, "config.json")
        self.ours: MultimodalProcessor = make_processor(folder, config, limits, self.tokenizer.continue_text)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    return Pair(make_checkpoint(request.param, tmp_path_factory.mktemp(request.param)), request.param)


CLIP = make_clip(60, fps=30, width=320, height=200)
IMAGE = picture(300, 200)


def tokens(n):
    """A `size` of 4 to n tokens, still to be multiplied by a token's area."""
    return {"shortest_edge": 4, "longest_edge": n}


KWARGS = [
    {},
    {"min_pixels": 4, "max_pixels": 9},
    {"min_pixels": 70, "max_pixels": 90},
    {"max_pixels": 9},
    {"size": tokens(9)},
    {"size": tokens(80), "min_pixels": 5, "max_pixels": 30},
    {"fps": 4},
    {"fps": 0.5},
    {"fps": None, "num_frames": 6},
    {"fps": None, "num_frames": 10, "size": tokens(100)},
    {"images_kwargs": {"size": tokens(12)}, "videos_kwargs": {"size": tokens(90), "fps": 3}},
    {"cap_pixels_per_frame": True, "fps": 8},
    {"do_sample_frames": False},
]


def scaled(kwargs, area):
    """Areas in tokens to areas in pixels."""
    if isinstance(kwargs, dict):
        areas = ("min_pixels", "max_pixels", "shortest_edge", "longest_edge")
        return {k: v * area if k in areas else scaled(v, area) for k, v in kwargs.items()}
    return kwargs


@pytest.mark.parametrize("kwargs", KWARGS, ids=str)
def test_equals_transformers(pair, kwargs):
    """Grids, patches, and the whole expanded prompt."""
    kwargs = scaled(kwargs, pair.token)
    frames, rate = decode_all(CLIP)
    metadata = {"total_num_frames": len(frames), "fps": rate}
    # What is our default has to be said to them.
    stated = {"do_sample_frames": True, "fps": 2}
    if kwargs.get("do_sample_frames") is False:
        stated = {}
        metadata["frames_indices"] = list(range(len(frames)))  # Qwen3-VL cannot tell the time without
    elif "videos_kwargs" in kwargs:
        stated = {"do_sample_frames": True}
    want = pair.theirs(
        text=[TEXT],
        images=[IMAGE],
        videos=[frames],
        video_metadata=[metadata],
        return_tensors="pt",
        **(stated | kwargs),
    )
    knobs = pair.ours.parse_kwargs(kwargs)
    image, video = pair.ours.process_image(IMAGE, knobs.image), pair.ours.process_video(CLIP, knobs.video)
    assert image.grid_thw == tuple(want["image_grid_thw"][0].tolist())
    assert video.grid_thw == tuple(want["video_grid_thw"][0].tolist())
    assert np.array_equal(values(image), want["pixel_values"].numpy())
    assert np.array_equal(values(video), want["pixel_values_videos"].numpy())
    if "second_per_grid_ts" in want:
        assert np.float32(video.second_per_grid_t) == float(want["second_per_grid_ts"][0])
    ids, _ = pair.ours.expand(pair.tokenizer.encode(TEXT), [image, video])
    assert ids.tolist() == want["input_ids"][0].tolist()
    assert image.clamps == ()
    # one frame of a clip of 2 s, and the least is 4
    assert [(c.knob, c.setting) for c in video.clamps] == [("fps", "min_frames")] * (kwargs.get("fps") == 0.5)


def test_what_a_family_does_not_know_is_told(pair):
    knobs = pair.ours.parse_kwargs({"max_pixels": 9 * pair.token})
    video, plain = pair.ours.process_video(CLIP, knobs.video), pair.ours.process_video(CLIP)
    if pair.family == "qwen3_vl":
        assert video.ignored == ("mm_processor_kwargs.max_pixels",)
        assert video.digest == plain.digest
    else:
        assert video.ignored == ()
        assert video.num_tokens < plain.num_tokens
    assert plain.ignored == ()


def test_one_edge_alone_pushes_the_other_one_aside(pair):
    one = 4 if pair.family == "qwen3_vl" else 1
    knobs = pair.ours.parse_kwargs({"size": {"longest_edge": one * pair.token}, "num_frames": 4})
    assert pair.ours.process_video(CLIP, knobs.video).num_tokens == 2
    assert pair.ours.process_image(IMAGE, knobs.image).num_tokens <= one


def test_lists_of_frames_are_used_whole(pair):
    knobs = pair.ours.parse_kwargs({"num_frames": 4, "do_sample_frames": True, "max_frames": 3, "min_frames": 2})
    frames = [Image.open(io.BytesIO(jpeg(i))) for i in range(6)]
    made = pair.ours.process_video(frames, knobs.video)
    assert made.frame_indices == tuple(range(6))
    assert made.ignored == ("num_frames", "min_frames", "max_frames", "do_sample_frames")
    assert made.sampling == "list"
    assert (made.source_fps, made.source_frames, made.sample_fps) == (2.0, 6, 2.0)
    faster = pair.ours.process_video(frames, pair.ours.parse_kwargs({"fps": 4}).video)
    assert faster.source_fps == faster.sample_fps == 4.0


def test_where_a_video_comes_from_is_kept(pair):
    made = pair.ours.process_video(CLIP, VideoKnobs(num_frames=4))
    assert (made.source_fps, made.source_frames, made.sampling, made.sample_fps) == (30.0, 60, "transformers", 2.0)
    assert made.source_size == (320, 200)
    assert len(made.frame_indices) == len(made.frame_times) == 4


# ---------------------------------------------------------------- what is refused


def refused(given, *, video_counts_clip=False):
    with pytest.raises(BadRequestError) as caught:
        parse_processor_kwargs(given, video_counts_clip=video_counts_clip)
    assert caught.value.status == 400
    assert caught.value.code == "invalid_value"
    return caught.value


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"max_pixel": 5}, ".max_pixel"),
        ({"x" * 500: 5}, "."),
        ({3: 5}, ".3"),
        ({"size": {"height": 5}}, ".size.height"),
        ({"images_kwargs": {"fps": 2}}, ".images_kwargs.fps"),
        ({"videos_kwargs": {"text": 2}}, ".videos_kwargs.text"),
    ],
    ids=str,
)
def test_unknown_keys(given, param):
    error = refused(given)
    assert error.param.startswith("mm_processor_kwargs" + param)
    assert f"{error.param} is not a known key; known are " in error.message
    assert len(error.message) < 800
    if param == ".max_pixel":
        assert "min_pixels, max_pixels, size, fps, num_frames, min_frames, max_frames, total_pixels," in error.message


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"min_pixels": 0}, "min_pixels is 0; it must be a positive integer"),
        ({"max_pixels": True}, "max_pixels is True"),
        ({"max_pixels": "big"}, "max_pixels is 'big'"),
        ({"max_pixels": 2**60}, r"max_pixels is 1152921504606846976; it must be at most 2\*\*53"),
        ({"min_pixels": 9, "max_pixels": 5}, "min_pixels 9 exceeds max_pixels 5"),
        ({"size": 5}, "size is 5; it must be an object with shortest_edge and longest_edge"),
        ({"size": {"shortest_edge": 9}, "max_pixels": 5}, "exceeds"),
        ({"fps": 0}, "fps is 0; it must be a number of at least 1e-05 and at most 100000"),
        ({"fps": float("nan")}, "fps is nan"),
        ({"fps": True}, "fps is True"),
        ({"num_frames": 10**400}, "num_frames is a number of about 401 digits"),
        ({"fps": 2, "num_frames": 4}, "fps and num_frames exclude each other"),
        ({"min_frames": 5, "max_frames": 4}, "min_frames 5 exceeds max_frames 4"),
        ({"do_sample_frames": 1}, "do_sample_frames is 1; it must be true or false"),
        ({"cap_pixels_per_frame": "no"}, "cap_pixels_per_frame is 'no'"),
        ({"images_kwargs": 3}, "images_kwargs is 3; it must be an object"),
        ({"images_kwargs": {"max_pixels": 3}, "max_pixels": 3}, "is given in mm_processor_kwargs.max_pixels, too"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_impossible_values(given, match):
    error = refused(given)
    with pytest.raises(BadRequestError, match=match):
        raise error
    assert error.param.startswith("mm_processor_kwargs")
    assert "mm_processor_kwargs" in error.message


def test_null_is_silence():
    nothing = parse_processor_kwargs({}, video_counts_clip=False)
    names = ("min_pixels", "size", "fps", "do_sample_frames", "images_kwargs", "videos_kwargs")
    assert parse_processor_kwargs(dict.fromkeys(names), video_counts_clip=False) == nothing
    assert parse_processor_kwargs({"size": {"shortest_edge": None}}, video_counts_clip=False) == nothing
    assert laid_over(nothing.image, nothing.image) == nothing.image
