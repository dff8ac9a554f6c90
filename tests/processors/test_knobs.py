"""What a request says about the size of its pictures and videos: who wins, the server's limits, and what is told."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from processors.families.base import ProcessorLimits
from processors.image.sizes import ImageSizes
from processors.knobs import Clamp, ImageKnobs, laid_over
from processors.video.frame_sizes import limit_areas
from processors.video.options import VideoConfig, VideoDefaults, VideoKnobs
from processors.video.rules import (
    qwen2_rules,
    qwen3_rules,
    qwen_vl_utils_rules,
    time_grid_rules,
)
from tests import hf_env  # noqa: F401
from tests.processors import test_frame_sampling
from tests.processors.helpers import picture, tiny_processor
from vlmserve_common.errors import BadRequestError

TOKEN = 28 * 28
PIXELS = "setting --max-pixels"


def qwen2(folder, limit=None, low=4, high=64, **limits):
    """A Qwen2-VL processor; area limits in tokens."""
    limit = None if limit is None else limit * TOKEN
    return tiny_processor(
        folder,
        "qwen2_vl",
        ProcessorLimits(max_pixels=limit, **limits),
        min_pixels=low * TOKEN,
        max_pixels=high * TOKEN,
    )


# ---------------------------------------------------------------- pictures


def tokens(processor, side, knobs=None):
    return math.prod(processor.sizes.fit(side, side, knobs or ImageKnobs())[:2]) // processor.config.patches.factor**2


def test_the_servers_limit_is_the_checkpoints_unless_set(tmp_path):
    asked = ImageKnobs(max_pixels=100 * TOKEN)
    for limit, used in ((None, 64), (20, 16), (81, 81), (1000, 100)):
        processor = qwen2(tmp_path, limit)
        assert tokens(processor, 2000, asked) == used
        # What nobody asked for is no more than the checkpoint's.
        assert tokens(processor, 2000) == min(used, 64)


@pytest.mark.parametrize("name", ["min_pixels", "max_pixels"])
def test_a_clamp_is_told(tmp_path, name):
    processor = qwen2(tmp_path)
    made = processor.process_image(picture(60, 60), ImageKnobs(**{name: 65 * TOKEN}))
    assert made.clamps == (
        Clamp(knob=name, asked=65 * TOKEN, used=64 * TOKEN, limit=64 * TOKEN, setting="setting --max-pixels"),
    )
    assert str(made.clamps[0]) == f"{name} 50960 was changed to 50176, the limit is 50176 (setting --max-pixels)"
    assert made.num_tokens == (64 if name == "min_pixels" else 4)
    assert processor.process_image(picture(60, 60), ImageKnobs(**{name: 64 * TOKEN})).clamps == ()


def test_one_bound_pushes_the_default_of_the_other_aside(tmp_path):
    processor = qwen2(tmp_path, 100, low=9, high=16)
    assert tokens(processor, 2000, ImageKnobs(min_pixels=36 * TOKEN)) == 36
    assert tokens(processor, 10, ImageKnobs(max_pixels=TOKEN)) == 1
    assert processor.process_image(picture(9, 9), ImageKnobs(min_pixels=36 * TOKEN)).clamps == ()


def test_the_knobs_of_one_level_over_those_of_another():
    part, request = ImageKnobs(max_pixels=10), ImageKnobs(min_pixels=5, max_pixels=20)
    assert laid_over(part, request) == ImageKnobs(min_pixels=5, max_pixels=10)
    assert laid_over(ImageKnobs(), request) == request
    assert laid_over(part, ImageKnobs(min_pixels=11)) == part
    assert laid_over(ImageKnobs(min_pixels=30), request) == ImageKnobs(min_pixels=30)
    size = ImageKnobs(resized_height=3, resized_width=4)
    assert laid_over(size, request) == size
    own = ImageKnobs(max_pixels=7, resized_height=3, resized_width=4)
    assert laid_over(own, request) == own


def test_detail(tmp_path):
    processor = qwen2(tmp_path, 400, high=100, low_detail_tokens=16)
    sizes = processor.sizes
    assert [tokens(processor, 3000, sizes.knobs_for_detail(word)) for word in (None, "auto", "low", "high")] == [
        100,
        100,
        16,
        400,
    ]
    assert tokens(processor, 10, sizes.knobs_for_detail("high")) == tokens(processor, 10)
    for word in ("medium", "LOW", 3):
        with pytest.raises(BadRequestError, match=f"detail {word!r} is none of 'auto', 'low' and 'high'"):
            sizes.knobs_for_detail(word)


@given(
    height=st.integers(1, 4000), width=st.integers(1, 4000), side=st.integers(1, 99), factor=st.sampled_from([28, 32])
)
def test_a_size_is_the_one_of_qwen_vl_utils(height, width, side, factor):
    from qwen_vl_utils.vision_process import smart_resize

    assume(max(height, width) <= 200 * min(height, width))
    wanted = smart_resize(height, width, factor=factor)
    assume(min(wanted) >= factor)  # it makes nothing of very long pictures
    sizes = ImageSizes(factor=factor, min_pixels=1, max_pixels=1, limit=16384 * factor**2, low_detail_tokens=1)
    # as `fetch_image`: nothing but the size counts, not even area limits beside it
    knobs = ImageKnobs(resized_height=height, resized_width=width, max_pixels=1)
    assert sizes.fit(side, side, knobs)[:2] == wanted


def test_a_size_within_the_servers_limit(tmp_path):
    processor = qwen2(tmp_path)
    made = processor.process_image(picture(50, 60), ImageKnobs(resized_height=300, resized_width=150))
    assert made.grid_thw == (1, 22, 10)
    limit = {"limit": 64 * TOKEN, "setting": PIXELS}
    assert made.clamps == ()
    made = processor.process_image(picture(50, 60), ImageKnobs(resized_height=600, resized_width=300))
    assert made.grid_thw == (1, 22, 10)
    assert made.clamps == (
        Clamp(knob="resized_height", asked=600, used=308, **limit),
        Clamp(knob="resized_width", asked=300, used=140, **limit),
    )


# ---------------------------------------------------------------- videos


rules = partial(test_frame_sampling.rules, max_frames=20)
ALL = (qwen2_rules, qwen3_rules, qwen_vl_utils_rules, time_grid_rules)
TIMES = [i / 10 for i in range(100)]


def frame_area(made, knobs, count=4, side=3000):
    height, width, _ = made.fit(count, side, side, knobs)
    return height * width


def clamps_of(made, knobs, count=4):
    return made.fit(count, 3000, 3000, knobs).clamps


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("name", ["min_pixels", "max_pixels"])
def test_a_frames_area_is_clamped_and_told(kind, name):
    made = rules(kind, max_pixels=100 * TOKEN)
    asked, limit = VideoKnobs(**{name: 400 * TOKEN}), 100 * TOKEN
    assert clamps_of(made, asked) == (Clamp(knob=name, asked=400 * TOKEN, used=limit, limit=limit, setting=PIXELS),)
    assert getattr(limit_areas(made.sizer, 4, asked)[0], name) == limit
    assert frame_area(made, asked) == limit
    assert clamps_of(made, VideoKnobs(**{name: limit})) == ()


@pytest.mark.parametrize("kind", ALL)
def test_a_request_may_have_more_than_the_checkpoint_where_the_server_allows_it(kind):
    config = VideoConfig(min_pixels=4 * TOKEN, max_pixels=64 * TOKEN)
    asked = VideoKnobs(max_pixels=900 * TOKEN)
    open_, shut = rules(kind, config, max_pixels=2500 * TOKEN), rules(kind, config)
    (clamp,) = clamps_of(shut, asked)
    assert clamp.asked == 900 * TOKEN
    assert frame_area(shut, asked) <= clamp.limit == clamp.used
    if kind is qwen_vl_utils_rules:  # it has a limit of its own
        assert clamps_of(open_, asked)[0].setting == "--video-sampling qwen-vl-utils"
        assert frame_area(open_, asked) <= 768 * TOKEN
    else:
        assert clamps_of(open_, asked) == ()
        assert frame_area(open_, asked) == 900 * TOKEN


def test_a_whole_clips_area_has_the_frames_limit_times_the_frames():
    config = VideoConfig(min_pixels=4 * TOKEN, max_pixels=256 * TOKEN)
    for count in (4, 8):
        made = rules(qwen3_rules, config, max_pixels=36 * TOKEN)
        asked = VideoKnobs(defaults=VideoDefaults(longest_edge=10**9))
        (clamp,) = clamps_of(made, asked, count)
        assert (clamp.knob, clamp.used) == ("longest_edge", count * 36 * TOKEN)
        assert frame_area(made, asked, count) == 36 * TOKEN
    (clamp,) = clamps_of(rules(qwen3_rules, config), asked)
    assert (clamp.used, clamp.setting) == (256 * TOKEN, PIXELS)
    assert frame_area(rules(qwen3_rules, config), asked, 4) == 64 * TOKEN


@pytest.mark.parametrize("kind", [qwen2_rules, qwen3_rules])
def test_the_cap_is_told_of_a_frame_and_of_a_whole_clip(kind):
    config = VideoConfig(max_pixels=10**9, min_pixels=TOKEN, max_video_tokens=100)
    made, cap = rules(kind, config), VideoDefaults(cap_pixels_per_frame=True)
    asked = VideoKnobs(max_pixels=400 * TOKEN, defaults=cap)
    (clamp,) = clamps_of(made, asked)
    assert (clamp.asked, clamp.setting) == (400 * TOKEN, "cap_pixels_per_frame")
    assert frame_area(made, asked) <= clamp.limit < 400 * TOKEN
    (clamp,) = clamps_of(made, VideoKnobs(total_pixels=10**8, defaults=cap))
    assert (clamp.knob, clamp.setting) == ("total_pixels", "cap_pixels_per_frame")
    assert clamp.used == (int(90 * TOKEN) if kind is qwen2_rules else 100 * TOKEN * 20)


def test_a_request_turns_the_cap_on_and_off():
    config = VideoConfig(max_pixels=10**6, min_pixels=TOKEN, max_video_tokens=9)
    on, off = (VideoKnobs(defaults=VideoDefaults(cap_pixels_per_frame=value)) for value in (True, False))
    for server in (None, True, False):
        made = rules(qwen2_rules, config, cap_pixels_per_frame=server)
        assert frame_area(made, on) < frame_area(made, off)
        assert frame_area(made, VideoKnobs()) == frame_area(made, on if server else off)


@pytest.mark.parametrize("kind", ALL)
def test_the_part_wins_over_the_request_over_the_checkpoint(kind):
    config = VideoConfig(min_pixels=4 * TOKEN, max_pixels=400 * TOKEN)
    made = rules(kind, config, max_pixels=400 * TOKEN)
    count = 4 if kind is qwen3_rules else 1  # frames that `size` counts
    request = VideoKnobs(defaults=VideoDefaults(shortest_edge=TOKEN, longest_edge=100 * TOKEN * count))
    assert frame_area(made, request) == 100 * TOKEN
    for asked in (25, 225):
        part = laid_over(VideoKnobs(max_pixels=asked * TOKEN), request)
        assert frame_area(made, part) == asked * TOKEN
        assert frame_area(made, laid_over(VideoKnobs(min_pixels=asked * TOKEN), request)) == max(asked, 100) * TOKEN
    # what a part hides is not worth telling
    beyond = VideoKnobs(defaults=VideoDefaults(longest_edge=10**12))
    assert clamps_of(made, beyond)
    assert not clamps_of(made, laid_over(VideoKnobs(max_pixels=TOKEN), beyond))


def test_ways_of_sampling_exclude_each_other_across_levels():
    request = VideoKnobs(num_frames=8, max_frames=9, min_frames=4, do_sample_frames=True)
    assert laid_over(VideoKnobs(fps=1.0), request) == VideoKnobs(fps=1.0, max_frames=9, min_frames=4)
    assert laid_over(VideoKnobs(min_frames=12), request) == VideoKnobs(
        num_frames=8, min_frames=12, do_sample_frames=True
    )
    assert laid_over(VideoKnobs(total_pixels=5), VideoKnobs(min_pixels=9)) == VideoKnobs(total_pixels=5)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("size", [(100, 333), (1, 1), (2000, 1999)])
def test_a_frames_size_is_the_one_of_qwen_vl_utils(kind, size):
    from qwen_vl_utils.vision_process import smart_resize

    made = rules(kind, max_pixels=None if kind is qwen_vl_utils_rules else 16384 * TOKEN)
    knobs = VideoKnobs(resized_height=size[0], resized_width=size[1], max_pixels=TOKEN, total_pixels=1)
    if kind is qwen_vl_utils_rules and size[0] == 2000:
        (clamp, _) = clamps_of(made, knobs)
        assert (clamp.knob, clamp.setting) == ("resized_height", "--video-sampling qwen-vl-utils")
        assert frame_area(made, knobs) <= 768 * TOKEN == clamp.limit
    else:
        assert made.fit(4, 77, 88, knobs) == (*smart_resize(*size, factor=28), ())


FRAMES = "setting --max-video-frames"


@pytest.mark.parametrize("kind", [qwen2_rules, qwen3_rules, qwen_vl_utils_rules])
@pytest.mark.parametrize(
    ("knobs", "config", "frames", "told"),
    [
        (VideoKnobs(num_frames=50), {}, 20, [("nframes", 50, 20, 20, FRAMES)]),
        (VideoKnobs(max_frames=50, fps=1.0), {}, 10, [("max_frames", 50, 20, 20, FRAMES)]),
        (VideoKnobs(min_frames=50), {}, 20, [("min_frames", 50, 20, 20, FRAMES)]),
        (VideoKnobs(min_frames=50), {"max_frames": 8}, 8, [("min_frames", 50, 8, 8, "max_frames")]),
        (VideoKnobs(fps=5.0), {}, 20, [("fps", 5.0, 2.0, 20, FRAMES)]),
        (VideoKnobs(fps=5.0), {"max_frames": 8}, 8, [("fps", 5.0, 0.8, 8, "max_frames")]),
        (VideoKnobs(fps=5.0, max_frames=10), {}, 10, [("fps", 5.0, 1.0, 10, "max_frames")]),
        (VideoKnobs(num_frames=50, count_word="num_frames"), {}, 20, [("num_frames", 50, 20, 20, FRAMES)]),
        (VideoKnobs(fps=0.001), {}, 4, [("fps", 0.001, 0.4, 4, "min_frames")]),
        (VideoKnobs(fps=0.5, min_frames=8), {}, 8, [("fps", 0.5, 0.8, 8, "min_frames")]),
        (VideoKnobs(fps=0.4), {}, 4, []),
        (VideoKnobs(fps=50.0), {"max_frames": 200}, 20, [("fps", 50.0, 2.0, 20, FRAMES)]),
        (VideoKnobs(fps=2.0), {}, 20, []),
        (VideoKnobs(), {"num_frames": 50}, 20, []),
        (VideoKnobs(), {"fps": 9.0}, 20, []),
    ],
    ids=str,
)
def test_frames_are_clamped_and_told(kind, knobs, config, frames, told):
    choice = rules(kind, VideoConfig(**config)).choose(TIMES, 10.0, knobs)
    assert len(choice.indices) == frames
    assert [(c.knob, c.asked, c.used, c.limit, c.setting) for c in choice.clamps] == told
    assert choice.rule == ("qwen-vl-utils" if kind is qwen_vl_utils_rules else "transformers")


@pytest.mark.parametrize("kind", [qwen2_rules, qwen_vl_utils_rules])
def test_a_refusal_tells_what_was_changed_before(kind):
    with pytest.raises(
        BadRequestError, match="nframes: 20 frames are asked for, but the clip has only 10; nframes 900 was chang"
    ):
        rules(kind).choose(TIMES[:10], 10.0, VideoKnobs(num_frames=900))
    with pytest.raises(BadRequestError, match=r"num_frames: 12 frames \(11 in whole temporal patches\) are"):
        rules(kind).choose(TIMES[:10], 10.0, VideoKnobs(num_frames=11, count_word="num_frames"))


def test_fewer_frames_than_a_patch_has():
    """A picture's worth of video still is a temporal patch, where a rule counts in these."""
    for kind, most in ((qwen2_rules, 2), (qwen3_rules, 1), (qwen_vl_utils_rules, 2)):
        choice = rules(kind).choose(TIMES, 10.0, VideoKnobs(max_frames=1))
        assert len(choice.indices) == most
        told = [("max_frames", 1, 2, "frames of a temporal patch")] * (most == 2)
        assert [(c.knob, c.asked, c.used, c.setting) for c in choice.clamps] == told


