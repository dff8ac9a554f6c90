"""Live video in sessions of the offline engine: frames that come one by one are answered as one prompt is."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from processors.resize import resize_frames
from processors.video.options import VideoKnobs
from tests.tiny_checkpoints import ALL_FAMILIES, HYBRID, make_checkpoint
from tests.vlmserve.reference import SHARED, Answer, Reference, assert_equal_answers, over, picture
from vlmserve import LLM, SamplingOverrides
from vlmserve.frontend import live
from vlmserve.frontend.kept_tokens import kept_places, known_tokens
from vlmserve.frontend.live import FrameClock
from vlmserve.frontend.requests import ChatPrompt, GenerateReqInput
from vlmserve_common.errors import BadRequestError

NEW = 8
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
SETTINGS = [
    {},
    {"chunked_prefill_size": 16, "page_size": 1},
    {"chunked_prefill_size": 16, "page_size": 16, "enable_mixed_chunk": True},
    {"disable_radix_cache": True},
    # room for little more than one conversation
    {"max_total_tokens": 512, "page_size": 4, "schedule_conservativeness": 0.01},
]
FPS = 2.0
FRAMES = [picture(seed, 90, 60) for seed in range(9)]
QUESTION = "What has changed?"


class LiveReference(Reference):
    """What transformers answers about frames that have their size already."""

    def _inputs(self, messages, *, frames, first):
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        start, count = (first, first + len(frames)) if "Qwen3" in type(self.processor).__name__ else (0, len(frames))
        about = {"total_num_frames": count, "fps": FPS, "frames_indices": list(range(start, count))}
        return self.processor(
            text=[text],
            videos=[np.stack(frames)],
            video_metadata=[about],
            do_sample_frames=False,
            do_resize=False,
            return_tensors="pt",
        )

    def about(self, frames, size, *, first=0):
        sized = [resize_frames(np.array(frame)[None], *size, "bicubic")[0].transpose(2, 0, 1) for frame in frames]
        content = [{"type": "text", "text": "Look: "}, {"type": "video"}, {"type": "text", "text": QUESTION}]
        return self.answer([{"role": "user", "content": content}], NEW, frames=sized, first=first)

    @torch.no_grad()
    def slid(self, frames, size, gone):
        """The answer where each temporal patch, and the question at last, were computed without those that were gone
        then: gone[i] is how many. One pass over all frames with a mask for attention, for each token."""
        sized = [resize_frames(np.array(frame)[None], *size, "bicubic")[0].transpose(2, 0, 1) for frame in frames]
        content = [{"type": "text", "text": "Look: "}, {"type": "video"}, {"type": "text", "text": QUESTION}]
        inputs = dict(self._inputs([{"role": "user", "content": content}], frames=sized, first=0))
        ids, rows, margins = [], [], []
        for _ in range(NEW):
            more = torch.tensor([ids], dtype=torch.int64)
            given = {"input_ids": more, "attention_mask": torch.ones_like(more)}
            asked = {
                name: torch.cat([value, given.get(name, torch.zeros_like(more))], dim=1)
                if name in ("input_ids", "attention_mask", "mm_token_type_ids")
                else value
                for name, value in inputs.items()
            }
            mask = self._mask(asked["input_ids"][0].tolist(), len(frames) // 2, gone)
            hook = self.model.model.language_model.register_forward_pre_hook(
                lambda module, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask}), with_kwargs=True
            )
            self.model.model.rope_deltas = None
            row = torch.log_softmax(self.model(**asked).logits[0, -1].float(), -1)
            hook.remove()
            best = row.topk(2)
            ids.append(int(best.indices[0]))
            rows.append(float(best.values[0]))
            margins.append(float(best.values[0] - best.values[1]))
        return Answer(inputs["input_ids"].shape[1], ids, rows, margins)

    def _mask(self, ids, patches, gone):
        """Additive, float32 [1, 1, L, L]."""
        config = self.model.config
        pads = [place for place, token in enumerate(ids) if token == config.video_token_id]
        each, patch_of = len(pads) // patches, np.full(len(ids), -1)
        for number in range(patches):
            first, last = pads[number * each], pads[(number + 1) * each - 1]
            if "qwen3" in config.model_type:  # with its time in front, and its marks
                while ids[first - 2] not in (config.vision_start_token_id, config.vision_end_token_id):
                    first -= 1
                first, last = first - 1, last + 1
            patch_of[first : last + 1] = number
        behind = np.arange(len(ids)) > pads[-1] + ("qwen3" in config.model_type)
        lost = np.where(behind, gone[-1], np.where(patch_of >= 0, np.array(gone)[patch_of], 0))
        sees = (patch_of[None] < 0) | (patch_of[None] >= lost[:, None])
        sees &= np.arange(len(ids))[None] <= np.arange(len(ids))[:, None]
        return torch.where(torch.from_numpy(sees), 0.0, torch.finfo(torch.float32).min)[None, None]


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    return folder, LiveReference(folder), {}


def wanted(family, size, *, first, end):
    """What transformers answers about frames [first, end), computed once."""
    _, reference, known = family
    if (size, first, end) not in known:
        known[size, first, end] = reference.about(FRAMES[first:end], size, first=first)
    return known[size, first, end]


def size_in(llm):
    """The (height, width) that live frames are resized to."""
    processor = llm._media._processor
    video = processor.process_frames(FRAMES[:2], 2, VideoKnobs(max_pixels=llm._media.live_rules().max_pixels))
    return tuple(side * processor.config.video_patches.patch_size for side in video.grid_thw[1:])


def timed(frames, first=0):
    """Frames with times of a clock that began before."""
    return [(100 + (first + place) / FPS, frame) for place, frame in enumerate(frames)]


@over((*ALL_FAMILIES, HYBRID), SETTINGS, ("qwen3_vl",), SHARED)
def test_frames_are_answered_as_one_prompt(family, settings):
    """Also where a question comes between the two frames of a temporal patch."""
    with LLM(str(family[0]), num_threads=1, video_reference="transformers", **settings) as llm:
        session = llm.session(fps=FPS)
        session.append("Look: ")
        for count, frame in enumerate(timed(FRAMES), 1):
            session.show([frame])
            if count in (1, 4, 7, 9):
                got = session.ask(QUESTION, GREEDY, num_logprobs=2, keep=False)
                assert_equal_answers(got, wanted(family, size_in(llm), first=0, end=count))
            llm.chat("Something else. " * 10, GREEDY)  # which may evict it


@pytest.mark.parametrize(
    "family", ["qwen3_vl", *(pytest.param(one, marks=pytest.mark.slow) for one in ALL_FAMILIES[:2])], indirect=True
)
def test_questions_that_are_retracted_between_frames_change_nothing(family):
    """They want more KV slots than there are; with ignore_eos nothing is ever retracted."""
    long = SamplingOverrides(temperature=0.0, max_new_tokens=48)
    room = {"max_total_tokens": 384, "page_size": 4, "schedule_conservativeness": 0.01, "chunked_prefill_size": 48}
    with LLM(str(family[0]), num_threads=1, video_reference="transformers", **room) as llm:
        session, retracted = llm.session(fps=FPS), 0
        session.append("Look: ")
        for count in (4, 8):
            session.show(timed(FRAMES[count - 4 : count], count - 4))
            session.ask_together([f"{number} Why?" for number in range(6)], long)
            assert llm.stats().retracted_total > retracted
            retracted = llm.stats().retracted_total
            got = session.ask(QUESTION, GREEDY, num_logprobs=2, keep=False)
            assert_equal_answers(got, wanted(family, size_in(llm), first=0, end=count))


@over((*ALL_FAMILIES, HYBRID), SETTINGS[:1], ())
def test_a_window_is_answered_as_a_prompt_of_what_stays(family, settings):
    with LLM(str(family[0]), num_threads=1, video_reference="transformers", **settings) as llm:
        session = llm.session(fps=FPS, keep_seconds=2.5)
        session.append("Look: ")
        session.show(timed(FRAMES[:6]))
        # patches begin at 0, 1 and 2 s: 2 s from first to last
        assert_equal_answers(
            session.ask(QUESTION, GREEDY, num_logprobs=2, keep=False), wanted(family, size_in(llm), first=0, end=6)
        )
        session.show(timed(FRAMES[6:8], 6))  # 3 s: what stays is 1.9 s at most
        assert_equal_answers(
            session.ask(QUESTION, GREEDY, num_logprobs=2, keep=False), wanted(family, size_in(llm), first=4, end=8)
        )


SLIDES = [
    {},
    {"chunked_prefill_size": 16},
    {"speculative_algorithm": "ngram", "enable_hierarchical_cache": True, "hicache_size_gib": 0.01},
    {"tp_size": 2, "chunked_prefill_size": 48},
    {"pp_size": 2, "encoder_dp_size": 1},
]


@over(ALL_FAMILIES, SLIDES[:2], ("qwen3_vl",), SLIDES[2:])
def test_a_window_that_slides_keeps_kv_as_it_was_computed(family, settings):
    """Each page of one token: what does not fill a page is computed again, without what has left."""
    frames = [picture(seed, 90, 60) for seed in range(20, 32)]
    with LLM(str(family[0]), num_threads=1, page_size=1, video_reference="transformers", **settings) as llm:
        session = llm.session(fps=FPS, keep_seconds=2.5, window="sliding")
        session.append("Look: ")
        want, cached, tokens = family[1].slid(frames, size_in(llm), [0, 0, 0, 2, 2, 4, 4]), [], []
        for place in range(0, 12, 2):
            done = session.show(timed(frames[place : place + 2], place))
            cached.append(done.cached_tokens)
            tokens.append(done.prompt_tokens)
            llm.chat("Look: something else", GREEDY)
        each = tokens[1] - tokens[0]
        assert tokens[5] < tokens[2], "frames have left"
        for number in (3, 5):  # where they leave
            assert cached[number] >= tokens[number] - each - 3, "a temporal patch, and marks behind it, are computed"
        got = session.ask(QUESTION, GREEDY, num_logprobs=2, keep=False)
        assert "window that slides" in got.warnings[0]
        assert got.prompt_tokens == want.prompt_tokens - 4 * each
        assert_equal_answers(replace(got, prompt_tokens=want.prompt_tokens), want)
        exact = llm.session(fps=FPS, keep_seconds=2.5)
        exact.append("Look: ")
        exact.show(timed(frames))
        fresh = exact.ask(QUESTION, GREEDY, num_logprobs=2, keep=False)
        assert fresh.prompt_tokens == got.prompt_tokens
        assert fresh.logprobs != got.logprobs, "KV of a window that slides is its own"


@pytest.mark.parametrize("family", ALL_FAMILIES[:3], indirect=True)
def test_what_stays_in_a_window_that_slides_keeps_its_positions(family):
    with LLM(str(family[0]), num_threads=1) as llm:
        session = llm.session(fps=FPS)
        session.show(timed(FRAMES[:6]))
        session.ask(QUESTION, GREEDY)
        session.show(timed(FRAMES[:8], 6))
        before = session.dialogue
        [clip] = live.live_in(before.messages[-1])
        rules = llm._media.live_rules(FPS, max_tokens=clip.num_tokens, slides=True)  # 3 patches stay, of 3 and 4
        after, slid = rules.windowed(before)
        assert len(slid.forms) == 2, "a clip has left, and another one is shorter"
        old, *_, new = prompts = [expanded(llm, messages) for messages in (*slid.forms, after.messages)]
        places = np.arange(len(new.input_ids))
        for one, other in list(itertools.pairwise(prompts))[::-1]:
            places = kept_places(known_tokens(one), known_tokens(other))[places]
        assert len(places) == len(new.input_ids)
        assert (old.input_ids[places] == new.input_ids).all()
        first = new.mm_inputs.items[0].offsets[0][0]
        assert (old.mm_inputs.mrope_positions[:, places[first:]] == new.mm_inputs.mrope_positions[:, first:]).all()
        longer = session._shown(session._shown(after, timed(FRAMES[:2], 20)), timed(FRAMES[2:4], 22))
        again, slid = rules.windowed(longer)
        assert slid.forms
        assert again.window != after.window != before.window == ""


def expanded(llm, messages):
    prompt = llm.builder.tokenize(GenerateReqInput(request_id="x", prompt=ChatPrompt(messages=messages)))
    return llm.builder.expand(prompt, [medium.source for medium in prompt.media])


def test_a_window_that_slides_begins_anew_when_positions_end(tmp_path, monkeypatch):
    folder = make_checkpoint("qwen3_vl", tmp_path)
    with LLM(str(folder), num_threads=1, page_size=1) as llm:
        monkeypatch.setattr(live, "_MOST_POSITIONS", 150)
        session = llm.session(fps=FPS, keep_seconds=2.5, window="sliding")
        windows = []
        for place in range(0, 40, 2):
            session.show(timed([picture(place, 90, 60), picture(place + 1, 90, 60)], place))
            windows.append(session.dialogue.window)
        assert len(set(windows)) > 3
        assert "" in windows[5:], "what stays is that of its own prompt again"
        assert session.ask(QUESTION, GREEDY, keep=False).token_ids


def test_a_window_that_slides_without_room_is_computed_again(tmp_path):
    """There is no room for the KV of two windows, so none is copied, and no slot is lost."""
    folder = make_checkpoint("qwen3_vl", tmp_path)
    with LLM(str(folder), num_threads=1, page_size=4, max_total_tokens=256, max_model_len=252) as llm:
        session = llm.session(fps=FPS, keep_seconds=8.5, window="sliding")
        frames = timed([picture(seed, 90, 60) for seed in range(24)])
        cached = [session.show(frames[place : place + 2]).cached_tokens for place in range(0, 24, 2)]
        assert cached[8] > 100 > cached[9], "frames leave"
        assert len(session.ask(QUESTION, GREEDY, keep=False).token_ids) == NEW
        stats = llm.stats()
        assert stats.kv_free_tokens + stats.kv_cached_tokens + stats.kv_locked_tokens == stats.kv_total_tokens
        llm.flush_cache()
        assert llm.stats().kv_free_tokens == stats.kv_total_tokens


def test_tokens_that_stay():
    before = np.array([1, 2, 3, -7, -8, -9, 4, 5])
    assert kept_places(before, np.array([1, 2, 3, -9, 4, 5])).tolist() == [0, 1, 2, 5, 6, 7]
    assert kept_places(before, before).tolist() == [*range(8)]
    assert kept_places(before, np.array([1, 2, 6, 5])).tolist() == [0, 1], "words on either side became one token"
    assert kept_places(before, np.array([*before, 6])).tolist() == [*range(8)]
    again = np.array([1, 3, 3, 3, 4])
    assert kept_places(again, np.array([1, 3, 3, 4])).tolist() == [0, 2, 3, 4], "what is behind stays where it is"


def test_a_hybrid_model_has_no_window_that_slides(tmp_path):
    folder = make_checkpoint(HYBRID, tmp_path)
    with LLM(str(folder), num_threads=1) as llm, pytest.raises(BadRequestError, match="recurrent"):
        llm.session(keep_seconds=3, window="sliding")


by_family = pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"], indirect=True)


@by_family
def test_a_temporal_patch_is_computed_once(family):
    with LLM(str(family[0]), num_threads=1) as llm:
        session, before = llm.session(fps=FPS), 0
        for place in range(0, 8, 2):
            encoded = llm.stats().encoder.encoded
            done = session.show(timed(FRAMES[place : place + 2], place))
            assert llm.stats().encoder.encoded == encoded + 1
            assert done.cached_tokens >= before - 17  # a page, and what closes the video
            before = done.prompt_tokens
        encoded = llm.stats().encoder.encoded
        assert session.ask(QUESTION, GREEDY, keep=False).cached_tokens >= before - 17
        assert llm.stats().encoder.encoded == encoded
        # a window that moves takes embeddings from the cache
        sliding = llm.session(fps=FPS, max_video_tokens=1)
        for frame in timed(FRAMES[:8]):
            sliding.show([frame])
        assert llm.stats().encoder.encoded == encoded
        assert sliding.dialogue.num_media == 1


@by_family
def test_answers_that_are_kept_end_a_video(family):
    with LLM(str(family[0]), num_threads=1) as llm:
        session = llm.session(fps=FPS)
        session.show(timed(FRAMES[:3]))
        said = session.ask(QUESTION, GREEDY)
        session.show(timed(FRAMES[3:5], 3))
        roles = [message["role"] for message in session.dialogue.messages]
        assert roles == ["user", "assistant", "user"]
        videos = [message["content"][0]["video"] for message in session.dialogue.messages[::2]]
        assert [video.frame_times for video in videos] == [(0, 0.5, 1, 1), (1.5, 2)]
        again = session.ask(QUESTION, GREEDY, keep=False)
        assert said.token_ids
        assert again.prompt_tokens > session.tokens - NEW


def test_a_video_follows_the_clock(tmp_path):
    """Where positions count seconds, frames of another pace begin a video of their own."""
    folder = make_checkpoint("qwen2_5_vl", tmp_path)
    with LLM(str(folder), num_threads=1) as llm:

        def videos(times):
            session = llm.session(fps=FPS)
            session.show(zip(times, FRAMES, strict=False))
            [message] = session.dialogue.messages
            return [(part["video"].grid_thw[0], part["video"].second_per_grid_t) for part in message["content"]]

        assert videos([0, 0.5, 1, 1.5, 2, 2.5]) == [(3, 1.0)]
        assert videos([0, 0.52, 1.04, 1.5, 2.02, 2.5]) == [(3, 1.0)], "a clock that is nearly right"
        assert videos([0, 1, 2, 3, 4, 5]) == [(3, 2.0)], "a slow camera"
        assert videos([0, 0.5, 1, 1.5, 60, 60.5, 61, 61.5]) == [(2, 1.0), (2, 1.0)], "a gap"


def test_the_clock():
    now = [0.0]
    clock = FrameClock(2.0, clock=lambda: now[0])
    assert [clock.take(time) for time in (7.0, 7.1, 7.46, 8.0)] == [
        (0.0, True),
        (pytest.approx(0.1), False),
        (pytest.approx(0.46), True),
        (1.0, True),
    ]
    for bad, named in ((8.0, "8 s"), (3.0, "must rise"), (float("nan"), "nan"), (float("inf"), "inf"), (1e9, "limit")):
        with pytest.raises(BadRequestError, match=named):
            clock.take(bad)
    assert clock.now == 1.0
    clock.restart()
    now[0] = 5.0
    assert clock.take(0.0)[0] == 6.0, "the time between two connections is ours"


def test_bad_frames_change_nothing(tmp_path):
    folder = make_checkpoint("qwen3_vl", tmp_path)
    with LLM(str(folder), num_threads=1) as llm:
        session = llm.session(fps=FPS)
        session.show(timed(FRAMES[:2]))
        kept = session.dialogue
        for frames in ([(200, b"no picture"), (201, FRAMES[0])], [(210, Image.new("RGB", (9, 9))), (211, FRAMES[0])]):
            with pytest.raises(BadRequestError):
                session.show(frames)
            assert session.dialogue == kept
        assert session.show([(300, FRAMES[2]), (301, FRAMES[3])]).prompt_tokens > 0
