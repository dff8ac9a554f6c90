"""M-RoPE positions against transformers' get_rope_index and against the published rule written out token by token."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from processors.families.base import ProcessorLimits
from processors.inputs import Modality, MultimodalDataItem
from processors.mrope import MediaSpan, mrope_positions
from processors.video.options import VideoOptions
from tests import hf_env  # noqa: F401
from tests.processors.helpers import FAMILIES, tiny_processor

MERGE = 2
TEXT, IMAGE, VIDEO = 0, 1, 2
SIDE = st.integers(1, 6)
PIECES = st.lists(
    st.one_of(
        st.tuples(st.just(TEXT), st.integers(1, 9)),
        st.tuples(st.just(IMAGE), st.tuples(st.just(1), SIDE, SIDE)),
        st.tuples(st.just(VIDEO), st.tuples(st.integers(1, 6), SIDE, SIDE), st.integers(1, 40)),
    ),
    min_size=1,
    max_size=8,
)


def reference_class(family):
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    return {"qwen2_vl": Qwen2VLModel, "qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel}[family]


def transformers_positions(family, kinds, images, videos, seconds):
    model = reference_class(family)
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=2)
    fake = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    fake.get_vision_position_ids = functools.partial(model.get_vision_position_ids, fake)
    more = {"second_per_grid_ts": torch.tensor(seconds)} if family == "qwen2_5_vl" and videos else {}
    positions, delta = model.get_rope_index(
        fake,
        torch.zeros(1, len(kinds), dtype=torch.long),
        torch.tensor([kinds]),
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor(videos) if videos else None,
        **more,
    )
    return positions[:, 0].numpy(), int(delta)


def build(pieces, family):
    """Token kinds, grids, seconds and our items of a prompt; text between any two media, as chat templates have it."""
    kinds, images, videos, seconds, items = [], [], [], [], []
    for kind, *what in pieces:
        if kind == TEXT:
            kinds += [TEXT] * what[0]
            continue
        kinds.append(TEXT)
        (t, h, w) = what[0]
        per_second = what[1] / 8 if kind == VIDEO else 0.0
        ranges = []
        for block_t in [1] * t if kind == VIDEO and family == "qwen3_vl" else [t]:
            start = len(kinds)
            kinds += [kind] * (block_t * h * w)
            ranges.append((start, len(kinds)))
            kinds.append(TEXT)  # an end marker, or the next patch's timestamp
        grid = (t, h * MERGE, w * MERGE)
        (images if kind == IMAGE else videos).append(grid)
        if kind == VIDEO:
            seconds.append(per_second)
        items.append(
            MultimodalDataItem(
                modality=Modality.IMAGE if kind == IMAGE else Modality.VIDEO,
                digest=b"",
                patch_digests=(b"",),
                grid_thw=grid,
                offsets=tuple(ranges),
                feature=np.zeros((0, 0), np.float32),
                second_per_grid_t=per_second,
            )
        )
    return kinds, images, videos, seconds, items


def published_positions(family, kinds, items):
    """The rule, one token at a time: a block starts after everything used so far, in any of the three."""
    rows = [None] * len(kinds)
    blocks = {start: (item, end) for item in items for start, end in item.offsets}
    at, used = 0, -1
    while at < len(kinds):
        if at not in blocks:
            rows[at] = (used + 1,) * 3
            used, at = used + 1, at + 1
            continue
        item, end = blocks[at]
        h, w = item.grid_thw[1] // MERGE, item.grid_thw[2] // MERGE
        step = 2 * item.second_per_grid_t if family == "qwen2_5_vl" and item.modality is Modality.VIDEO else 1
        first = used + 1
        for index in range(end - at):
            patch, inside = divmod(index, h * w)
            rows[at + index] = (first + int(patch * step), first + inside // w, first + inside % w)
        used = max(max(row) for row in rows[at:end])
        at = end
    return np.array(rows).T, used + 1 - len(kinds)


@pytest.fixture(scope="module", params=FAMILIES)
def processor(request, tmp_path_factory):
    return request.param, tiny_processor(tmp_path_factory.mktemp(request.param), request.param)


@settings(max_examples=50, deadline=None)
@given(pieces=PIECES)
def test_the_published_rule(processor, pieces):
    family, ours = processor
    kinds, _, _, _, items = build(pieces, family)
    positions, delta = ours.positions(len(kinds), items)
    expected, expected_delta = published_positions(family, kinds, items)
    assert positions.dtype == np.int64
    assert np.array_equal(positions, expected)
    assert delta == expected_delta


@settings(max_examples=50, deadline=None)
@given(pieces=PIECES)
def test_transformers_form_is_a_setting(processor, pieces):
    family, ours = processor
    kinds, images, videos, seconds, items = build(pieces, family)
    expected, expected_delta = transformers_positions(family, kinds, images, videos, seconds)
    limits = ProcessorLimits(video_options=VideoOptions(reference="transformers"))
    positions, delta = type(ours)(ours.config, limits).positions(len(kinds), items)
    assert np.array_equal(positions, expected)
    assert delta == expected_delta


def test_seconds_that_are_not_whole_are_cut_off_as_in_float32():
    span = MediaSpan(start=0, grid=(31, 1, 1), time_interval=0.7)
    expected = (torch.arange(31) * 0.7).long()
    assert mrope_positions(31, [span])[0][0].tolist() == expected.tolist()


@pytest.mark.parametrize(
    "spans",
    [
        [MediaSpan(start=3, grid=(1, 2, 2))],
        [MediaSpan(start=0, grid=(1, 2, 2)), MediaSpan(start=2, grid=(1, 1, 1))],
        [MediaSpan(start=0, grid=(1, 0, 2))],
        [MediaSpan(start=-1, grid=(1, 1, 1))],
    ],
)
def test_spans_that_do_not_fit_are_an_error(spans):
    with pytest.raises(ValueError, match="media span"):
        mrope_positions(6, spans)


def test_a_range_that_does_not_hold_its_grid_is_an_error(processor):
    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        digest=b"",
        patch_digests=(b"",),
        grid_thw=(1, 4, 4),
        offsets=((0, 3),),
        feature=np.zeros((0, 0), np.float32),
    )
    with pytest.raises(ValueError, match="does not hold"):
        processor[1].positions(8, [item])