@pytest.mark.parametrize("kind", [qwen2_rules, qwen3_rules, qwen_vl_utils_rules])
def test_bounds_beside_a_number_of_frames_have_no_effect(kind):
    bounds = VideoKnobs(num_frames=8, min_frames=2, max_frames=4)
    assert rules(kind).choose(TIMES, 10.0, bounds).ignored == ("min_frames", "max_frames")
    assert rules(kind).choose(TIMES, 10.0, VideoKnobs(num_frames=8, max_frames=10**6)).clamps == ()
    of_checkpoint = rules(kind, VideoConfig(num_frames=8))
    assert of_checkpoint.choose(TIMES, 10.0, VideoKnobs(max_frames=4)).ignored == ("max_frames",)
    assert of_checkpoint.choose(TIMES, 10.0, VideoKnobs(fps=1.0, max_frames=4)).ignored == ()
    every = VideoKnobs(do_sample_frames=False, max_frames=4)
    assert rules(kind).choose(TIMES, 10.0, every).ignored == ("max_frames",)


@pytest.mark.parametrize("kind", ALL)
def test_a_whole_clips_area_is_clamped_to_the_largest_of_all_clips(kind):
    """Whatever this one has: more than the server ever gives is what is told."""
    frames, area = 20, 9 * TOKEN
    patches = 1 if kind is qwen3_rules else 2  # the frames of a temporal patch count as one
    limit = area * frames // patches
    made = rules(kind, max_pixels=area)
    beyond, within = (VideoKnobs(total_pixels=total) for total in (10**9, limit))
    if kind is time_grid_rules:
        assert clamps_of(made, beyond) == ()
        assert made.ignored(beyond) == ("total_pixels",)
        return
    assert clamps_of(made, beyond) == (
        Clamp(knob="total_pixels", asked=10**9, used=limit, limit=limit, setting=PIXELS),
    )
    assert clamps_of(made, within) == ()
    for count in (4, 20):
        assert len({frame_area(made, knobs, count) for knobs in (beyond, within, VideoKnobs())}) == 1


