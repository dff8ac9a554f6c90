"""Sessions of the offline engine: a conversation that comes in pieces is answered as one that comes whole."""

import pytest

from tests.processors.clips import make_clip
from tests.tiny_checkpoints import ALL_FAMILIES, HYBRID
from tests.vlmserve.reference import SHARED, assert_equal_answers, known, over, picture
from vlmserve import LLM, SamplingOverrides
from vlmserve.frontend.dialogue import Dialogue
from vlmserve_common.errors import BadRequestError, EngineError

NEW = 8
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
SETTINGS = [
    {},
    {"chunked_prefill_size": 16, "page_size": 1},
    {"chunked_prefill_size": 16, "page_size": 16, "enable_mixed_chunk": True},
    {"disable_radix_cache": True},
    # room for little more than one conversation
    {"max_total_tokens": 256, "page_size": 4, "schedule_conservativeness": 0.01},
]


def image(seed, width, height):
    return {"type": "image", "image": picture(seed, width, height)}


def text(words):
    return {"type": "text", "text": words}


SYSTEM = "Be brief."
# What is appended, and the questions asked about each minute.
PIECES = [
    [[text("Look: "), image(1, 96, 64)], [image(2, 77, 131)], [{"type": "video", "video": make_clip(14, fps=5)}]],
    [[text("And "), image(3, 200, 50)], [text("this?"), image(1, 96, 64), text(" The same")]],
]
QUESTIONS = ["Which is wide?", " Is it? What do you see?"]
SAID = "A disc."


def whole(asked):
    """The conversation that `PIECES` add up to, each of two minutes with a question."""
    first, second = ([part for some in pieces for part in some] for pieces in PIECES)
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": [*first, text(QUESTIONS[0])]},
        {"role": "assistant", "content": SAID},
        {"role": "user", "content": [*second, text(QUESTIONS[1])]},
    ]
    return messages[: 2 * asked]


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    return known(request.param, tmp_path_factory.mktemp(request.param), [whole(1), whole(2)], NEW)


@over((*ALL_FAMILIES, HYBRID), SETTINGS, ("qwen3_vl", HYBRID), SHARED)
def test_pieces_are_answered_as_one_prompt(family, settings):
    folder, _, wanted = family
    with LLM(str(folder), num_threads=1, video_reference="transformers", **settings) as llm:
        session = llm.session(SYSTEM)
        for pieces, question, want in zip(PIECES, QUESTIONS, wanted, strict=True):
            for piece in pieces:
                session.append(piece)
                llm.chat("Something else. " * 10, GREEDY)  # which may evict it
            got = session.ask(question, GREEDY, num_logprobs=2, keep=False)
            others = [f"{number} Why?" for number in range(6)]
            together = session.ask_together([question, *others, question], GREEDY, num_logprobs=2)
            for one in (got, together[0], together[-1]):
                assert_equal_answers(one, want)
            session.append(question)
            session.append_message({"role": "assistant", "content": SAID})
        assert session.dialogue.num_media == 5


by_cache = pytest.mark.parametrize("family", ["qwen3_vl", HYBRID], indirect=True)


@by_cache
def test_questions_that_are_retracted_get_the_same_answers(family):
    folder, _, _ = family
    long = SamplingOverrides(temperature=0.0, max_new_tokens=48)  # with ignore_eos nothing is ever retracted
    room = {"max_total_tokens": 384, "page_size": 4, "schedule_conservativeness": 0.01}
    with LLM(str(folder), num_threads=1, chunked_prefill_size=64, **room) as llm:
        session = llm.session(SYSTEM)
        for piece in PIECES[0]:
            session.append(piece)
        assert session.ask_together([]) == []
        questions = [f"{number} Why?" for number in range(6)]
        alone = [session.ask(question, long, keep=False).token_ids for question in questions]
        assert [one.token_ids for one in session.ask_together(questions, long)] == alone
        assert llm.stats().retracted_total


@by_cache
def test_work_is_done_once(family):
    folder, _, _ = family
    unit = 64 if "qwen3_5" in folder.name else 16  # what prefixes are cached in
    with LLM(str(folder), num_threads=1) as llm:
        session, before = llm.session(SYSTEM), 0
        for piece in (*PIECES[0], *PIECES[1]):
            done = session.append(piece)
            assert done.cached_tokens >= before - unit
            assert (done.text, done.token_ids) == ("", ())
            before = done.prompt_tokens
        assert session.tokens == before
        encoded = llm.stats().encoder.encoded
        answer = session.ask("Why?", GREEDY)
        assert answer.cached_tokens > before - unit
        assert session.ask("And why?", GREEDY).cached_tokens > answer.prompt_tokens - unit
        assert llm.stats().encoder.encoded == encoded


@by_cache
def test_a_file_is_read_once(family, tmp_path):
    folder, _, _ = family
    path = tmp_path / "picture.png"
    picture(1, 96, 64).save(path)
    with LLM(str(folder), num_threads=1, processor_cache_mib=0) as llm:
        whole_prompt = llm.chat("What is it?", GREEDY, images=[path])
        session = llm.session()
        session.append("", images=[path])
        path.unlink()
        assert session.ask("What is it?", GREEDY).token_ids == whole_prompt.token_ids
        assert session.dialogue.nbytes >= 96 * 64 * 3


@by_cache
def test_what_is_refused_changes_nothing(family):
    folder, _, _ = family
    with LLM(str(folder), num_threads=1, max_images_per_request=1) as llm:
        session = llm.session(SYSTEM)
        session.append("One: ", images=[picture(1, 96, 64)])
        kept = session.dialogue, session.tokens
        for content, images, named in (
            ("<|image_pad|>", (), "stands for media"),
            ("", [picture(2, 64, 64), picture(3, 64, 64)], "limit is 1"),
            ("word " * 9000, (), "max_model_len"),
            ([{"type": "image", "image": b"no picture"}], (), "cannot be decoded|not a picture|format"),
        ):
            with pytest.raises(BadRequestError, match=named):
                session.append(content, images=images)
            with pytest.raises(BadRequestError, match=named):
                session.ask(content, GREEDY, images=images)
            assert (session.dialogue, session.tokens) == kept
        session.append("Two: ", images=[picture(2, 64, 64)])  # of a request of its own
        assert session.dialogue.num_media == 2
        session.close()
        with pytest.raises(EngineError, match="closed"):
            session.ask("Who?")


def test_what_joins_a_message_and_what_begins_one():
    one = Dialogue().with_content("a").with_content([text("b")])
    assert one.messages == ({"role": "user", "content": [text("a"), text("b")]},)
    two = one.with_message({"role": "assistant", "content": "c"}).with_content("d")
    assert two.messages[2:] == ({"role": "user", "content": "d"},)
    assert len(one.messages) == 1, "a conversation never changes"
