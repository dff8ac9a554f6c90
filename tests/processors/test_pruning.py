"""Places that are left out of pictures and clips: which they are, what tells them apart in caches, where the rest
stands in a prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from processors.families.base import ProcessorLimits
from processors.families.report import report_medium
from processors.inputs import MultimodalDataItem
from processors.knobs import ImageKnobs
from processors.mrope import MediaSpan, mrope_positions
from processors.processed import ProcessedImage, ProcessedVideo
from processors.pruning import BEFORE, BEHIND, NOTHING_LEAVES, STAYS, Pruning, grid_mask, kept_counts, places_left
from processors.video.options import VideoKnobs, VideoLimits
from tests.processors.helpers import FAMILIES, IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START, noise, tiny_processor
from vlmserve_common.errors import BadRequestError

MERGE = 2


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return request.param, tmp_path_factory.mktemp(request.param)


@pytest.fixture
def processor(folder):
    return processor_of(folder)


def processor_of(folder, **limits):
    family, path = folder
    made = tiny_processor(path, family, ProcessorLimits(**limits), min_pixels=4 * 32 * 32, max_pixels=512 * 512)
    made._continue_text = lambda before, text: [*before, *(ord(letter) % 64 for letter in text)]
    return made


def sheet(side: int = 256) -> Image.Image:
    """White, with some noise in the middle: of a size that is not resized in any family."""
    pixels = np.full((side, side, 3), 255, np.uint8)
    pixels[80:150, 100:180] = noise(80, 70)
    return Image.fromarray(pixels)


def frames(count: int = 8, side: int = 224) -> list[Image.Image]:
    """Noise that stays, in which a square moves every second frame."""
    made = []
    for number in range(count):
        pixels = noise(side, side)
        pixels[60:90, number // 2 * 40 : number // 2 * 40 + 30] = 255 - number // 2
        made.append(Image.fromarray(pixels))
    return made


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([3, 8]),
    st.lists(st.integers(0, 2), min_size=48, max_size=48),
)
def test_what_equals_its_neighbours_or_its_past_leaves(t, rows, columns, width, colours):
    places = np.array(colours[: t * rows * columns], np.uint8).reshape(t, rows, columns)
    patches = places.reshape(-1).repeat(MERGE**2)[:, None].repeat(width, axis=1)
    left = places_left(patches, (t, rows * MERGE, columns * MERGE), MERGE).reshape(places.shape)
    wanted = np.full(places.shape, STAYS)
    for n, y, x in np.ndindex(places.shape):
        around = [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]
        if all(0 <= b < rows and 0 <= a < columns and places[n, b, a] == places[n, y, x] for b, a in around):
            wanted[n, y, x] = BEFORE
        elif n and places[n, y, x] == places[n - 1, y, x]:
            wanted[n, y, x] = BEHIND
    for part in wanted:
        part[0, 0] = part[0, 0] if (part == STAYS).any() else STAYS
    np.testing.assert_array_equal(left, wanted)
    assert (left == STAYS).any(axis=(1, 2)).all()


def test_a_part_of_a_place_that_differs_is_enough():
    patches = np.zeros((9 * MERGE**2, 8), np.uint8)
    assert places_left(patches, (1, 6, 6), MERGE).tolist() == [[1, 1, 1, 1, 0, 1, 1, 1, 1]]
    patches[6 * MERGE**2 - 1, -1] = 1
    assert places_left(patches, (1, 6, 6), MERGE).tolist() == [[1] * 9]
    patches = np.zeros((2 * 4 * MERGE**2, 8), np.uint8)
    patches[-1, -1] = 1
    assert places_left(patches, (2, 4, 4), MERGE).tolist() == [[1, 1, 1, 1], [2, 2, 2, 1]]


@given(st.integers(1, 40), st.integers(1, 50), st.floats(0, 0.99))
def test_a_rate_settles_how_many_tokens_stay(patches, places, rate):
    counts = kept_counts(patches, places, rate)
    whole = patches * places
    if not counts:
        assert rate == 0 or patches == 1 or int(whole * (1 - rate)) >= whole
        return
    assert counts[0] == places
    assert all(1 <= count <= places for count in counts)
    assert max(counts[1:]) - min(counts[1:]) <= 1
    wanted = int(whole * (1 - rate))
    assert sum(counts) == wanted or (wanted < places + patches - 1 <= sum(counts) + patches)


def test_patches_that_stay_are_those_of_the_whole_picture(processor):
    whole, fewer = (processor.process_image(sheet(), ImageKnobs(skip_repeats=skip)) for skip in (False, True))
    assert fewer.kept
    assert 0 < fewer.num_tokens < whole.num_tokens - 4
    kept = np.frombuffer(fewer.kept[0], bool)
    assert kept.sum() == fewer.num_tokens
    np.testing.assert_array_equal(fewer.feature, whole.feature[kept.repeat(MERGE**2)])
    assert fewer.grid_thw == whole.grid_thw
    assert not fewer.feature.flags.writeable


def test_nothing_changes_unless_it_is_asked_and_there_is_something(processor, folder):
    """Not by a setting that is off, nor in a picture without repeats: caches find them as they always did."""
    plain = processor.process_image(sheet())
    assert (plain.kept, plain.counts, plain.pruning) == ((), (), NOTHING_LEAVES)
    assert processor_of(folder, pruning=Pruning(skip_repeats=True)).process_image(sheet()).kept
    off = processor_of(folder, pruning=Pruning(skip_repeats=True)).process_image(
        sheet(), ImageKnobs(skip_repeats=False)
    )
    assert same(off, plain)
    busy = Image.fromarray(noise(256, 256))
    found = processor.process_image(busy, ImageKnobs(skip_repeats=True))
    assert same(replace(found, pruning=NOTHING_LEAVES), processor.process_image(busy))
    clip = processor.process_video(frames())
    assert same(processor.process_video(frames(), VideoKnobs(video_pruning_rate=0, skip_repeats=False)), clip)


def same(one, other) -> bool:
    assert np.array_equal(one.feature, other.feature)
    empty = np.empty(0)
    return replace(one, feature=empty) == replace(other, feature=empty)


def test_a_clip_of_repeats_has_a_limit_before_they_leave_and_after(folder):
    still, moving = [frames(1)[0]] * 12, frames(12)
    whole = processor_of(folder).process_video(still).num_tokens
    skip = VideoKnobs(skip_repeats=True)
    least, found = processor_of(folder).process_video(still, skip), processor_of(folder).process_video(moving, skip)
    assert least.num_tokens < found.num_tokens < whole

    def limited(tokens):
        return processor_of(folder, video=VideoLimits(max_tokens=tokens))

    assert limited(found.num_tokens).process_video(still, skip).num_tokens == least.num_tokens
    with pytest.raises(BadRequestError, match=f"takes {found.num_tokens} tokens .*total_pixels$"):
        limited(found.num_tokens).process_video(moving, skip)
    with pytest.raises(
        BadRequestError, match=f"takes {whole} tokens .*; before repeats leave, it may be less than 8 times that"
    ):
        limited(whole // 8).process_video(still, skip)


def test_caches_tell_what_is_left_out(processor):
    """Equal pixels under another mask are another medium; a rate changes the clip alone, not its temporal patches."""
    whole, fewer = (processor.process_image(sheet(), ImageKnobs(skip_repeats=skip)) for skip in (False, True))
    assert fewer.digest != whole.digest
    assert fewer.patch_digests != whole.patch_digests
    plain, half, most = (
        processor.process_video(frames(), VideoKnobs(video_pruning_rate=rate)) for rate in (0, 0.5, 0.9)
    )
    assert plain.patch_digests == half.patch_digests == most.patch_digests
    assert len({plain.digest, half.digest, most.digest}) == 3
    skipped = processor.process_video(frames(), VideoKnobs(skip_repeats=True))
    assert skipped.patch_digests == plain.patch_digests, "all that stands still is encoded"
    assert skipped.digest != plain.digest


def test_what_stays_in_a_clip(processor):
    whole, fewer = (processor.process_video(frames(), VideoKnobs(skip_repeats=skip)) for skip in (False, True))
    masks = grid_mask(len(fewer.kept[0]), len(fewer.kept), fewer.kept)
    assert masks is not None
    assert masks[1:].sum() < masks[1:].size / 2
    assert masks.any(1).all()
    assert fewer.feature is whole.feature or np.array_equal(fewer.feature, whole.feature)
    assert fewer.num_tokens == masks.sum() == sum(fewer.patch_tokens)
    still = processor.process_video([frames()[0]] * 8, VideoKnobs(skip_repeats=True))
    assert still.patch_tokens[1:] == (1,) * (len(still.patch_tokens) - 1)


def test_a_rate_puts_exact_repeats_aside(processor):
    both = processor.process_video(frames(), VideoKnobs(skip_repeats=True, video_pruning_rate=0.5))
    assert (both.kept, both.pruning) == ((), Pruning(rate=0.5))
    assert both.ignored == ("skip_repeats",)
    assert both.num_tokens == sum(both.counts) < sum(processor.process_video(frames()).patch_tokens)


def prompt(processor, medium):
    pad = IMAGE_PAD if isinstance(medium, ProcessedImage) else VIDEO_PAD
    return processor.expand([1, 2, VISION_START, pad, VISION_END, 3, 4], [medium])


def places_of(item: MultimodalDataItem) -> np.ndarray:
    grid = item.grid_thw
    each = grid[1] * grid[2] // MERGE**2
    mask = grid_mask(each, grid[0], item.kept, item.counts)
    return np.ones(grid[0] * each, bool) if mask is None else mask.reshape(-1)


def media(processor) -> list[ProcessedImage | ProcessedVideo]:
    return [
        processor.process_image(sheet(), ImageKnobs(skip_repeats=True)),
        processor.process_video(frames(), VideoKnobs(skip_repeats=True)),
        processor.process_video(frames(), VideoKnobs(video_pruning_rate=0.7)),
    ]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_rest_stands_where_it_stands_in_the_whole_prompt(processor, which):
    fewer = media(processor)[which]
    plain = processor.process_image(sheet()) if which == 0 else processor.process_video(frames())
    got, whole = prompt(processor, fewer), prompt(processor, plain)
    stays = np.ones(len(whole.input_ids), bool)
    pads = np.isin(whole.input_ids, (IMAGE_PAD, VIDEO_PAD))
    stays[pads] = places_of(got.mm_inputs.items[0])
    np.testing.assert_array_equal(got.input_ids, whole.input_ids[stays])
    np.testing.assert_array_equal(got.mm_inputs.mrope_positions, whole.mm_inputs.mrope_positions[:, stays])
    next_there = len(whole.input_ids) + whole.mm_inputs.mrope_position_delta
    assert len(got.input_ids) + got.mm_inputs.mrope_position_delta == next_there
    [item] = got.mm_inputs.items
    assert item.num_tokens == sum(item.patch_tokens) == fewer.num_tokens
    for start, end in item.offsets:
        assert set(got.input_ids[start:end]) <= {IMAGE_PAD, VIDEO_PAD}


def test_places_without_a_token_count_at_the_end_of_a_prompt():
    span = MediaSpan(start=1, grid=(1, 3, 4), mask=np.arange(12) == 0)
    positions, delta = mrope_positions(2, [span])
    assert positions[:, -1].tolist() == [1, 1, 1]
    assert 2 + delta == 1 + 4


def test_the_report_tells(processor):
    picture, skipped, rated = media(processor)
    for medium, repeats in ((picture, True), (skipped, True), (rated, False)):
        report = report_medium(processor, medium, "messages[0]")
        whole = np.prod(medium.grid_thw) // MERGE**2
        assert report.tokens + report.pruned_tokens == whole
        told = report.as_json()["pruning"]
        assert told["repeats" if repeats else "unchanged"] == report.pruned_tokens > 0
        assert sum(told["tokens_of_patches"]) == report.tokens
    assert report_medium(processor, processor.process_image(sheet()), "").as_json()["pruning"] is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("skip_repeats", 1), ("video_pruning_rate", -0.1), ("video_pruning_rate", 1), ("sampling", "x")],
)
def test_knobs_are_checked(processor, field, value):
    with pytest.raises(BadRequestError, match=field):
        processor.parse_kwargs({field: value})
    with pytest.raises(BadRequestError, match=field):
        processor.process_video(frames(), VideoKnobs(**{field: value}))


def test_blank_parts_of_a_clip_leave_before_the_tower(processor):
    pictures = [sheet()] * 4
    whole, fewer = (processor.process_video(pictures, VideoKnobs(skip_repeats=skip)) for skip in (False, True))
    encoded = np.concatenate([np.frombuffer(part, np.uint8) for part in fewer.kept]) != BEFORE
    np.testing.assert_array_equal(fewer.feature, whole.feature[encoded.repeat(MERGE**2)])
    assert fewer.kept[1].count(BEHIND)
    assert fewer.kept[1].count(BEFORE) == fewer.kept[0].count(BEFORE) > 0
    assert fewer.patch_digests[0] == fewer.patch_digests[1] != whole.patch_digests[0], "encoded once"
    report = report_medium(processor, fewer, "")
    assert report.pruning.before_tower == np.count_nonzero(~encoded) < report.pruning.repeats
    assert report.patches == len(fewer.feature)
