"""Videos through the whole engine, offline: every family answers as `transformers` does, wherever chunks are cut."""

import io
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from PIL import Image

from tests.processors.clips import jpeg, make_clip
from tests.tiny_checkpoints import FAMILIES
from tests.vlmserve.reference import assert_equal_answers, known, over, picture
from vlmserve import LLM, SamplingOverrides

NEW = 12
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
# transformers' form of the prompt, to compare with transformers
THEIRS = {"video_reference": "transformers", "num_threads": 1}


def video(data, **knobs):
    return {"type": "video", "video": data, **knobs}


def ask(*parts):
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


def conversations():
    short, other = make_clip(25), make_clip(14, fps=5, width=84, height=140, first=30)
    still = {"type": "image", "image": picture(1, 96, 64)}
    return [
        ask(video(short), "What happens?"),
        ask("Look:", video(other), still, "Compare."),
        ask(still, video(short), video(other), "Which is longer?"),
        [*ask(video(other), "What is this?"), {"role": "assistant", "content": "A disc."}, *ask("And this?", still)],
        ask(video(make_clip(50, fps=5, width=60, height=60)), "How long is it?"),
    ]


SETTINGS = [
    {},
    {"chunked_prefill_size": 16, "page_size": 1},
    {"chunked_prefill_size": 16, "page_size": 16, "enable_mixed_chunk": True},
    {"chunked_prefill_size": 64, "encoder_cache_mib": 0, "encoder_max_patches": 48, "disable_radix_cache": True},
]
OFTEN = "qwen3_vl"
by_any = pytest.mark.parametrize("family", [OFTEN], indirect=True)


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    return known(request.param, tmp_path_factory.mktemp(request.param), conversations(), NEW)


@over(FAMILIES, SETTINGS, [OFTEN])
def test_equals_transformers(family, settings):
    folder, asked, wanted = family
    with LLM(str(folder), **THEIRS, **settings) as llm:
        for _ in range(2):  # the second time with warm caches
            for got, want in zip(llm.chat_batch(asked, GREEDY, num_logprobs=2), wanted, strict=True):
                assert_equal_answers(got, want)
        stats = llm.stats()
        assert stats.kv_free_tokens + stats.kv_cached_tokens == stats.kv_total_tokens


@by_any
def test_speed_is_part_of_what_is_reused(family):
    """Frames that are equal, at another rate: nothing behind the video's beginning may come from the cache."""
    folder, _, _ = family
    frames = [Image.open(io.BytesIO(jpeg(i))) for i in range(8)]
    with LLM(str(folder), num_threads=1, page_size=1) as llm:
        first = llm.chat(ask("See", video(frames, sample_fps=2), "What?"), GREEDY)
        again = llm.chat(ask("See", video(frames, sample_fps=2), "What?"), GREEDY)
        slower = llm.chat(ask("See", video(frames, sample_fps=0.5), "What?"), GREEDY)
    assert again.cached_tokens >= first.prompt_tokens - 1
    assert again.token_ids == first.token_ids
    assert slower.cached_tokens < first.prompt_tokens // 2
    with LLM(str(folder), num_threads=1, page_size=1) as llm:
        assert llm.chat(ask("See", video(frames, sample_fps=0.5), "What?"), GREEDY).token_ids == slower.token_ids


@by_any
def test_sources_of_a_video(family, tmp_path):
    """A path, bytes, a data: URL, frames in any form: equal content, equal answers."""
    import base64

    folder, _, _ = family
    data = make_clip(12)
    (tmp_path / "clip.mp4").write_bytes(data)
    text = base64.b64encode(data).decode()
    jpegs = [jpeg(i) for i in range(4)]
    urls = ["data:image/jpeg;base64," + base64.b64encode(one).decode() for one in jpegs]
    joined = "data:video/jpeg;base64," + ",".join(url.split(",")[1] for url in urls)
    pictures = [Image.open(io.BytesIO(one)) for one in jpegs]
    arrays = [np.asarray(picture) for picture in pictures]
    with LLM(str(folder), num_threads=1) as llm:
        for equal in (
            [
                video(data),
                video(tmp_path / "clip.mp4"),
                {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{text}"}},
                {"type": "video_url", "video_url": f"data:video/mp4;base64,{text}"},
            ],
            [video(jpegs), video(urls), video(joined), video(pictures), video(arrays), video(np.stack(arrays))],
        ):
            answers = [llm.chat(ask(part, "What?"), GREEDY) for part in equal]
            assert len({answer.token_ids for answer in answers}) == 1
            assert len({answer.prompt_tokens for answer in answers}) == 1


@by_any
def test_settings_and_fields_reach_the_frames(family):
    folder, _, _ = family
    data = make_clip(80, fps=10)
    with ExitStack() as llms:

        @cache
        def llm_of(**settings):
            return llms.enter_context(LLM(str(folder), num_threads=1, **settings))

        def tokens(settings, **knobs):
            asked = ask(video(data, **knobs), "?")
            return llm_of(**settings).chat(asked, replace(GREEDY, max_new_tokens=1)).prompt_tokens

        default = tokens({})
        assert tokens({}, fps=1) == tokens({"video_fps": 1.0}) < default
        assert tokens({}, nframes=4) == tokens({"max_video_frames": 4}) < tokens({"video_fps": 1.0})
        assert tokens({}, max_pixels=4 * 32 * 32) == tokens({"max_pixels": 4 * 32 * 32}) < default
        assert tokens({"max_video_frames": 4}, max_frames=5) == tokens({"max_video_frames": 4})
