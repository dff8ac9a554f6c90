"""Which frames are used, against transformers' video processors and qwen_vl_utils; the time grid by its own promise."""

from __future__ import annotations

import functools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from processors.resize import PatchConfig
from processors.video.frame_choice import (
    frame_range,
    grid_places,
    qwen2_vl_indices,
    qwen3_vl_indices,
    qwen_vl_utils_indices,
)
from processors.video.options import RuleSettings, VideoConfig, VideoKnobs
from processors.video.rules import qwen2_rules, qwen3_rules, qwen_vl_utils_rules, time_grid_rules
from tests import hf_env  # noqa: F401
from vlmserve_common.errors import BadRequestError

TOTALS = st.integers(2, 4000)
RATES = st.sampled_from([1.0, 5.0, 10.0, 12.5, 24.0, 25.0, 30000 / 1001, 30.0, 59.94, 60.0]) | st.floats(0.5, 240)
FPS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0, 30.0]) | st.floats(0.01, 100)
BOUNDS = st.tuples(st.integers(1, 40), st.integers(0, 800)).map(lambda x: (x[0], x[0] + x[1]))
PATCHES = PatchConfig(patch_size=14, merge_size=2, temporal_patch_size=2, mean=(0.5,) * 3, std=(0.5,) * 3)
NO_KNOBS = VideoKnobs()


@functools.cache
def reference(family):
    """A video processor of transformers; making one takes milliseconds."""
    if family == "qwen3":
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

        return Qwen3VLVideoProcessor(patch_size=14)
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    return Qwen2VLVideoProcessor(patch_size=14)


def reference_indices(family, total, rate, fps, bounds, num):
    from transformers.video_utils import VideoMetadata

    processor = reference(family)
    processor.min_frames, processor.max_frames = bounds
    metadata = VideoMetadata(total_num_frames=total, fps=rate)
    return processor.sample_frames(metadata, num_frames=num, fps=None if num else fps).tolist()


@given(total=st.integers(1, 4000), rate=RATES, fps=FPS, bounds=BOUNDS, num=st.none() | st.integers(1, 800))
def test_qwen3_vl_takes_the_frames_that_transformers_takes(total, rate, fps, bounds, num):
    wanted = reference_indices("qwen3", total, rate, fps, bounds, num)
    got = qwen3_vl_indices(total, rate, fps=fps, num_frames=num, min_frames=bounds[0], max_frames=bounds[1])
    assert got == wanted


@given(total=TOTALS, rate=RATES, fps=FPS, bounds=BOUNDS, num=st.none() | st.integers(2, 800))
def test_qwen2_vl_takes_the_frames_that_transformers_takes(total, rate, fps, bounds, num):
    def ours():
        return qwen2_vl_indices(total, rate, fps=fps, num_frames=num, min_frames=bounds[0], max_frames=bounds[1])

    try:
        wanted = reference_indices("qwen2", total, rate, fps, bounds, num)
    except ValueError:
        with pytest.raises(BadRequestError, match="has only"):
            ours()
        return
    except ZeroDivisionError:  # it finds no frame at all
        assert len(ours()) == 2
        return
    got = ours()
    if len(wanted) % 2:  # its float steps overshot by one
        assert got == wanted[:-1]
    else:
        assert got == wanted


@given(total=TOTALS, rate=RATES, fps=FPS, bounds=BOUNDS, num=st.none() | st.integers(2, 800))
def test_the_frames_that_qwen_vl_utils_takes(total, rate, fps, bounds, num):
    import torch
    from qwen_vl_utils.vision_process import smart_nframes

    element = {"nframes": num} if num else {"fps": fps, "min_frames": bounds[0], "max_frames": bounds[1]}

    def ours():
        return qwen_vl_utils_indices(total, rate, fps=fps, num_frames=num, min_frames=bounds[0], max_frames=bounds[1])

    try:
        count = smart_nframes(element, total, rate)
    except ValueError:
        if num:
            with pytest.raises(BadRequestError, match="has only"):
                ours()
        else:
            assert len(ours()) == 2
        return
    assert ours() == torch.linspace(0, total - 1, count).round().long().tolist()


@given(total=TOTALS, rate=RATES, start=st.none() | st.floats(0, 500), end=st.none() | st.floats(0, 500))
def test_a_part_of_a_clip_as_qwen_vl_utils_cuts_it(total, rate, start, end):
    from qwen_vl_utils.vision_process import calculate_video_frame_range

    try:
        first, last, count = calculate_video_frame_range({"video_start": start, "video_end": end}, total, rate)
    except ValueError:
        with pytest.raises(BadRequestError, match="leave no two frames"):
            frame_range(total, rate, start, end)
        return
    assert frame_range(total, rate, start, end) == (first, count)
    assert last == first + count - 1


