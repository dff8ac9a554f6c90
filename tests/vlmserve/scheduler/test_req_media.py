"""Which tokens of a prompt take which embeddings, what a request holds meanwhile, and how clients take turns at the
encoder."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from processors.inputs import Modality, MultimodalDataItem, MultimodalInputs
from tests.vision.fake_backend import FakeBackend, make_pool, mark
from vision.change import most_changed
from vlmserve.scheduler import req_media
from vlmserve.scheduler.req_media import FairOrder, ReqMedia, patch_spans


def item(digests: list[str], *offsets: tuple[int, int]) -> MultimodalDataItem:
    """As many temporal patches as digests, of equally many tokens."""
    tokens = sum(end - start for start, end in offsets)
    return MultimodalDataItem(
        modality=Modality.IMAGE if len(digests) == 1 else Modality.VIDEO,
        digest="-".join(digests).encode().ljust(32, b"."),
        patch_digests=tuple(name.encode().ljust(32, b".") for name in digests),
        grid_thw=(len(digests), 2, 2 * tokens // len(digests)),
        offsets=offsets,
        feature=np.zeros((4 * tokens, 1), np.float32),
    )


def media(*items: MultimodalDataItem) -> MultimodalInputs:
    return MultimodalInputs(items=items, mrope_positions=np.zeros((3, 0), np.int64), mrope_position_delta=0)


@pytest.mark.parametrize(
    ("items", "spans"),
    [
        ([], []),
        ([item(["a", "b"], (2, 5), (9, 12))], [(2, 5, "a", 0), (9, 12, "b", 0)]),
        (
            [item(["a", "b"], (0, 1), (3, 6), (8, 10))],
            [(0, 1, "a", 0), (3, 5, "a", 1), (5, 6, "b", 0), (8, 10, "b", 1)],
        ),
        (
            [item(["a"], (0, 2)), item(["b", "c"], (4, 8)), item(["a"], (9, 11))],
            [(0, 2, "a", 0), (4, 6, "b", 0), (6, 8, "c", 0), (9, 11, "a", 0)],
        ),
    ],
)
def test_where_temporal_patches_stand_in_a_prompt(items, spans):
    found = patch_spans(media(*items))
    assert [(span.start, span.end, chr(span.patch.digest[0]), span.offset) for span in found] == spans


class Rig:
    """One request with: text 0-2, picture a 2-5, text, clip b|c 7-9|9-11, picture a again 12-15, text."""

    def __init__(self, *, inline: bool = True, space_rows: int = 1000) -> None:
        self.backend = FakeBackend(inline=inline)
        self.pool = make_pool(self.backend, space_rows=space_rows, cache_rows=0)
        inputs = media(item(["a"], (2, 5)), item(["b", "c"], (7, 11)), item(["a"], (12, 15)))
        self.media = ReqMedia(inputs, self.pool, order=4)
        self.keys = {chr(span.patch.digest[0]): self.pool.key(span.patch) for span in patch_spans(inputs)}

    def encode(self) -> None:
        while self.pool.advance():
            pass

    def embeds(self, start: int, end: int, at: int = 0) -> list[tuple[int, str, list[int]]]:
        """For each part: its first token in the batch, whose embeddings, and which."""
        found = []
        for part in self.media.embeds(start, end, at=at):
            [whose] = set(part.embeds[:, 0].tolist())
            name = next(name for name in "abc" if mark(name.encode().ljust(32, b".")) == whose)
            found.append((part.token, name, part.embeds[:, 1].tolist()))
        return found

    @property
    def held(self) -> int:
        """Rows in the pool's cache, which keeps only what is held."""
        return len(self.pool.cache.device)


@pytest.fixture
def rig():
    rig = Rig()
    rig.media.hold_from(0)
    rig.encode()
    return rig


def test_embeds_of_a_whole_prompt(rig):
    assert rig.embeds(0, 20, at=100) == [
        (102, "a", [0, 1, 2]),
        (107, "b", [0, 1]),
        (109, "c", [0, 1]),
        (112, "a", [0, 1, 2]),
    ]
    assert rig.backend.encoded() == [name.encode().ljust(32, b".") for name in "abc"]


