"""`--resize-device`: wherever pictures are resized, answers are the same to the last bit."""

from __future__ import annotations

from typing import Any

from processors.pool.maker import DirectMaker
from tests.processors.clips import make_clip
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import conversations
from vlmserve import LLM, SamplingOverrides

GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=6, ignore_eos=True)
VIDEO = {"type": "video", "video": make_clip(5, width=113, height=85, fps=2)}
CLIP = [{"role": "user", "content": [VIDEO, {"type": "text", "text": "What is this?"}]}]


def answers(llm: LLM) -> list[tuple[list[int], list[float]]]:
    asked = [*conversations()[1:], CLIP]
    return [
        (answer.token_ids, [one.logprob for one in answer.logprobs])
        for answer in llm.chat_batch(asked, GREEDY, num_logprobs=1)
    ]


def test_answers_are_those_of_the_cpu(tmp_path, monkeypatch):
    folder = str(make_checkpoint("qwen3_vl", tmp_path))
    settings: dict[str, Any] = {"num_threads": 1, "max_total_tokens": 4096}
    later: list[bool] = []
    monkeypatch.setattr(DirectMaker, "make", _noting(DirectMaker.make, later))
    with LLM(folder, **settings) as llm:
        wanted = answers(llm)
    assert not any(later)
    for more in ({}, {"encoder_dp_size": 1}, {"media_processes": 0, "encoder_cache_mib": 0}):
        later.clear()
        with LLM(folder, resize_device="model", **settings, **more) as llm:
            assert answers(llm) == wanted
            assert any(later)
            llm.flush_cache()
            assert answers(llm) == wanted, "of embeddings that are there"


def _noting(make: Any, later: list[bool]) -> Any:
    def made(*args: Any) -> Any:
        medium = make(*args)
        later.append(medium.resizing is not None)
        return medium

    return made
