"""DetokenizerManager against naive decoding of whole answers."""

from __future__ import annotations

import codecs
import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vlmserve.tiny_tokenizer import make_tokenizer
from vlmserve.frontend.detokenizer import DetokenizerManager
from vlmserve.frontend.detokenizer_process import handle
from vlmserve.ipc.messages import (
    AbortReq,
    BatchTokenOutput,
    EncodeOutput,
    FinishReason,
    Guesses,
    RequestsLost,
    TokenLogprobs,
    TokenOutput,
)
from vlmserve_common.checkpoint.text_tokenizer import TextTokenizer

RAW = make_tokenizer()
TOKENIZER = TextTokenizer(RAW)
LENGTH = FinishReason(type="length")
IDS = st.lists(st.integers(0, TOKENIZER.num_ids - 1), max_size=40)
# Text whose tokens are whole or part characters, so that joins of incomplete UTF-8 are frequent.
TEXTS = st.text(alphabet="ab日🦜é \n", max_size=20)
# Two letters, so that almost every stop string begins again within itself and near misses abound.
OVERLAPS = st.text(alphabet="ab", max_size=30) | st.text(alphabet="ab", min_size=3, max_size=8)


def output(ids, finish=None, *, rid="r", done=0, first=False, **fields) -> TokenOutput:
    return TokenOutput(
        rid=rid,
        token_ids=tuple(ids),
        finish_reason=finish,
        prompt_tokens=3,
        completion_tokens=done + len(ids),
        cached_tokens=0,
        first=first,
        **fields,
    )


def run(ids, cuts=(), finish=LENGTH, **fields) -> tuple[list[TokenOutput], list[AbortReq], DetokenizerManager]:
    """Feed `ids` in steps that end at `cuts`; the last step carries `finish`."""
    manager = DetokenizerManager(TOKENIZER)
    bounds = [0, *sorted(set(cuts) & set(range(1, len(ids)))), len(ids)]
    texts, aborts = [], []
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        last = end == len(ids)
        step = output(
            ids[start:end], finish if last else None, done=start, first=number == 0, **(fields if number == 0 else {})
        )
        out, told = manager.process(BatchTokenOutput(outputs=(step,)))
        texts += out.outputs
        aborts += told
    return texts, aborts, manager


def joined(texts) -> str:
    return "".join(t.text for t in texts)


@settings(deadline=None)
@given(IDS, st.sets(st.integers(1, 40)), st.booleans())
def test_deltas_join_to_the_decoding_of_all_ids(ids, cuts, skip):
    texts, aborts, manager = run(ids, cuts, skip_special_tokens=skip)
    assert joined(texts) == RAW.decode(ids, skip_special_tokens=skip) == TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert aborts == []
    assert manager.num_active == 0
    assert texts[-1].completion_tokens == len(ids)


@settings(deadline=None)
@given(TEXTS)
def test_an_incomplete_character_is_never_shown(text):
    ids = [byte_id(b) for b in text.encode()]
    texts, _, _ = run(ids, range(len(ids)))
    assert joined(texts) == text
    assert all("\ufffd" not in t.text for t in texts)


def byte_id(byte: int) -> int:
    """The id of the single-byte token."""
    return next(i for i in range(TOKENIZER.num_ids) if TOKENIZER.token_bytes(i) == bytes([byte]))


def test_a_character_that_stays_incomplete_is_shown_at_the_end():
    ids = [byte_id(b) for b in "a🦜".encode()[:-1]]
    texts, _, _ = run(ids, range(len(ids)))
    assert [t.text for t in texts] == ["a", "", "", "\ufffd"]


def test_ids_beyond_the_tokenizer_have_no_text():
    assert TOKENIZER.token_bytes(TOKENIZER.num_ids + 5) == b""
    assert joined(run([TOKENIZER.num_ids + 5, byte_id(97)])[0]) == "a"


def naive_stop(ids: list[int], stops: list[str]) -> tuple[str, str | None, int]:
    """Decode and search everything again after each token: text, stop string and token count of the answer."""
    for count in range(len(ids) + 1):
        raw = b"".join(TOKENIZER.token_bytes(i) for i in ids[:count] if i not in TOKENIZER.special_ids)
        text, _ = codecs.utf_8_decode(raw, "replace", count == len(ids))
        ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
        if ends:
            end, _, stop = min(ends)
            return text[: end - len(stop)], stop, count
    return text, None, len(ids)