def test_every_token_gets_its_embedding_however_a_prompt_is_cut(rig):
    whole = [(token + k, name, row) for token, name, rows in rig.embeds(0, 16) for k, row in enumerate(rows)]
    for size in range(1, 16):
        parts = []
        for start in range(0, 16, size):
            rig.media.hold_from(start)
            rows = rig.embeds(start, min(start + size, 16), at=start)
            parts += [(token + k, name, row) for token, name, rows in rows for k, row in enumerate(rows)]
        assert parts == whole, size
        rig.media.hold_from(0)
        rig.encode()


def test_embeds_are_held_from_where_they_are_needed_and_no_further_back(rig):
    held = []
    for start in (0, 4, 5, 8, 9, 10, 11, 14, 15, 16):
        rig.media.hold_from(start)
        held.append(rig.held)
    assert held == [3, 3, 3, 3, 2, 2, 1, 1, 0, 0]
    assert rig.embeds(0, 20) == []
    rig.media.hold_from(9)
    assert rig.media.ready_until() == 9
    rig.encode()
    assert rig.held == 2
    assert rig.embeds(9, 20) == [(0, "c", [0, 1]), (3, "a", [0, 1, 2])]
    rig.media.hold_from(3)
    rig.encode()
    assert rig.embeds(3, 20) == [(0, "a", [1, 2]), (4, "b", [0, 1]), (6, "c", [0, 1]), (9, "a", [0, 1, 2])]
    rig.media.release()
    assert (rig.held, rig.media.ready_until(), rig.embeds(0, 20)) == (0, None, [])
    rig.media.release()
    rig.media.hold_from(0)
    rig.encode()
    assert rig.held == 3


def test_how_far_a_prompt_is_ready():
    rig = Rig(space_rows=5)
    assert (rig.media.ready_until(), rig.media.first_unready()) == (None, None), "nothing is wanted yet"
    rig.media.hold_from(0)
    assert (rig.media.ready_until(), rig.media.first_unready()) == (2, rig.keys["a"])
    rig.encode()
    assert (rig.media.ready_until(), rig.media.first_unready()) == (9, rig.keys["c"])
    rig.media.hold_from(9)
    assert (rig.media.ready_until(), rig.media.first_unready()) == (9, rig.keys["c"])
    rig.encode()
    assert (rig.media.ready_until(), rig.media.first_unready()) == (None, None)


def test_older_requests_and_earlier_parts_of_one_go_first():
    rig = Rig(inline=False, space_rows=3)
    rig.media.hold_from(9)
    older = ReqMedia(media(item(["o"], (0, 1))), rig.pool, order=3)
    rig.media.hold_from(0)
    older.hold_from(0)
    rig.pool.advance()
    assert [chr(digest[0]) for digest in rig.backend.encoded()] == ["o"]
    rig.backend.finish()
    rig.pool.advance()
    older.release()
    rig.pool.advance()
    assert [chr(digest[0]) for digest in rig.backend.encoded()] == ["o", "a"]


