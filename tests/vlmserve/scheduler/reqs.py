"""Requests for tests of the scheduler's parts: of text, in any state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.vision.fake_backend import FakeBackend, make_pool
from vlmserve.ipc.messages import SamplingParams, TokenizedGenerateReqInput
from vlmserve.scheduler.req import Req
from vlmserve.scheduler.req_media import ReqMedia
from vlmserve_common.checkpoint.adapter_ref import AdapterRef


def make_req(
    arrival: int,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    new: int = 8,
    client: str = "",
    group: str = "",
    choice: int = 0,
    priority: int = 0,
    ignore_eos: bool = False,
    adapter: str = "",
) -> Req:
    message = TokenizedGenerateReqInput(
        rid=f"r{arrival}",
        input_ids=np.array(prompt, dtype=np.int64),
        sampling_params=SamplingParams(max_new_tokens=new, ignore_eos=ignore_eos),
        client=client,
        group=group,
        choice=choice,
        priority=priority,
        adapter=AdapterRef(digest=adapter, path="", tower=False) if adapter else None,
    )
    return Req(
        message,
        key_ids=message.input_ids,
        media=ReqMedia(None, make_pool(FakeBackend()), order=arrival),
        max_new_tokens=new,
        eos_token_ids=frozenset(),
        arrival=arrival,
    )