@settings(deadline=None, max_examples=300)
@given(
    st.one_of(
        IDS,
        (TEXTS | OVERLAPS).map(lambda t: [byte_id(b) for b in t.encode()]),
        (TEXTS | OVERLAPS).map(lambda t: RAW.encode(t).ids),
    ),
    st.lists(st.text(alphabet="ab日é \n", min_size=1, max_size=4) | OVERLAPS.filter(bool), max_size=4),
    st.sets(st.integers(1, 60)),
    st.booleans(),
)
def test_stop_strings_as_in_a_naive_search(ids, stops, cuts, included):
    texts, aborts, manager = run(ids, cuts, stop=tuple(stops), include_stop=included)
    want, stop, count = naive_stop(ids, stops)
    answer = [t for t in texts if t.finish_reason is not None]
    assert joined(texts) == want + (stop or "") * included
    assert len(answer) == 1
    assert answer[0] is texts[-1]
    assert answer[0].finish_reason == (LENGTH if stop is None else FinishReason(type="stop", matched=stop))
    if stop is not None:
        assert answer[0].completion_tokens == count == sum(len(t.token_ids) for t in texts)
    assert len(aborts) <= 1
    assert manager.num_active == 0


def test_text_that_may_begin_a_stop_string_is_held_back():
    ids = [byte_id(b) for b in b"xabaabcz"]
    texts, aborts, _ = run(ids, range(len(ids)), stop=("abc",))
    assert [t.text for t in texts] == ["x", "", "", "ab", "a", "", ""]
    assert texts[-1].finish_reason == FinishReason(type="stop", matched="abc")
    assert aborts == [AbortReq(rid="r", finished=True)]


def test_no_stop_string_is_looked_for_in_the_first_tokens():
    ids = [byte_id(b) for b in b"abcxabcz"]
    texts, _, _ = run(ids, range(len(ids)), stop=("abc",), min_tokens=3)
    assert [t.text for t in texts[:4]] == ["a", "b", "c", "x"]  # nor is any text held back for one
    assert (joined(texts), texts[-1].completion_tokens) == ("abcx", 7)
    for cuts in ((), (2, 5)):
        assert joined(run(ids, cuts, stop=("abc",), min_tokens=3)[0]) == "abcx"
    assert joined(run(ids, (), stop=("cx",), min_tokens=3)[0]) == "abcxabcz"


def test_the_stop_token_is_not_shown_even_when_special_tokens_are():
    end = RAW.token_to_id("<|im_end|>")
    ids = [byte_id(97), end, byte_id(98), end]
    texts, _, _ = run(ids, finish=FinishReason(type="stop", matched=end), skip_special_tokens=False)
    assert joined(texts) == "a<|im_end|>b"
    assert texts[-1].completion_tokens == 4
    for skip, text in ((False, "a<|im_end|>b<|im_end|>"), (True, "ab")):
        finish = FinishReason(type="stop", matched=end)
        texts, _, _ = run(ids, finish=finish, skip_special_tokens=skip, include_stop=True)
        assert (joined(texts), texts[-1].finish_reason.shown) == (text, not skip)


def test_tokens_after_the_stop_string_are_dropped_with_their_logprobs():
    ids = [byte_id(b) for b in b"axyz"]
    logprobs = tuple(TokenLogprobs(token_id=i, logprob=-1.0) for i in ids)
    manager = DetokenizerManager(TOKENIZER)
    guesses = Guesses(steps=2, tokens=7, right_at=(2, 1, 1, 0))
    step = output(ids, first=True, stop=("x",), logprobs=logprobs, guesses=guesses)
    out, aborts = manager.process(BatchTokenOutput(outputs=(step,)))
    assert out.outputs[0].token_ids == tuple(ids[:2])
    assert out.outputs[0].logprobs == logprobs[:2]
    assert out.outputs[0].completion_tokens == 2
    assert out.outputs[0].guesses == Guesses(steps=2, tokens=7, right_at=(2, 1, 0, 0))
    assert aborts == [AbortReq(rid="r", finished=True)]
    late, again = manager.process(BatchTokenOutput(outputs=(output(ids, LENGTH, done=4),)))
    assert late.outputs == ()
    assert again == []


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("kind", ["abort", "error"])
def test_a_failure_is_passed_on_and_frees_the_state(begun, kind):
    manager = DetokenizerManager(TOKENIZER)
    if begun:
        manager.process(BatchTokenOutput(outputs=(output([byte_id(97)], first=True),)))
    out, _ = manager.process(BatchTokenOutput(outputs=(output((), FinishReason(type=kind), done=int(begun)),)))
    assert out.outputs[0].finish_reason.type == kind
    assert manager.num_active == 0


def test_the_process_forgets_lost_requests_and_passes_other_messages_on():
    manager = DetokenizerManager(TOKENIZER)
    handle(manager, BatchTokenOutput(outputs=tuple(output([97], rid=rid, first=True) for rid in "abc")))
    for message in (RequestsLost(rids=("a", "unknown", "c"), message="m"), EncodeOutput(rid="b", items=())):
        assert handle(manager, message) == (message, [])
    assert manager.num_active == 1
    texts, aborts = handle(manager, BatchTokenOutput(outputs=(output([97], rid="a"), output([97], rid="b"))))
    assert ([text.rid for text in texts.outputs], aborts) == (["b"], [])


def test_the_detokenizer_imports_light():
    heavy = {"torch", "transformers", "fastapi", "zmq", "msgspec"}
    code = f"import sys, vlmserve.frontend.detokenizer; sys.exit(bool({heavy!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