@pytest.mark.parametrize("sample", [qwen2_vl_indices, qwen3_vl_indices, qwen_vl_utils_indices])
def test_a_clip_of_one_frame_is_that_frame(sample):
    assert sample(1, 25.0, fps=2.0, num_frames=None, min_frames=4, max_frames=768) == [0]


# ---------------------------------------------------------------- sizes


def rules(kind, config=None, **more):
    values = {"fps": None, "cap_pixels_per_frame": None, "max_frames": 768, "max_pixels": None, **more}
    return kind(RuleSettings(config=config or VideoConfig(), patches=PATCHES, **values))


SIDES = st.integers(20, 3000)


@given(count=st.integers(2, 768), height=SIDES, width=SIDES, cap=st.booleans(), low=st.integers(1, 200), data=st.data())
def test_frame_sizes_are_those_of_transformers(count, height, width, cap, low, data):
    assume(max(height, width) / min(height, width) < 100)
    smallest = low * 784
    largest = data.draw(st.integers(2 * low, 40000)) * 784
    size = {"shortest_edge": smallest, "longest_edge": largest}
    config = VideoConfig(min_pixels=smallest, max_pixels=largest, cap_pixels_per_frame=cap)
    for kind, family in ((qwen2_rules, "qwen2"), (qwen3_rules, "qwen3")):
        wanted = resize_only(reference(family), count, height, width, size, cap, [])
        assert rules(kind, config).fit(count, height, width, NO_KNOBS)[:2] == wanted


def resize_only(reference, count, height, width, size, cap, seen):
    """The size that the reference would resize to, found without pixels."""
    from unittest import mock

    import torch
    from transformers.image_utils import SizeDict
    from transformers.video_processing_utils import BaseVideoProcessor

    frames = torch.empty(1, count, 1, 1, 1).expand(1, count, 3, height, width)
    with mock.patch.object(BaseVideoProcessor, "resize", lambda self, image, size, **_: seen.append(size)):
        reference.resize(frames, SizeDict(**size), resample=3, factor=28, temporal_factor=2, cap_pixels_per_frame=cap)
    return seen[-1].height, seen[-1].width


@given(count=st.integers(1, 384).map(lambda x: 2 * x), height=SIDES, width=SIDES, total=st.none() | st.integers(1, 99))
def test_frame_sizes_are_those_of_qwen_vl_utils(count, height, width, total):
    from qwen_vl_utils.vision_process import smart_resize

    assume(max(height, width) / min(height, width) < 100 and min(height, width) >= 28)
    token = 28 * 28
    total_pixels = 128000 * token * 0.9 if total is None else total * 10000 * token
    most = max(min(768 * token, total_pixels / count * 2), int(128 * token * 1.05))
    wanted = smart_resize(height, width, factor=28, min_pixels=128 * token, max_pixels=most)
    knobs = VideoKnobs(total_pixels=None if total is None else total_pixels)
    assert rules(qwen_vl_utils_rules).fit(count, height, width, knobs)[:2] == wanted


@given(kind=st.sampled_from([qwen2_rules, qwen3_rules, qwen_vl_utils_rules, time_grid_rules]), most=st.integers(4, 999))
def test_a_requests_and_the_servers_frame_limits_hold(kind, most):
    area = most * 784
    for made, knobs in (
        (rules(kind), VideoKnobs(max_pixels=area)),
        (rules(kind, max_pixels=area), NO_KNOBS),
    ):
        height, width, _ = made.fit(8, 1080, 1920, knobs)
        assert height % 28 == width % 28 == 0
        assert height * width <= area


# ---------------------------------------------------------------- which of the settings counts


