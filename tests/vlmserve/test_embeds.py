"""Pictures that come encoded: the same answers as for the pictures, whoever encoded them and whatever cuts."""

from __future__ import annotations

import asyncio

import pytest
import torch
from safetensors.torch import save

from tests.processors.clips import make_clip
from tests.processors.helpers import values
from tests.tiny_checkpoints import FAMILIES, make_checkpoint
from tests.vlmserve.reference import Reference, ask, picture
from vlmserve import LLM, SamplingOverrides
from vlmserve.frontend.chat_messages import ImageRef, VideoRef

GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=10, ignore_eos=True)
PICTURES = (picture(1, 96, 64), picture(2, 77, 131))


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def our_rows(llm, image):
    """What the engine's own tower makes of a picture: rows, DeepStack ones behind the main ones, and the grid."""
    (item,) = asyncio.run(llm._media.load([ImageRef(source=image, param="p")]))
    with torch.inference_mode():
        rows = llm._runner.model.visual(torch.from_numpy(values(item)), [item.grid_thw])
    return {"image_embeds": rows.clone(), "image_grid_thw": torch.tensor([item.grid_thw])}


def their_rows(reference, image):
    """What transformers' tower makes of it, in its own layout."""
    inputs = reference.processor.image_processor(images=[image], return_tensors="pt")
    with torch.no_grad():
        out = reference.model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
    rows = {"image_embeds": out.pooler_output, "image_grid_thw": inputs["image_grid_thw"]}
    deepstack = getattr(out, "deepstack_features", None)
    return rows | ({"deepstack_embeds": torch.stack(list(deepstack))} if deepstack else {})


def encoded(tensors):
    return {"type": "image_embeds", "image_embeds": tensors}


def with_parts(*parts):
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": parts}]


def assert_same(got, want):
    assert got.prompt_tokens == want.prompt_tokens
    assert got.token_ids == want.token_ids
    for one, other in zip(got.logprobs, want.logprobs, strict=True):
        assert abs(one.logprob - other.logprob) < 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunked_prefill_size": 8, "page_size": 1, "encoder_cache_mib": 0},
        {"speculative_algorithm": "draft_model", "speculative_num_draft_tokens": 2},  # which has a tower of its own
    ],
)
def test_the_towers_rows_answer_like_the_picture(folder, settings):
    a, b = PICTURES
    if "speculative_algorithm" in settings:
        settings = {**settings, "speculative_draft_model_path": str(folder)}
    with LLM(str(folder), num_threads=1, enable_mm_embeds=True, **settings) as llm:
        wanted = llm.chat_batch([ask(a, "What is this?"), ask("Look:", a, b, "Which?")], GREEDY, num_logprobs=0)
        tensors = [our_rows(llm, image) for image in PICTURES]
        llm.flush_cache()
        before = llm.stats().encoder.encoded
        asked = [
            with_parts(encoded(tensors[0]), "What is this?"),
            with_parts("Look:", encoded(tensors[0]), encoded(save(tensors[1])), "Which?"),
        ]
        for got, want in zip(llm.chat_batch(asked, GREEDY, num_logprobs=0), wanted, strict=True):
            assert_same(got, want)
        assert llm.stats().encoder.encoded == before, "no tower has run"
        mixed = with_parts("Look:", encoded(tensors[0]), {"type": "image", "image": b}, "Which?")
        assert_same(llm.chat(mixed, GREEDY, num_logprobs=0), wanted[1])


def test_a_videos_rows_answer_like_the_video(folder):
    clip = make_clip(25)
    with LLM(str(folder), num_threads=1, enable_mm_embeds=True, page_size=1) as llm:
        want = llm.chat(with_parts("See:", {"type": "video", "video": clip}, "What?"), GREEDY, num_logprobs=0)
        (item,) = asyncio.run(llm._media.load([VideoRef(source=clip, param="p")]))
        with torch.inference_mode():
            rows = llm._runner.model.visual(torch.from_numpy(values(item)), [item.grid_thw])
        tensors = {
            "video_embeds": rows.clone(),
            "video_grid_thw": torch.tensor([item.grid_thw]),
            "second_per_grid_ts": torch.tensor([item.second_per_grid_t], dtype=torch.float64),
            "timestamps": torch.tensor(item.patch_times, dtype=torch.float64),
        }
        before = llm.stats().encoder.encoded
        for source in (tensors, save(tensors)):
            part = {"type": "video_embeds", "video_embeds": source}
            got = llm.chat(with_parts("See:", part, "What?"), GREEDY, num_logprobs=0)
            assert_same(got, want)
        assert got.cached_tokens == got.prompt_tokens - 1, "equal rows share their prefix"
        assert llm.stats().encoder.encoded == before, "no tower has run"


def test_rows_of_transformers_answer_like_transformers(folder):
    reference = Reference(folder)
    image = PICTURES[1]
    want = reference.answer(ask(image, "What is this?"), 10)
    with LLM(str(folder), num_threads=1, enable_mm_embeds=True) as llm:
        got = llm.chat(with_parts(encoded(their_rows(reference, image)), "What is this?"), GREEDY, num_logprobs=0)
        assert list(got.token_ids) == want.token_ids
        assert got.prompt_tokens == want.prompt_tokens
        assert max(abs(g.logprob - w) for g, w in zip(got.logprobs, want.logprobs, strict=True)) < 1e-4
        assert llm.stats().encoder.encoded == 0


def test_ways_to_give_them_and_prefixes(folder, tmp_path):
    with LLM(str(folder), num_threads=1, enable_mm_embeds=True, page_size=1) as llm:
        tensors = our_rows(llm, PICTURES[0])
        data = save(tensors)
        path = tmp_path / "rows.safetensors"
        path.write_bytes(data)
        want = llm.chat(with_parts(encoded(tensors), "What is this?"), GREEDY, num_logprobs=0)
        for source in (
            data,
            path,
            {name: tensor.numpy() for name, tensor in tensors.items()},
            {**tensors, "image_grid_thw": tensors["image_grid_thw"].int().flatten()},
        ):
            again = llm.chat(with_parts(encoded(source), "What is this?"), GREEDY, num_logprobs=0)
            assert_same(again, want)
            assert again.cached_tokens == want.prompt_tokens - 1, "equal rows share their prefix"
        other = {**tensors, "image_embeds": tensors["image_embeds"].clone()}
        other["image_embeds"][-1, -1] += 0.5
        changed = llm.chat(with_parts(encoded(other), "What is this?"), GREEDY, num_logprobs=0)
        assert 0 < changed.cached_tokens < want.prompt_tokens - len(other["image_embeds"])
        assert any(abs(a.logprob - b.logprob) > 1e-5 for a, b in zip(changed.logprobs, want.logprobs, strict=True))
        pictures = llm.chat(ask(PICTURES[0], "What is this?"), GREEDY, num_logprobs=0)
        assert pictures.cached_tokens == changed.cached_tokens, "a picture's own rows are another's to the cache"


def test_16_bit_rows(folder):
    with LLM(str(folder), num_threads=1, enable_mm_embeds=True) as llm:
        tensors = our_rows(llm, PICTURES[0])
        for dtype in (torch.bfloat16, torch.float16):
            rounded = {**tensors, "image_embeds": tensors["image_embeds"].to(dtype)}
            exact = {**tensors, "image_embeds": tensors["image_embeds"].to(dtype).float()}
            got, want = (
                llm.chat(with_parts(encoded(save(given)), "What?"), GREEDY, num_logprobs=0)
                for given in (rounded, exact)
            )
            assert_same(got, want)
