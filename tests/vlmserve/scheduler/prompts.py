"""Prompts of text, pictures and clips, and what the fake worker must answer."""

from __future__ import annotations

import numpy as np

from processors.inputs import Modality, MultimodalDataItem, MultimodalInputs
from tests.vision.fake_backend import mark
from tests.vlmserve.scheduler import fake_worker as fake
from tests.vlmserve.scheduler.fake_grammars import FakeMatcher
from vlmserve.ipc.messages import SamplingParams, TokenizedGenerateReqInput


def request(rid: str, ids: list[int], media: list[tuple[int, int, bytes]] = (), new: int = 8, **sampling):
    """media: (start, tokens, content) of a picture, whose ids are replaced by a pad id; a content of several letters
    with dashes between them ("a-b") is a clip of as many temporal patches."""
    ids = list(ids)
    items, delta = [], 0
    positions = np.broadcast_to(np.arange(len(ids)), (3, len(ids))).copy()
    for start, length, content in media:
        ids[start : start + length] = [7] * length
        feature = np.zeros((length * 4, 1), np.float32)
        parts = content.split(b"-")
        each = length // len(parts)
        items.append(
            MultimodalDataItem(
                modality=Modality.IMAGE if len(parts) == 1 else Modality.VIDEO,
                digest=content.ljust(32, b"."),
                patch_digests=tuple((each.to_bytes(2) + part).ljust(32, b",") for part in parts),
                grid_thw=(len(parts), 2, 2 * each),
                offsets=((start, start + length),),
                feature=feature,
            )
        )
        positions[1, start : start + length] = start  # any rule will do, as long as it is kept
        delta -= 1
    mm = MultimodalInputs(items=tuple(items), mrope_positions=positions, mrope_position_delta=delta) if items else None
    params = SamplingParams(max_new_tokens=new, **sampling)
    return TokenizedGenerateReqInput(
        rid=rid, input_ids=np.array(ids, dtype=np.int64), sampling_params=params, mm_inputs=mm
    )


def item(content: bytes, each: int = 2) -> MultimodalDataItem:
    """The same as a request's of that content has, with `each` rows a temporal patch."""
    rows = each * len(content.split(b"-"))
    (made,) = request("", [0] * (rows + 2), [(1, rows, content)]).mm_inputs.items
    return made


def prompt_of(message) -> list[tuple]:
    """[(what, position), ...], as the fake worker has it in its slots."""
    what = [("id", int(i)) for i in message.input_ids]
    mm = message.mm_inputs
    for item in mm.items if mm else ():
        for start, end in item.offsets:
            each = (end - start) // len(item.patch_digests)
            for k in range(end - start):
                what[start + k] = ("media", mark(item.patch_digests[k // each]), k % each)
    places = mm.mrope_positions if mm else np.broadcast_to(np.arange(len(what)), (3, len(what)))
    return [(w, tuple(places[:, i].tolist())) for i, w in enumerate(what)]


class Foresight:
    """A drafter that knows the answers to `messages` (rid -> message), and says wrong ones now and then."""

    def __init__(self, messages: dict, most: int) -> None:
        self._messages, self._most = messages, most

    def propose(self, req) -> tuple[int, ...]:
        made = len(req.output_ids)
        drafts = expected(self._messages[req.rid])[made : made + self._most]
        wrong = (made + req.arrival) % (self._most + 2)
        return tuple((token + (at == wrong)) % fake.VOCAB for at, token in enumerate(drafts))


def expected(message) -> list[int]:
    delta = message.mm_inputs.mrope_position_delta if message.mm_inputs else 0
    params = message.sampling_params
    matcher = None if params.grammar is None else FakeMatcher(params.grammar)
    return fake.answer(prompt_of(message), params.max_new_tokens, delta, matcher)