@pytest.mark.parametrize(
    ("config", "server", "knobs", "frames"),
    [
        (VideoConfig(), None, NO_KNOBS, 20),
        (VideoConfig(fps=1.0), None, NO_KNOBS, 10),
        (VideoConfig(fps=1.0), 4.0, NO_KNOBS, 40),
        (VideoConfig(fps=1.0), 4.0, VideoKnobs(fps=3.0), 30),
        (VideoConfig(num_frames=6), None, NO_KNOBS, 6),
        (VideoConfig(num_frames=6), None, VideoKnobs(fps=3.0), 30),
        (VideoConfig(num_frames=6), None, VideoKnobs(num_frames=8), 8),
        (VideoConfig(max_frames=8), None, NO_KNOBS, 8),
        (VideoConfig(max_frames=8), None, VideoKnobs(max_frames=12), 12),
        (VideoConfig(min_frames=30), None, NO_KNOBS, 30),
        (VideoConfig(min_frames=30), None, VideoKnobs(min_frames=26), 26),
        (VideoConfig(), None, VideoKnobs(fps=100.0), 64),  # the server's limit
        (VideoConfig(), None, VideoKnobs(video_start=5.0), 10),
    ],
)
@pytest.mark.parametrize("kind", [qwen2_rules, qwen3_rules, qwen_vl_utils_rules])
def test_the_request_wins_over_the_server_over_the_checkpoint(kind, config, server, knobs, frames):
    times = [i / 10 for i in range(100)]
    choice = rules(kind, config, fps=server, max_frames=64).choose(times, 10.0, knobs)
    assert len(choice.indices) == frames
    assert choice.times == tuple(i / 10 for i in choice.indices)
    length = 50 if knobs.video_start else 100
    assert choice.fps == frames / length * 10
    assert min(choice.indices) == 100 - length


# ---------------------------------------------------------------- the time grid


@given(
    rate=st.floats(1, 120),
    fps=st.floats(0.1, 10),
    cuts=st.lists(st.floats(0, 20), min_size=4, max_size=4),
)
def test_overlapping_parts_share_frames_and_temporal_patches(rate, fps, cuts):
    times = [i / rate for i in range(int(20 * rate) + 1)]
    grid = rules(time_grid_rules)
    found = []
    for start, end in (sorted(cuts[:2]), sorted(cuts[2:])):
        part = VideoKnobs(fps=fps, video_start=min(start, times[-1]), video_end=end)
        try:
            choice = grid.choose(times, rate, part)
        except BadRequestError:  # too short for the grid
            assert end - start < 2 / fps or times[-1] - start < 2 / fps
            found.append({})
            continue
        for time, index in zip(choice.times, choice.indices, strict=True):
            # the frame shown at that time
            assert times[index] <= time + 1e-5 or index == 0
            assert index + 1 == len(times) or times[index + 1] > time - 1e-5
        found.append({round(t * fps / 2): i for t, i in zip(choice.times[::2], choice.indices[::2], strict=True)})
    for place in found[0].keys() & found[1].keys():
        assert found[0][place] == found[1][place]


@given(fps=st.integers(1, 30), end=st.floats(0, 100), start=st.floats(0, 50))
def test_grid_places_are_multiples_within_the_part(fps, end, start):
    places = grid_places(end, fps=fps, start=start)
    if not places:
        assert end - start < 2 / fps + 1e-5
        return
    assert places[0] % 2 == 0
    assert places[0] / fps >= start - 1e-5
    assert places[0] / fps - start <= 2 / fps + 1e-5
    assert places[-1] / fps <= end + 1e-5
    assert list(grid_places(0.6, fps=10)) == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"fps": 1.0, "video_start": 1.1, "video_end": 1.9}, "1.1 and video_end 1.9: one begins every 2 s"),
        ({"fps": 2.0, "video_start": 1.1, "video_end": 1.9}, "1.1 and video_end 1.9: one begins every 1 s"),
        ({"video_start": 3.5}, r"3.5 and the last frame at 3.50 s: one begins every 1 s \(2 frames at fps 2\)"),
        ({"fps": 0.1, "video_start": 0.1, "video_end": 99.0}, "0.1 and the last frame at 3.50 s: one begins every 20"),
    ],
)
def test_a_part_between_two_temporal_patches_is_refused(knobs, said):
    times = [i / 10 for i in range(36)]
    with pytest.raises(BadRequestError, match=f"begins between video_start {said}"):
        rules(time_grid_rules).choose(times, 10.0, VideoKnobs(**knobs))


def test_a_grid_is_refused_rather_than_thinned_out():
    times = [float(i) for i in range(1000)]
    with pytest.raises(BadRequestError, match=r"1999 frames on the time grid; the limit is 768"):
        rules(time_grid_rules).choose(times, 1.0, NO_KNOBS)
    with pytest.raises(BadRequestError, match=r"limit is 10 "):
        rules(time_grid_rules).choose(times[:50], 1.0, VideoKnobs(max_frames=10))
    with pytest.raises(BadRequestError, match="video_start 80"):
        rules(time_grid_rules).choose(times[:50], 1.0, VideoKnobs(video_start=80.0))


def test_a_grid_size_does_not_depend_on_the_number_of_frames():
    assert len({rules(time_grid_rules).fit(n, 720, 1280, NO_KNOBS)[:2] for n in (1, 2, 40, 768)}) == 1