@pytest.mark.parametrize("kind", ALL)
def test_every_frame(kind):
    made = rules(kind, max_frames=1000)
    choice = made.choose(TIMES, 10.0, VideoKnobs(do_sample_frames=False, video_start=5.0))
    assert choice.indices == tuple(range(50, 100))
    assert (choice.fps, choice.rule) == (10.0, "all")
    for knobs in (VideoKnobs(fps=1.0, do_sample_frames=False), VideoKnobs(num_frames=4, do_sample_frames=False)):
        with pytest.raises(BadRequestError, match="takes every frame of a video file"):
            made.choose(TIMES, 10.0, knobs)


@pytest.mark.parametrize("kind", ALL)
def test_areas_beside_a_size_have_no_effect(kind, tmp_path):
    size = {"resized_height": 56, "resized_width": 84}
    areas = VideoKnobs(**size, min_pixels=5, max_pixels=TOKEN, total_pixels=TOKEN)
    assert set(rules(kind).ignored(areas)) == {"min_pixels", "max_pixels", "total_pixels"}
    assert len(rules(kind).ignored(areas)) == 3
    assert rules(kind).ignored(VideoKnobs(**size)) == ()
    # the part goes before the request, which is no news
    assert rules(kind).ignored(laid_over(VideoKnobs(**size), VideoKnobs(total_pixels=5))) == ()
    made = qwen2(tmp_path).process_image(picture(50, 60), ImageKnobs(**size, max_pixels=TOKEN))
    assert made.ignored == ("max_pixels",)
    assert made.grid_thw == (1, 4, 6)
    assert qwen2(tmp_path).process_image(picture(50, 60), ImageKnobs(**size)).ignored == ()


