"""Real grammars of the built-in model: what they allow, and that bad ones cost nothing but their own request."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from vlmserve.config.model_path import DEFAULT_MODEL
from vlmserve.ipc.messages import GrammarSpec
from vlmserve.scheduler.grammar.grammar_process import GrammarProcesses, GrammarSettings
from vlmserve.scheduler.grammar.matcher import Patience, look_ahead, masks_of
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer
from vlmserve_common.errors import BadRequestError

TOKENIZER = load_text_tokenizer(DEFAULT_MODEL)
VOCAB = json.loads((DEFAULT_MODEL / "config.json").read_text())["text_config"]["vocab_size"]
END = TOKENIZER.id_of("<|im_end|>")
SETTINGS = GrammarSettings(folder=str(DEFAULT_MODEL), vocab_size=VOCAB, stop_token_ids=[END], timeout_s=60.0)
EXPLODES = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2500)}})


@pytest.fixture(scope="module")
def process():
    process = GrammarProcesses(SETTINGS)
    yield process
    process.close()


def spec(kind, text, **more):
    text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    return GrammarSpec(kind=kind, text=text, **more)


def allowed(matcher) -> set[int]:
    found = np.flatnonzero(np.unpackbits(masks_of([(matcher, 0)])[0].view(np.uint8), bitorder="little"))
    return set(found[found < VOCAB].tolist())


def fits(compiled, text: str) -> bool:
    """Whether an answer can be this text."""
    matcher = compiled.matcher(Patience())
    for token in [*TOKENIZER.encode(text), END]:
        if token not in allowed(matcher):
            return False
        matcher.accept(token)
    assert matcher.is_over
    assert not matcher.failure
    return True


OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer", "minimum": 0, "maximum": 12}},
    "required": ["n"],
}


def test_where_one_text_goes_on_its_tokens_are_guessed_with_their_masks(process):
    """The masks behind guesses are those that come without any, and no guess changes the place in the grammar."""
    compiled = process.compile(spec("regex", '(\\{"number of circles": )[0-9]{1,3}(, "colours": \\[\\]\\})'))
    matcher, stepping = compiled.matcher(Patience()), compiled.matcher(Patience())
    text = '{"number of circles": '
    look_ahead({matcher: ((), 64)})
    assert TOKENIZER.decode(matcher.guesses) == text
    seen = masks_of([(matcher, ahead) for ahead in range(1 + len(matcher.guesses))])
    for token, mask in zip([*matcher.guesses, None], seen, strict=True):
        assert (masks_of([(stepping, 0)]) == mask).all()
        if token is not None:
            stepping.accept(token)
    for token in TOKENIZER.encode(text):
        matcher.accept(token)
    digits = [TOKENIZER.encode(digit)[0] for digit in "12"]
    look_ahead({matcher: ((*digits, END, *digits), 64)})  # any number fits here, and no end
    assert matcher.guesses == tuple(digits)
    look_ahead({matcher: (digits, 1)})
    assert matcher.guesses == tuple(digits[:1])
    for token in [*digits, digits[0]]:
        matcher.accept(token)
    look_ahead({matcher: (digits, 64)})
    assert TOKENIZER.decode(matcher.guesses) == ', "colours": []}'
    look_ahead({matcher: (digits, 0)})
    assert matcher.guesses == ()


NUMBER = {"type": "regex", "pattern": "[0-9]+"}
TAG = {"type": "tag", "begin": "<a>", "end": "</a>", "content": NUMBER}
CASES = [
    ("json_schema", OBJECT, ['{"name": "a", "n": 12}', '{"n": 0}'], ['{"n": 13}', "{}", '{"n": 0, "x": 1}', "[0]"]),
    ("json_schema", {"type": "object"}, ["{}", '{"a": [1, null]}'], ["1", "[]", '"a"', "{a: 1}", '{"a": }']),
    ("json_schema", {"enum": ["日本", "🦊", 1]}, ['"日本"', '"🦊"', "1"], ["日本", "2"]),
    ("json_schema", {"type": "string", "maxLength": 2}, ['"éé"'], ['"aaa"']),
    ("regex", r"[a-c]{2,3}\d", ["ab1", "abc2"], ["a1", "ab", "ab1 "]),
    ("choice", ["yes", 'no "\\\n', "日本🦊"], ["yes", 'no "\\\n', "日本🦊"], ["ye", "no"]),
    ("ebnf", 'root ::= "(" root ")" | "x"', ["x", "((x))"], ["(x", "xx"]),
    (
        "structural_tag",
        {"type": "structural_tag", "format": TAG},
        ["<a>12</a>"],
        ["<a></a>", "12"],
    ),
]


@pytest.mark.parametrize(("kind", "text", "good", "bad"), CASES)
def test_what_fits(process, kind, text, good, bad):
    compiled = process.compile(spec(kind, text))
    assert compiled.num_bytes > 0
    assert [one for one in good if not fits(compiled, one)] == []
    assert [one for one in bad if fits(compiled, one)] == []


def test_properties_that_are_not_named(process):
    text = '{"n": 0, "x": 1}'
    assert not fits(process.compile(spec("json_schema", OBJECT)), text)
    assert fits(process.compile(spec("json_schema", OBJECT, strict=False)), text)


CALL = json.dumps({"type": "structural_tag", "format": TAG})


@pytest.mark.parametrize(
    ("more", "good", "bad"),
    [
        ({"calls": CALL}, ["yes", "<a>12</a>"], ["<a>x</a>", "yes<a>12</a>", "text"]),
        ({"thinking": True}, ["hm </thi\n</think>\n\nyes", "</think>\n\nno"], ["yes", "hm", "a</think>\n\nb"]),
        ({"calls": CALL, "thinking": True}, ["a</think>\n\n<a>1</a>", "a</think>\n\nno"], ["<a>1</a>", "no"]),
    ],
)
def test_calls_in_its_place_and_thoughts_before_it(process, more, good, bad):
    compiled = process.compile(spec("choice", ["yes", "no"], **more))
    assert [one for one in good if not fits(compiled, one)] == []
    assert [one for one in bad if fits(compiled, one)] == []


def test_what_is_left_out_of_calls_is_refused_of_strict_ones_only(process):
    number = {"type": "json_schema", "json_schema": {"type": "number", "multipleOf": 0.5}}
    tag = {"type": "structural_tag", "format": number}
    assert fits(process.compile(spec("structural_tag", tag, strict=False)), "0.7")
    with pytest.raises(BadRequestError, match="ignoring multipleOf"):
        process.compile(spec("structural_tag", tag))
    with pytest.raises(BadRequestError, match="ignoring multipleOf"):
        process.compile(spec("json_schema", number["json_schema"], strict=False))


def test_special_tokens_are_no_text_and_an_answer_ends_where_it_may(process):
    compiled = process.compile(spec("regex", "(.|\n)*"))
    matcher = compiled.matcher(Patience())
    assert allowed(matcher) & TOKENIZER.special_ids == {END}
    compiled = process.compile(spec("regex", "ab?"))
    matcher = compiled.matcher(Patience())
    assert END not in allowed(matcher)
    for token in TOKENIZER.encode("a"):
        matcher.accept(token)
    assert END in allowed(matcher)
    matcher.accept(TOKENIZER.encode("x")[0])
    assert allowed(matcher) == set(range(VOCAB)), "the request is about to end"
    assert "no token" in matcher.failure


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "((a", "position 4: The parenthesis is not closed"),
        ("regex", "(?=a)b", "position 3: Lookahead is not supported"),
        ("regex", "(" * 5000 + "a" + ")" * 5000, "Nest layer exceeded"),
        ("ebnf", "root ::= foo", 'line 1, column 10: Rule "foo" is not defined'),
        ("ebnf", "root ::= root", "no text fits"),
        ("ebnf", 'root ::= s\ns ::= s s s s | s s s | s s | "a" | [a-z] | ""', "too many ways"),
        ("json_schema", {"type": "string", "pattern": "a+", "maxLength": 3}, "ignoring minLength/maxLength"),
        ("json_schema", {"type": "number", "multipleOf": 0.5}, "ignoring multipleOf"),
        ("json_schema", False, "cannot accept any value"),
        ("structural_tag", {"type": "structural_tag"}, "must have a format"),
    ],
)
def test_what_cannot_be_compiled(process, kind, text, words):
    with pytest.raises(BadRequestError, match=words) as caught:
        process.compile(spec(kind, text))
    assert "cpp" not in caught.value.message
    assert "Warning" not in caught.value.message


def test_what_explodes_late_ends_alone_and_is_compiled_again(process):
    """A text that is read in ever more ways, behind a prefix that is longer than what is tried out."""
    rules = "".join(
        f"s{i} ::= s{i * 7 % 20} s{(i + 3) % 20} | s{i * 3 % 20} s{(i + 8) % 20} | [ab]\n" for i in range(20)
    )
    late = spec("ebnf", f'root ::= "{"x" * 100}" s0\n{rules}')
    bad, good = process.compile(late), process.compile(spec("regex", "a+"))
    matchers = [bad.matcher(Patience()), good.matcher(Patience()), bad.matcher(Patience())]
    for token in TOKENIZER.encode("x" * 100):
        for matcher in (matchers[0], matchers[2]):
            matcher.accept(token)
    for _ in range(10_000):
        look_ahead(dict.fromkeys(matchers, ((), 0)))
        if bad.failure:
            break
        for matcher in matchers:
            matcher.accept(TOKENIZER.encode("a")[0])
    assert [matcher.failure for matcher in matchers] == [bad.failure, "", bad.failure]
    assert "too many ways" in bad.failure
    assert fits(good, "aa")
    assert fits(process.compile(late), "x" * 100 + "a")


def test_a_client_with_slow_grammars_gets_less_time_for_a_while(process):
    """A step that others have to wait for is ended sooner, unless a client of another kind has the same grammar."""
    now = 0.0
    tired, fresh = (Patience(lambda: now) for _ in range(2))
    for share in (1, 1 / 4, 1 / 16, 1 / 16):
        assert tired.share == share
        tired.lose()
    words = "|".join("".join(chr(97 + (i * 7 + j * 3) % 26) for j in range(8)) + f"{i}" for i in range(300))
    busy = spec("regex", f"(({words})|[a-z0-9]{{0,40}}){{300}}")

    def lasts(patience: Patience) -> int:
        """The answers for which a step finds the next tokens in time, of 1, 2, 4, ..."""
        count = 1
        while count < 2**14:
            compiled = process.compile(busy)
            matchers = [compiled.matcher(patience) for _ in range(count)]
            look_ahead(dict.fromkeys(matchers, ((), 0)))
            if compiled.failure:
                return count
            compiled.close("done")
            count *= 2
        return count

    assert lasts(tired) < lasts(fresh)
    assert fresh.share == 1 / 4
    now = 60.0
    assert (tired.share, fresh.share) == (1, 1)


@pytest.mark.parametrize(
    ("limit", "too_much", "words", "times"),
    [
        (
            {"timeout_s": 2.0},
            spec("json_schema", EXPLODES),
            r"takes longer than 2 s \(setting --grammar-timeout-s\)",
            1,
        ),
        (
            {"memory_bytes": 16 << 20},
            spec("json_schema", EXPLODES),
            "cannot be compiled",
            2,
        ),
    ],
    ids=["time", "memory"],
)
def test_what_takes_too_much_is_refused_and_others_go_on(limit, too_much, words, times):
    process = GrammarProcesses(replace(SETTINGS, **limit))
    try:
        for _ in range(times):
            with pytest.raises(BadRequestError, match=words):
                process.compile(too_much)
            assert fits(process.compile(spec("regex", "a")), "a")
    finally:
        process.close()
