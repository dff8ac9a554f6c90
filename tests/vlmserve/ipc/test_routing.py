"""What a message asks of a replica."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from processors.inputs import Modality, MultimodalDataItem, MultimodalInputs
from vlmserve.ipc.messages import (
    BatchTokenizedGenerateReqInput,
    EncodeReqInput,
    InputEmbeds,
    SamplingParams,
    TokenizedGenerateReqInput,
)
from vlmserve.ipc.routing import demand_of, parts_of, prefix_keys
from vlmserve.routing.replicas import BLOCK_TOKENS


def request(rid: str = "r", length: int = 100, **fields) -> TokenizedGenerateReqInput:
    made = TokenizedGenerateReqInput(
        rid=rid, input_ids=np.arange(length, dtype=np.int64), sampling_params=SamplingParams(max_new_tokens=8)
    )
    return replace(made, **fields)


def picture(digest: bytes, start: int = 40, tokens: int = 30) -> MultimodalInputs:
    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        digest=digest,
        patch_digests=(digest,),
        grid_thw=(1, 4, tokens),
        offsets=((start, start + tokens),),
        feature=np.zeros((0, 0), np.uint8),
    )
    return MultimodalInputs(items=(item,), mrope_positions=np.zeros((3, 100), np.int64), mrope_position_delta=0)


def common(one: TokenizedGenerateReqInput, other: TokenizedGenerateReqInput) -> int:
    same = [a == b for a, b in zip(prefix_keys(one), prefix_keys(other), strict=True)]
    assert same == sorted(same, reverse=True), "once apart, always apart"
    return sum(same)


def test_keys_are_equal_for_as_long_as_prompts_are():
    blocks = 100 // BLOCK_TOKENS
    assert len(set(prefix_keys(request()))) == blocks == 3
    assert common(request(), request()) == blocks
    changed = np.arange(100)
    changed[BLOCK_TOKENS] = 7
    assert common(request(), request(input_ids=changed)) == 1
    assert common(request(), request(cache_salt="tenant")) == 0
    assert common(request(mm_inputs=picture(b"a")), request(mm_inputs=picture(b"a"))) == blocks
    assert common(request(mm_inputs=picture(b"a")), request(mm_inputs=picture(b"b"))) == 40 // BLOCK_TOKENS
    assert list(prefix_keys(request(length=BLOCK_TOKENS - 1))) == []


def test_prompts_of_embeddings_go_by_their_digests():
    def of(digests: np.ndarray) -> TokenizedGenerateReqInput:
        rows = InputEmbeds(rows=np.zeros((100, 4), np.float32), digests=digests)
        return request(input_ids=np.zeros(100, np.int64), input_embeds=rows)

    one = np.arange(3200).astype(np.uint8).reshape(100, 32)
    other = one.copy()
    other[-10] += 1
    assert common(of(one), of(one)) == 3
    assert common(of(one), of(other)) == 2


def test_answers_to_one_prompt_are_one_part_and_other_prompts_others():
    requests = [request(f"{group}-{n}", group=group, data_parallel_rank=1) for group in "ab" for n in range(2)]
    wanted = list(map(demand_of, parts_of(BatchTokenizedGenerateReqInput(requests=tuple(requests)))))
    assert [demand.rids for demand in wanted] == [("a-0", "a-1"), ("b-0", "b-1")]
    assert {(demand.tokens, demand.answer, demand.replica) for demand in wanted} == {(100, 16, 1)}
    whole = BatchTokenizedGenerateReqInput(requests=tuple(requests[:2]))
    [part] = parts_of(whole)
    assert part is whole


@pytest.mark.parametrize(("limit", "answer"), [(0, 0), (10, 10), (10**6, 256), (None, 256)])
def test_answers_are_guessed(limit: int | None, answer: int):
    assert demand_of(request(sampling_params=SamplingParams(max_new_tokens=limit))).answer == answer


def test_media_count_twice_for_tower_and_model():
    demand = demand_of(request(mm_inputs=picture(b"a"), session_id="s"))
    assert (demand.media, demand.work, demand.session) == (((b"a", 30),), 130, "s")
    items = picture(b"a").items
    demand = demand_of(EncodeReqInput(rid="w", items=items))
    assert (demand.rids, demand.media, demand.work) == (("w",), ((b"a", 30),), 30)