def test_knobs_without_effect_are_named():
    everything = VideoKnobs(
        num_frames=4, min_frames=2, total_pixels=9, defaults=VideoDefaults(cap_pixels_per_frame=True, unused=("x",))
    )
    assert rules(time_grid_rules).ignored(everything) == (
        "nframes",
        "min_frames",
        "total_pixels",
        "cap_pixels_per_frame",
        "x",
    )
    assert rules(qwen_vl_utils_rules).ignored(everything) == ("cap_pixels_per_frame", "x")
    assert rules(qwen2_rules).ignored(everything) == ("x",)
    assert rules(qwen2_rules).ignored(VideoKnobs()) == ()


def test_low_detail_is_never_more_than_the_checkpoint_or_the_server_has(tmp_path):
    for limit, high in ((None, 16), (9, 100), (1000, 16)):
        processor = qwen2(tmp_path, limit, high=high)
        low = processor.sizes.knobs_for_detail("low")
        assert tokens(processor, 3000, low) == min(limit or 16, high, 64)
        assert processor.process_image(picture(300, 300), low).clamps == ()
    # below the checkpoint's minimum, too
    processor = qwen2(tmp_path, low=81, high=100)
    assert tokens(processor, 3000, processor.sizes.knobs_for_detail("low")) == 64


@pytest.mark.parametrize("kind", [qwen2_rules, qwen3_rules, qwen_vl_utils_rules])
@pytest.mark.parametrize("knobs", [VideoKnobs(num_frames=50), VideoKnobs(num_frames=7), VideoKnobs()])
def test_an_odd_limit_holds_whole_patches(kind, knobs):
    """Also for the checkpoint's own number."""
    made = rules(kind, VideoConfig(num_frames=9), max_frames=7)
    choice = made.choose(TIMES, 10.0, knobs)
    assert len(choice.indices) == (7 if kind is qwen3_rules else 6)
    told = [(c.knob, c.asked, c.used, c.limit, c.setting) for c in choice.clamps]
    if knobs.num_frames is None or knobs.num_frames == len(choice.indices):
        assert told == []
    else:
        assert told == [("nframes", knobs.num_frames, len(choice.indices), 7, FRAMES)]
    assert made.choose(TIMES, 10.0, VideoKnobs(num_frames=6)).clamps == ()
