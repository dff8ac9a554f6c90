"""Pad values, and what prompts with media share."""

from dataclasses import replace

import numpy as np
import pytest

from processors.inputs import Modality, MultimodalDataItem, MultimodalInputs
from vlmserve.memory.media_keys import MediaKeyTable, radix_key

ITEM = MultimodalDataItem(
    modality=Modality.IMAGE,
    digest=b"\x01" * 32,
    patch_digests=(b"\x02" * 32,),
    grid_thw=(1, 4, 8),
    offsets=((4, 12),),
    feature=np.zeros((32, 4), dtype=np.float32),
)
PAD = 900
PROMPT = np.array([1, 2, 3, 4, *[PAD] * 8, 5, 6, 7, 8])


def inputs(*items: MultimodalDataItem) -> MultimodalInputs:
    return MultimodalInputs(
        items=items, mrope_positions=np.zeros((3, len(PROMPT)), dtype=np.int64), mrope_position_delta=0
    )


def key_of(item):
    [key] = item.patch_keys
    return key


def with_pixels(number):
    return replace(ITEM, patch_digests=(bytes([number]) * 32,))


def test_pad_values_replace_every_range_in_a_copy():
    table = MediaKeyTable()
    video = replace(ITEM, modality=Modality.VIDEO, offsets=((0, 2), (13, 14)))
    key = radix_key(PROMPT, inputs(ITEM, video), table)
    first, second = table.intern(key_of(ITEM)), table.intern(key_of(video))
    assert key.dtype == np.int64
    assert key.tolist() == [second, second, 3, 4, *[first] * 8, 5, second, 7, 8]
    assert PROMPT[4] == PAD
    assert radix_key(PROMPT, None, table).tolist() == PROMPT.tolist()


def test_an_id_means_one_key_for_ever():
    table = MediaKeyTable(max_keys=2)
    keys = [key_of(with_pixels(i)) for i in range(5)]
    ids = [table.intern(key) for key in keys]
    assert len(set(ids)) == 5
    assert all(pad_value < 0 for pad_value in ids)
    assert [table.intern(key) for key in keys] == ids
    assert table.is_large
    table.retain({ids[3], -(10**6)})
    assert (len(table), table.is_large) == (1, False)
    assert table.intern(keys[3]) == ids[3]
    again = [table.intern(keys[i]) for i in (0, 1, 2, 4)]
    assert set(again).isdisjoint(ids)
    table.retain({*again, ids[3]})
    for i in range(5, 11):
        assert not table.is_large, "it has not doubled since"
        table.intern(key_of(with_pixels(i)))
    assert table.is_large


@pytest.mark.parametrize(
    "other",
    [
        with_pixels(7),
        replace(ITEM, modality=Modality.VIDEO),
        replace(ITEM, grid_thw=(1, 8, 4)),
        replace(ITEM, second_per_grid_t=0.5),
    ],
    ids=["pixels", "modality", "grid", "seconds"],
)
def test_media_that_differ_in_one_field_share_nothing_from_there_on(other):
    table = MediaKeyTable()
    first = radix_key(PROMPT, inputs(ITEM), table)
    same = replace(ITEM, feature=np.ones((32, 4), dtype=np.float32))
    assert radix_key(PROMPT, inputs(same), table).tolist() == first.tolist()
    assert (radix_key(PROMPT, inputs(other), table) == first).tolist() == [True] * 4 + [False] * 8 + [True] * 4


def test_a_video_shares_the_frames_that_it_begins_with():
    """And no more, in families with one range of tokens for a video and in those with one for each temporal patch."""
    table = MediaKeyTable()
    long = replace(
        ITEM, modality=Modality.VIDEO, patch_digests=tuple(bytes([i]) * 32 for i in range(4)), grid_thw=(4, 2, 4)
    )
    prompt = np.array([1, *[PAD] * 8])
    for ranges in ([(1, 9)], [(1, 3), (3, 5), (5, 7), (7, 9)]):
        item = replace(long, offsets=tuple(ranges))
        key = radix_key(prompt, inputs(item), table)
        assert [len(set(key[start : start + 2].tolist())) for start in (1, 3, 5, 7)] == [1] * 4
        assert len(set(key.tolist())) == 5
        other = replace(item, patch_digests=(*item.patch_digests[:2], b"other", item.patch_digests[3]))
        same = radix_key(prompt, inputs(other), table) == key
        assert same.tolist() == [True] * 5 + [False] * 2 + [True] * 2
        cut = replace(item, patch_digests=item.patch_digests[:3], grid_thw=(3, 2, 4), offsets=((1, 7),))
        assert radix_key(prompt[:7], inputs(cut), table).tolist() == key[:7].tolist()


def test_what_could_be_mistaken_is_refused():
    with pytest.raises(ValueError, match="-7"):
        radix_key(np.array([1, -7]), None, MediaKeyTable())
    for offsets in (((14, 22),), ((-1, 7),), ((12, 4),)):
        with pytest.raises(ValueError, match="outside"):
            radix_key(PROMPT, inputs(replace(ITEM, offsets=offsets)), MediaKeyTable())
