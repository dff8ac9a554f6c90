"""Adaptive sampling: as many frames as without, more of them where more changes, and a report of what was seen."""

from __future__ import annotations

import io
from itertools import pairwise

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from processors.families.base import ProcessorLimits
from processors.families.report import report_medium
from processors.video.adaptive import MOST_PROBES, changes_between, probe_places, spread
from processors.video.options import VideoKnobs
from tests.processors.clips import make_clip
from tests.processors.helpers import FAMILIES, noise, tiny_processor
from vlmserve_common.errors import BadRequestError

ADAPTIVE = VideoKnobs(sampling="adaptive", num_frames=16)


def lecture(seconds: int = 120, fps: int = 5, busy: tuple[int, int] = (60, 70)) -> bytes:
    """A slide for two minutes, but for ten seconds in which there is another picture every second."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as box:
        stream = box.add_stream("libx264rgb", rate=fps, options={"crf": "0", "preset": "ultrafast", "g": "50"})
        stream.width = stream.height = 64
        stream.pix_fmt = "rgb24"
        for number in range(seconds * fps):
            second = number // fps
            picture = noise(64, 64) // 2 + (second * 47 % 128 if busy[0] <= second < busy[1] else 0)
            box.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        box.mux(stream.encode())
    return file.getvalue()


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return tiny_processor(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl", max_pixels=512 * 512)


def test_frames_go_where_the_changes_are(processor):
    data = lecture()
    plain = processor.process_video(data, VideoKnobs(num_frames=16))
    adaptive = processor.process_video(data, ADAPTIVE)
    in_ten = [sum(60 <= time < 71 for time in one.frame_times) for one in (plain, adaptive)]
    assert in_ten[0] <= 2
    assert in_ten[1] >= 6
    assert len(adaptive.frame_times) == len(plain.frame_times)
    assert adaptive.num_tokens == plain.num_tokens
    assert any(time < 30 for time in adaptive.frame_times)
    assert any(time > 90 for time in adaptive.frame_times)
    assert list(adaptive.frame_indices) == sorted(set(adaptive.frame_indices))
    assert adaptive.frame_times == pytest.approx([index / 5 for index in adaptive.frame_indices])
    report = report_medium(processor, adaptive, "").as_json()["video"]
    assert report["sampling"] == "adaptive"
    assert 0 < report["probes"] <= MOST_PROBES
    assert len(report["scene_changes"]) >= 8
    assert all(59 <= time <= 71 for time in report["scene_changes"])
    assert processor.process_video(data, ADAPTIVE).digest == adaptive.digest != plain.digest


def test_a_part_of_a_clip(processor):
    knobs = VideoKnobs(sampling="adaptive", num_frames=8, video_start=62, video_end=110)
    times = processor.process_video(lecture(), knobs).frame_times
    assert len(times) == 8
    assert times[0] >= 62
    assert times[-1] <= 110
    assert sum(time < 71 for time in times) >= 4


def test_a_clip_without_changes_is_sampled_evenly(processor):
    steps = np.diff(processor.process_video(lecture(busy=(0, 0)), ADAPTIVE).frame_indices)
    assert steps.max() - steps.min() <= 2


def test_all_frames_stay_where_there_are_no_more(processor):
    data = make_clip(12)
    knobs = VideoKnobs(num_frames=12)
    found = processor.process_video(data, VideoKnobs(sampling="adaptive", num_frames=12))
    assert found.digest == processor.process_video(data, knobs).digest
    assert (found.sampling, found.probes) == ("transformers", 0)


@given(st.data())
def test_frames_are_different_and_inside(data):
    first, total = data.draw(st.integers(0, 50)), data.draw(st.integers(2, 400))
    count = data.draw(st.integers(1, total - 1))
    places = data.draw(st.sets(st.integers(first, first + total - 1), min_size=2, max_size=40).map(sorted))
    changes = np.array(data.draw(st.lists(st.floats(0, 1), min_size=len(places) - 1, max_size=len(places) - 1)))
    found = spread(places, changes, first, total, count)
    assert len(found) == count
    assert list(found) == sorted(set(found))
    assert first <= found[0]
    assert found[-1] < first + total


@given(st.integers(2, 20000), st.sampled_from([1.0, 25.0]), st.integers(1, 300), st.integers(0, 100))
def test_probes_are_few_and_prefer_keyframes(total, rate, every, first):
    times = [n / rate for n in range(first + total)]
    keys = list(range(0, first + total, every))
    probes = probe_places(times, keys, first, total)
    assert 1 <= len(probes) <= MOST_PROBES
    assert probes == sorted(set(probes))
    assert all(first <= place < first + total for place in probes)
    inside = [key for key in keys if key >= first]
    if len(inside) >= MOST_PROBES // 4:
        assert all(place in keys for place in probes)
    if len(probes) > 1:
        assert max(b - a for a, b in pairwise(probes)) <= max(2 * every, 3 * total / len(probes)), "no gaps"


def test_families_that_need_even_times_refuse(tmp_path):
    processor = tiny_processor(tmp_path, "qwen2_5_vl", ProcessorLimits())
    with pytest.raises(BadRequestError, match="sampling adaptive is not for this model"):
        processor.process_video(make_clip(12), ADAPTIVE)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen2_5_vl"])
def test_other_families_take_it(tmp_path, family):
    processor = tiny_processor(tmp_path, family, ProcessorLimits())
    assert processor.process_video(lecture(20, busy=(8, 12)), VideoKnobs(sampling="adaptive")).sampling == "adaptive"


def test_another_size_is_the_largest_change():
    small, large = np.zeros((40, 40, 3), np.uint8), np.zeros((50, 60, 3), np.uint8)
    assert changes_between([small, small, large, large]).tolist() == [0, 1, 0]
