"""What the model saw, from the server's report and the files, and marks of an answer on its picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlmserve import LLM, SamplingOverrides
from vlmserve.commands.client.chat_client import Stats
from vlmserve.commands.demo.panels import saw
from vlmserve.commands.demo.pictures import FOLDER, Drawing, draw_marks, see

STATS = Stats(
    ttft_s=0.5, total_s=2.5, prompt_tokens=90, cached_tokens=45, completion_tokens=5, media_tokens={"image": 40}
)


def report(size: tuple[int, int], grid: tuple[int, int, int], tokens: int, **video: Any) -> dict[str, Any]:
    return {
        "kind": "video" if video else "image",
        "source_size": {"width": 320, "height": 200},
        "final_size": {"width": size[0], "height": size[1]},
        "grid_thw": list(grid),
        "tokens": tokens,
        "video": video or None,
    }


def clip_report(frames: int) -> dict[str, Any]:
    times = [k / 8 for k in range(frames)]
    video = {"frame_indices": list(range(frames)), "timestamps": times, "source_frames": 32, "source_duration_s": 4.0}
    return report((192, 160), (frames // 2, 10, 12), frames // 2 * 30, **video)


def brightest(image: Image.Image) -> float:
    """The middle of what is red, from left (0) to right (1)."""
    red = [x for x in range(image.width) if image.getpixel((x, image.height // 2))[1] < 100]
    return sum(red) / len(red) / image.width


def test_the_reports_of_the_real_model_are_shown():
    files = [FOLDER / "shapes.png", FOLDER / "rolling.mp4"]
    parts = [{"type": "image", "image": files[0]}, {"type": "video", "video": files[1].read_bytes()}]
    with LLM(dtype="float32", num_threads=1) as llm:
        content = [*parts, {"type": "text", "text": "?"}]
        answer = llm.chat([{"role": "user", "content": content}], SamplingOverrides(max_new_tokens=1))
    picture, clip = see(answer.mm_report["media"], files)
    [[frame]] = picture.steps
    width, height = picture.patches
    assert frame.image.size == (16 * width, 16 * height)
    assert picture.patches_of_a_token == clip.patches_of_a_token == 2
    assert len(clip.steps) == answer.mm_report["media"][1]["grid_thw"][0]
    frames = [frame for step in clip.steps for frame in step]
    assert [frame.seconds for frame in frames] == list(answer.mm_report["media"][1]["video"]["timestamps"])
    places = [brightest(frame.image) for frame in frames]
    assert places == sorted(places)
    assert places[0] < 0.3
    assert places[-1] > 0.7


def test_of_a_long_clip_some_frames_are_shown():
    [clip] = see([clip_report(32)], [FOLDER / "rolling.mp4"])
    assert len(clip.steps) == 8
    times = [[frame.seconds for frame in step] for step in clip.steps]
    assert (times[0], times[-1]) == ([0.0, 0.125], [3.75, 3.875])
    assert "32 of 32 frames (16 shown)" in saw([clip], 1, STATS, [])


def test_of_many_media_the_last_are_shown_and_large_ones_smaller():
    [large] = see([report((4096, 2048), (1, 128, 256), 8192)], [FOLDER / "wide.jpg"])
    assert large.steps[0][0].image.size == (1024, 512)
    shapes = report((256, 160), (1, 10, 16), 40)
    media = see([shapes] * 9, [FOLDER / "shapes.png"] * 9)
    assert [medium.number for medium in media] == [4, 5, 6, 7, 8, 9]
    assert "and 3 earlier" in saw(media, 9, STATS, [])


def test_what_cannot_be_shown_is_told(tmp_path):
    broken = tmp_path / "broken.mp4"
    broken.write_bytes((FOLDER / "rolling.mp4").read_bytes()[:2000])
    media = see([clip_report(8), clip_report(8)], [broken, tmp_path / "<gone>"])
    assert all(medium.problem for medium in media)
    panel = saw(media, 2, STATS, [])
    assert panel.count("cannot be shown here: ") == 2
    assert "&lt;gone&gt;" in panel


def test_the_panel_draws_the_grid_and_counts():
    media = see([report((256, 160), (1, 10, 16), 40)], [FOLDER / "shapes.png"])
    panel = saw(media, 1, STATS, ["a <note>"])
    assert 'viewBox="0 0 16 10"' in panel
    strong = panel.split('class="saw-tokens" d="')[1].split('"')[0]
    assert strong.count("V10") == 7  # between 8 tokens
    assert strong.count("H16") == 4
    for text in ("320×200 resized to 256×160", "<b>40 tokens</b> of 2×2", "40 of pictures, 50 of text", "50% of the"):
        assert text in panel
    assert "2 a second" in panel
    assert "a &lt;note&gt;" in panel


WHITE = (255, 255, 255)
FIRST = (0xE6, 0x19, 0x4B)


def sent(size: tuple[int, int], kind: str = "image") -> dict[str, Any]:
    return {"kind": kind, "coordinates": "0-1000", "source_size": {"width": size[0], "height": size[1]}}


def box(*places: float, **others: Any) -> str:
    return json.dumps([{"bbox_2d": places, **others}])


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "white.png"
    Image.new("RGB", (400, 200), WHITE).save(path)
    return path


def drawn(text: str, path: Path, size: tuple[int, int] = (400, 200)) -> Drawing:
    drawing = draw_marks(text, [sent(size)], [path])
    assert drawing is not None
    return drawing


def test_a_box_is_drawn_where_it_is(picture):
    drawing = drawn(box(250, 500, 500, 750, label="猫"), picture)
    assert drawing.rows == ((1, "猫", 100, 100, 200, 150),)
    image = drawing.image
    assert [image.getpixel(place) for place in ((100, 140), (200, 120), (150, 100), (150, 150))] == [FIRST] * 4
    assert [image.getpixel(place) for place in ((97, 140), (160, 140), (203, 120), (150, 153))] == [WHITE] * 4
    assert not drawing.problems
    point = drawn('{"point_2d": [500, 500], "label": "eye"}', picture)
    assert point.rows == ((1, "eye", 200, 100, 200, 100),)
    assert point.image.getpixel((206, 100)) == FIRST
    assert drawn(box(500, 750, 250, 500), picture).image.getpixel((100, 140)) == FIRST, "corners may be swapped"
    outside = drawn(box(-100, -100, 2000, 2000), picture)
    assert outside.rows[0][2:] == (-40, -20, 800, 400)
    assert outside.image.getpixel((399, 100)) == outside.image.getpixel((200, 199)) == FIRST
    assert drawn(box(0, 0, 9, 9)[:-1] + ', {"bbox_2d": [1, 2', picture).problems


def test_a_large_picture_is_shown_smaller_and_counted_whole(tmp_path):
    path = tmp_path / "large.png"
    Image.new("RGB", (3200, 800), WHITE).save(path)
    drawing = drawn(box(250, 500, 500, 750), path, (3200, 800))
    assert drawing.image.size == (1600, 400)
    assert drawing.rows[0][2:] == (800, 400, 1600, 600)
    assert drawing.image.getpixel((400, 280)) == FIRST


def test_it_is_the_last_picture_upright(picture, tmp_path):
    other = tmp_path / "sideways.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (60, 50), WHITE).save(other, exif=exif.tobytes())
    media = [sent((400, 200)), sent((50, 60)), sent((8, 8), "video")]
    drawing = draw_marks(box(0, 0, 1000, 1000), media, [picture, other, tmp_path / "clip.mp4"])
    assert drawing is not None
    assert drawing.image.size == (50, 60)


@pytest.mark.parametrize(
    ("text", "reports"),
    [
        ("A red circle.", [sent((400, 200))]),
        ('{"bbox_2d": [1, 2', [sent((400, 200))]),
        ('{"bbox_2d": []}', [sent((400, 200))]),
        (box(1, 2, 3, 4), []),  # a server that reports nothing
        (box(1, 2, 3, 4), [sent((4, 4), "video")]),
        (box(1, 2, 3, 4), [{**sent((4, 4)), "coordinates": "polar"}]),
    ],
)
def test_no_drawing_without_marks_and_a_picture(text, reports, picture):
    assert draw_marks(text, reports, [picture]) is None
