"""Knobs through the whole engine: answers are transformers' with the same processor kwargs, whatever is cached."""

from __future__ import annotations

from typing import Any

import pytest

from processors.pool.maker import DirectMaker
from tests.processors.clips import make_clip
from tests.processors.helpers import encoded
from tests.tiny_checkpoints import FAMILIES, make_checkpoint
from tests.vlmserve.reference import Reference, assert_equal_answers, conversations, picture
from vlmserve import LLM, SamplingOverrides

NEW = 8
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
IMAGE, CLIP = picture(5, 300, 200), make_clip(30, width=200, height=120)
# areas are in tokens here
KWARGS = [
    {},
    {"min_pixels": 4, "max_pixels": 9},
    {"size": {"shortest_edge": 4, "longest_edge": 30}},
    {"fps": 5},
    {"fps": None, "num_frames": 8},
]


def ask(image, clip, **knobs):
    """knobs: of the picture's part."""
    parts = [{"type": "image", "image": image, **knobs}, {"type": "video", "video": clip}]
    return [{"role": "user", "content": [{"type": "text", "text": "Look:"}, *parts, {"type": "text", "text": "What?"}]}]


def scaled(kwargs, area):
    if not isinstance(kwargs, dict):
        return kwargs
    areas = ("min_pixels", "max_pixels", "shortest_edge", "longest_edge")
    return {k: v * area if k in areas else scaled(v, area) for k, v in kwargs.items()}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A checkpoint, a token's area, and what transformers answers for each of KWARGS."""
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    reference = Reference(folder)
    area = (32 if request.param == "qwen3_vl" else 28) ** 2
    kwargs = [scaled(one, area) for one in KWARGS]
    return folder, area, [(one, reference.answer(ask(IMAGE, CLIP), NEW, **one)) for one in kwargs]


def test_equals_transformers_and_caches_never_mix_knobs(family):
    """One engine, the same files all the time: processor cache, embedding cache and prefix cache are warm."""
    folder, area, wanted = family
    assert len({(want.prompt_tokens, tuple(want.logprobs)) for _, want in wanted}) == len(wanted)
    data = encoded(IMAGE)
    with LLM(str(folder), num_threads=1, page_size=1, max_pixels=10**6, video_reference="transformers") as llm:
        for again in (False, True):
            for kwargs, want in wanted:
                got = llm.chat(ask(data, CLIP), GREEDY, num_logprobs=1, mm_processor_kwargs=kwargs)
                assert_equal_answers(got, want)
                image, video = got.mm_report["media"]
                pads = image["tokens"] + video["tokens"]
                assert pads < want.prompt_tokens
                if again:
                    assert got.cached_tokens >= want.prompt_tokens - 1
                else:
                    # Another size of the picture shares nothing from it on; of the video alone, the picture.
                    assert got.cached_tokens < want.prompt_tokens - video["tokens"]
        # what a part says is the same picture as what the request says of all
        (kwargs, want), small = wanted[1], {"min_pixels": 4 * area, "max_pixels": 9 * area}
        of_videos = {"videos_kwargs": kwargs}
        got = llm.chat(ask(data, CLIP, **small), GREEDY, num_logprobs=1, mm_processor_kwargs=of_videos)
        assert_equal_answers(got, want)
        assert got.cached_tokens >= want.prompt_tokens - 1
        stats = llm.stats()
        assert stats.kv_free_tokens + stats.kv_cached_tokens == stats.kv_total_tokens


# ---- wherever pictures are resized

SHORT = SamplingOverrides(temperature=0.0, max_new_tokens=6, ignore_eos=True)
VIDEO = {"type": "video", "video": make_clip(5, width=113, height=85, fps=2)}
ASKED = [{"role": "user", "content": [VIDEO, {"type": "text", "text": "What is this?"}]}]


def answers(llm: LLM) -> list[tuple[list[int], list[float]]]:
    asked = [*conversations()[1:], ASKED]
    return [
        (answer.token_ids, [one.logprob for one in answer.logprobs])
        for answer in llm.chat_batch(asked, SHORT, num_logprobs=1)
    ]


def test_answers_are_those_of_the_cpu_to_the_last_bit(tmp_path, monkeypatch):
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
