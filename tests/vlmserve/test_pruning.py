"""Fewer tokens, through the whole engine: every family answers as `transformers` does with the same tokens left out,
wherever chunks are cut, whatever is cached and wherever the tower runs."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from PIL import Image

from tests.tiny_checkpoints import FAMILIES, HYBRID, make_checkpoint
from tests.vlmserve.pruned_reference import PrunedReference
from tests.vlmserve.reference import assert_equal_answers, over
from vlmserve import LLM, SamplingOverrides

NEW = 6
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
THEIRS = {"video_reference": "transformers", "num_threads": 1}
RATE = 0.6
SETTINGS = [
    {},
    {"chunked_prefill_size": 16, "page_size": 1},
    {"chunked_prefill_size": 16, "page_size": 16, "enable_mixed_chunk": True, "encoder_dp_size": 1},
    {"chunked_prefill_size": 64, "encoder_cache_mib": 0, "encoder_max_patches": 48, "disable_radix_cache": True},
    {"tp_size": 2, "chunked_prefill_size": 48},
]
OFTEN = "qwen3_vl"


def page(width: int = 224, height: int = 168) -> Image.Image:
    """Paper with a line of ink: most of it is blank."""
    pixels = np.full((height, width, 3), 255, np.uint8)
    rng = np.random.default_rng(3)
    pixels[12:24, 20 : width - 40] = rng.integers(0, 256, (12, width - 60, 3))
    return Image.fromarray(pixels)


def screen(frames: int = 10, side: int = 112) -> bytes:
    """A clip, without loss, of a screen on which a block moves; its background stays, and most of it is blank."""
    import io

    import av

    file = io.BytesIO()
    ground = np.random.default_rng(5).integers(0, 200, (side, side, 3), dtype=np.uint8)
    ground[side // 4 :, side // 4 :] = 255
    with av.open(file, "w", format="mp4") as box:
        stream = box.add_stream("libx264rgb", rate=2, options={"crf": "0"})
        stream.width = stream.height = side
        stream.pix_fmt = "rgb24"
        for number in range(frames):
            picture = ground.copy()
            picture[:26, number // 2 * 20 : number // 2 * 20 + 30] = (255, 20 * number, 0)
            box.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        box.mux(stream.encode())
    return file.getvalue()


def ask(part: dict, text: str = "What is this?") -> list[dict]:
    return [{"role": "user", "content": [{"type": "text", "text": "Look:"}, part, {"type": "text", "text": text}]}]


@cache
def asked() -> list[tuple[list[dict], float]]:
    picture, clip = {"type": "image", "image": page()}, {"type": "video", "video": screen()}
    return [(ask(picture), 0.0), (ask(clip), 0.0), (ask(clip), RATE)]


def kwargs(rate: float) -> dict:
    return {"video_pruning_rate": rate} if rate else {"skip_repeats": True}


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    reference = PrunedReference(folder)
    found = [(reference.pruned(messages, NEW, rate), reference.tokens) for messages, rate in asked()]
    return folder, found


@over([*FAMILIES, HYBRID], SETTINGS, [OFTEN])
def test_equals_transformers(family, settings):
    folder, wanted = family
    with LLM(str(folder), **THEIRS, **settings) as llm:
        for _ in range(2):  # the second time with warm caches
            for (messages, rate), (want, tokens) in zip(asked(), wanted, strict=True):
                got = llm.chat(messages, GREEDY, num_logprobs=2, mm_processor_kwargs=kwargs(rate))
                assert_equal_answers(got, want)
                [medium] = got.mm_report["media"]
                left = medium["pruning"]["repeats"] + medium["pruning"]["unchanged"]
                assert medium["tokens"] == tokens == sum(medium["pruning"]["tokens_of_patches"])
                assert left > tokens / 8
                assert medium["pruning"]["before_tower"] if medium["kind"] == "image" else left
                assert left + tokens == np.prod(medium["grid_thw"]) // 4
        stats = llm.stats()
        assert stats.kv_free_tokens + stats.kv_cached_tokens == stats.kv_total_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(OFTEN, tmp_path_factory.mktemp(OFTEN))


def many() -> list[tuple[list[dict], dict]]:
    """Questions about the same media, whole and with fewer tokens, in no order."""
    texts = ("What is this?", "How many circles are there?", "Name the colours.")
    plain = [(messages, {}) for messages, _ in asked()]
    return [
        (ask(messages[0]["content"][1], text), knobs)
        for text in texts
        for messages, knobs in [*plain[:2], *((messages, kwargs(rate)) for messages, rate in asked())]
    ]


def with_knobs(messages: list[dict], knobs: dict) -> list[dict]:
    """The knobs as fields of the part."""
    first, part, last = messages[0]["content"]
    return [{"role": "user", "content": [first, {**part, **knobs}, last]}]


def test_together_as_alone_and_after_retraction(folder):
    """Whole and pruned media share one cache and one batch, and take slots from each other."""
    long = SamplingOverrides(temperature=0.0, max_new_tokens=48)  # with ignore_eos nothing is ever retracted
    room = {"max_total_tokens": 288, "page_size": 4, "schedule_conservativeness": 0.01}
    questions = [with_knobs(messages, knobs) for messages, knobs in many()]
    with LLM(str(folder), num_threads=1, disable_radix_cache=True) as llm:
        alone = [llm.chat(one, long) for one in questions]
    with LLM(str(folder), num_threads=1, chunked_prefill_size=32, **room) as llm:
        together = llm.chat_batch(questions, long)
        assert llm.stats().retracted_total
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.prompt_tokens for one in together] == [one.prompt_tokens for one in alone]


def test_a_setting_is_the_default_of_requests(folder):
    picture, clip = (messages[0]["content"][1] for messages, _ in asked()[:2])
    with LLM(str(folder), num_threads=1) as llm:
        whole = [llm.chat(ask(part), GREEDY) for part in (picture, clip)]
        asks = [llm.chat(ask({**clip, "video_pruning_rate": 0.5}), GREEDY)]
        asks += [llm.chat(ask({**picture, "skip_repeats": True}), GREEDY)]
        zero = llm.chat(ask({**clip, "video_pruning_rate": 0, "skip_repeats": False}), GREEDY, num_logprobs=1)
        again = llm.chat(ask(clip), GREEDY, num_logprobs=1)
    assert zero.logprobs == again.logprobs
    with LLM(str(folder), num_threads=1, skip_repeats=True, video_pruning_rate=0.5) as llm:
        assert llm.chat(ask(clip), GREEDY).token_ids == asks[0].token_ids
        off = {"skip_repeats": False, "video_pruning_rate": 0}
        assert llm.chat(ask(clip), GREEDY, mm_processor_kwargs=off).token_ids == whole[1].token_ids
        skipped = llm.chat(ask(picture), GREEDY)
    assert skipped.prompt_tokens == asks[1].prompt_tokens < whole[0].prompt_tokens


def test_a_prefix_is_shared_with_equal_tokens_left_out_alone(folder):
    clip = asked()[1][0][0]["content"][1]
    with LLM(str(folder), num_threads=1, page_size=1) as llm:
        first = llm.chat(ask({**clip, "video_pruning_rate": 0.5}), GREEDY)
        again = llm.chat(ask({**clip, "video_pruning_rate": 0.5}), GREEDY)
        others = [llm.chat(ask({**clip, **knobs}), GREEDY) for knobs in ({}, {"video_pruning_rate": 0.4})]
        assert llm.stats().encoder.encoded == 5, "one for each temporal patch, whatever stays of its embeddings"
        others += [llm.chat(ask({**clip, "skip_repeats": True}), GREEDY)]
        assert llm.stats().encoder.encoded == 5, "what stands still is encoded, too"
    assert again.cached_tokens >= first.prompt_tokens - 1
    assert again.token_ids == first.token_ids
    assert all(other.cached_tokens < 40 for other in others), "more than the text before the clip"