class Chosen:
    """Text 0-2, a clip a|b|c of 6 tokens each (2 x 3), of which b keeps 3 and c keeps 2: 2-8|8-11|11-13, text."""

    def __init__(self, space_rows: int = 1000) -> None:
        self.pool = make_pool(FakeBackend(), space_rows=space_rows, cache_rows=0)
        clip = replace(
            item(["a", "b", "c"], (2, 13)), grid_thw=(3, 4, 6), feature=np.zeros((72, 1), np.uint8), counts=(6, 3, 2)
        )
        self.media = ReqMedia(media(clip), self.pool, order=0)

    def advance(self) -> None:
        urgent = self.media.first_unready()
        while self.pool.advance(urgent=urgent):
            urgent = None

    def rows(self, start: int, end: int) -> list[int]:
        return [row for part in self.media.embeds(start, end, at=0) for row in part.embeds[:, 1].tolist()]

    def places(self, start: int, end: int) -> list[tuple[int, int]]:
        """Row and column of each token, if positions begin at 0 in each temporal patch."""
        first = [0] * 2 + [*range(6), 0, 1, 2, 0, 1] + [0] * 3
        given = np.array([[0, at // 3, at % 3] for at in first[start:end]]).T
        _, rows, columns = self.media.place_chosen(given, start)
        return list(zip(rows.tolist(), columns.tolist(), strict=True))


def changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second temporal patch, let the last rows be those that change most; of the third, the first and last."""
    found = {3: [3, 4, 5], 2: [0, 5]}
    monkeypatch.setattr(req_media, "most_changed", lambda embeds, before, count: np.array(found[count]))


def test_tokens_that_are_chosen_have_their_embeddings_and_places(monkeypatch):
    changes(monkeypatch)
    rig = Chosen()
    rig.media.hold_from(0)
    assert rig.media.chooses
    assert rig.places(8, 13) == [(0, 0), (0, 1), (0, 2), (0, 0), (0, 1)], "nothing is known yet"
    rig.advance()
    assert rig.media.ready_until() is None
    assert rig.rows(0, 16) == [*range(6), 3, 4, 5, 0, 5]
    whole = rig.places(0, 16)
    assert whole[2:13] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 0), (1, 1), (1, 2), (0, 0), (1, 2)]
    for size in range(1, 16):
        rig.media.renew(0)
        rig.advance()
        rows, places = [], []
        for start in range(0, 16, size):
            rig.media.hold_from(start)
            rig.advance()
            end = min(start + size, 16)
            places += rig.places(start, end)
            rows += rig.rows(start, end)
        assert (rows, places) == ([*range(6), 3, 4, 5, 0, 5], whole), size


@pytest.mark.parametrize("space_rows", [1000, 12, 6, 1])
@pytest.mark.parametrize("start", range(14))
def test_what_is_compared_with_is_held_until_a_choice_is_made(monkeypatch, start, space_rows):
    """Wherever a cached prefix ends, and however little room there is."""
    changes(monkeypatch)
    rig = Chosen(space_rows)
    at, rows = start, []
    while at < 16:
        rig.media.hold_from(at)
        for _ in range(4):
            rig.advance()
        until = rig.media.ready_until(at)
        end = 16 if until is None else until
        assert end > at, "no progress"
        end = min(end, at + 2)
        rows += rig.rows(at, end)
        at = end
    assert rows == [*range(6), 3, 4, 5, 0, 5][max(0, start - 2) :]
    rig.media.hold_from(16)
    assert len(rig.pool.cache.device) == 0


def test_most_changed():
    before = torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, 0]])
    embeds = torch.tensor([[1.0, 0], [1, 0], [1, 0.9], [0, 2]])
    assert [most_changed(embeds, before, count).tolist() for count in (1, 2, 3, 4)] == [
        [1],
        [1, 3],
        [1, 2, 3],
        [0, 1, 2, 3],
    ]


def test_one_picture_goes_before_most_of_a_flood():
    order = FairOrder()
    flood = [order.tag("flood", 1000, arrival) for arrival in range(100)]
    order.encoded(flood[3])
    one = order.tag("one", 1000, 100)
    assert flood[3] < one < flood[4]


def test_who_was_idle_has_saved_nothing_up():
    order = FairOrder()
    for arrival in range(10):
        order.encoded(order.tag("busy", 500, arrival))
    late = [order.tag("late", 500, 10 + number) for number in range(3)]
    busy = [order.tag("busy", 500, 20 + number) for number in range(3)]
    assert sorted([*late, *busy]) == [late[0], late[1], busy[0], late[2], busy[1], busy[2]]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.booleans()), max_size=60))
def test_tags_are_those_of_one_order_and_a_client_s_rise(requests):
    order, tags = FairOrder(), {}
    waiting = []
    for arrival, (client, patches, served) in enumerate(requests):
        tag = order.tag(client, patches, arrival)
        assert tag not in tags
        assert all(tag > other for other, owner in tags.items() if owner == client)
        tags[tag] = client
        waiting.append(tag)
        if served:
            order.encoded(waiting.pop(waiting.index(min(waiting))))
    assert order.behind_all() > max(tags, default=0)
    assert order.behind_all() not in tags
