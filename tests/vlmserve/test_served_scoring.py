"""Logprobs of prompts, hidden states, logits processors and scores through HTTP and all processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import Forwarded, Reference, ask, picture
from tests.vlmserve.server_process import ROOT, ServerProcess, serving
from tests.vlmserve.test_served_parity import as_openai

CHAT = ask(picture(1, 96, 64), "What is this?")
FLAGS = ("--chunked-prefill-size", "16", "--enable-return-hidden-states")
FLAGS += ("--logits-processors", "tests.vlmserve.forbidding:Forbid,tests.vlmserve.forbidding:Fails")
NEW = 3


class Asked:
    """A server, and what transformers says."""

    def __init__(self, server: ServerProcess, reference: Reference) -> None:
        self.server = server
        self.reference = reference
        answer = reference.answer(CHAT, NEW)
        self.ids = answer.token_ids
        self.want: Forwarded = reference.forward(CHAT, self.ids)

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        return self.server.post(f"v1/{path}", model="tiny", **body)

    def chat(self, **fields: Any) -> dict[str, Any]:
        body = {"messages": as_openai(CHAT), "temperature": 0, "max_tokens": NEW, "ignore_eos": True, **fields}
        status, answer = self.post("chat/completions", **body)
        assert status == 200, answer
        return answer

    def score(self, **body: Any) -> dict[str, Any]:
        status, answer = self.post("score", **body)
        assert status == 200, answer
        return answer


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("scoring")
    model = make_checkpoint("qwen3_vl", folder / "model")
    with serving(folder / "run", *FLAGS, model=model, PYTHONPATH=str(ROOT)) as server:
        yield Asked(server, Reference(model))


def test_logprobs_of_the_prompt(asked: Asked) -> None:
    want = asked.want
    for _ in range(2):  # the second time it is cached
        answer = asked.chat(prompt_logprobs=2, token_ids_logprob=[7, 300], logprobs=True, n=2)
        rows = answer["prompt_logprobs"]
        assert rows[0] is None
        assert len(rows) == want.prompt == len(answer["prompt_token_ids_logprobs"])
        for position in range(1, want.prompt):
            theirs, own = want.logprobs[position - 1], want.input_ids[position]
            assert rows[position][str(own)]["logprob"] == pytest.approx(theirs[own], abs=1e-4)
            best = max(rows[position].values(), key=lambda entry: entry["logprob"])
            assert best["rank"] == 1
            assert best["logprob"] == pytest.approx(theirs.max(), abs=1e-4)
            got = answer["prompt_token_ids_logprobs"][position]
            np.testing.assert_allclose(got, theirs[[7, 300]], atol=1e-4)
        for choice in answer["choices"]:
            first = choice["logprobs"]["content"][0]
            np.testing.assert_allclose(first["token_ids_logprobs"], want.logprobs[want.prompt - 1][[7, 300]], atol=1e-4)
    late = asked.chat(prompt_logprobs=0, logprob_start_len=want.prompt - 3, max_tokens=0)
    assert late["choices"][0]["message"]["content"] == ""
    assert late["usage"]["completion_tokens"] == 0
    found = [next(iter(row.values()))["logprob"] for row in late["prompt_logprobs"]]
    theirs = [want.logprobs[p - 1][want.input_ids[p]] for p in range(want.prompt - 3, want.prompt)]
    np.testing.assert_allclose(found, theirs, atol=1e-4)


def test_hidden_states(asked: Asked) -> None:
    want = asked.want
    rows = asked.chat(return_hidden_states=True)["choices"][0]["hidden_states"]
    np.testing.assert_allclose(rows, want.hidden[want.prompt - 1 : -1], atol=2e-4)
    [row] = asked.chat(return_hidden_states="last")["choices"][0]["hidden_states"]
    np.testing.assert_allclose(row, want.hidden[want.prompt - 1], atol=2e-4)


def test_logits_processors(asked: Asked) -> None:
    [first] = asked.chat(max_tokens=1, logprobs=True)["choices"][0]["logprobs"]["content"]
    call = {"name": "forbid", "params": {"ids": [asked.ids[0]]}}
    [other] = asked.chat(max_tokens=1, logprobs=True, logits_processors=[call])["choices"][0]["logprobs"]["content"]
    assert other["token"] != first["token"]
    status, answer = asked.post("chat/completions", messages=CHAT_TEXT, logits_processors=["Fails"])
    assert (status, answer["error"]["message"]) == (500, "the logits processor 'Fails' failed: RuntimeError")


CHAT_TEXT = [{"role": "user", "content": "hi"}]


def test_scores_of_labels(asked: Asked) -> None:
    encode = asked.reference.processor.tokenizer.encode
    labels = ["yes", "no", "a disc"]
    answer = asked.score(query=as_openai(CHAT), labels=labels)
    theirs = []
    for label in labels:
        ids = encode(label)
        want = asked.reference.forward(CHAT, ids)
        theirs.append(sum(want.logprobs[want.prompt - 1 + k][token] for k, token in enumerate(ids)))
    np.testing.assert_allclose(answer["logprobs"][0], theirs, atol=3e-4)
    np.testing.assert_allclose(answer["scores"][0], np.exp(theirs), rtol=1e-3)
    items = [" Is it red?", " Is it blue?"]
    answer = asked.score(query=as_openai(CHAT), items=items, label_token_ids=[7, 300, 5], apply_softmax=True)
    for item, row, scores in zip(items, answer["logprobs"], answer["scores"], strict=True):
        [message] = CHAT
        want = asked.reference.forward([{**message, "content": [*message["content"], {"type": "text", "text": item}]}])
        theirs = want.logprobs[-1][[7, 300, 5]]
        np.testing.assert_allclose(row, theirs, atol=1e-4)
        np.testing.assert_allclose(scores, np.exp(theirs) / np.exp(theirs).sum(), rtol=1e-3)
    assert answer["object"] == "scoring"


def test_scores_of_text_and_ids(asked: Asked) -> None:
    encode = asked.reference.processor.tokenizer.encode
    text = asked.score(query="The sky is", items=[" red", " blue"], label_token_ids=[7, 300])
    ids = asked.score(query=encode("The sky is"), items=[encode(" red"), encode(" blue")], label_token_ids=[7, 300])
    np.testing.assert_allclose(text["scores"], ids["scores"], rtol=1e-4)
    first = asked.score(query=" is what", items="red", label_token_ids=[7], item_first=True)
    same = asked.score(query="red is what", label_token_ids=[7])
    assert first["scores"] == same["scores"]
    assert 0 < math.fsum(first["scores"][0]) < 1


def test_scores_are_asked_for_as_answers_are(asked: Asked) -> None:
    def score(**fields: Any) -> dict[str, Any]:
        return asked.score(query="One, two, three, four. " * 40, label_token_ids=[7], **fields)

    def cached(**fields: Any) -> int:
        return score(**fields)["usage"]["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 100
    assert cached(cache_salt="tenant") == 0
    assert cached(cache_salt="tenant") > 100
    assert score(rid="mine", priority=0, timeout=60.0)["id"] == "mine"
    wrong = {"query": "red", "label_token_ids": [7]}
    status, answer = asked.post("score", **wrong, timeout=1e-6)
    assert (status, answer["error"]["code"]) == (504, "request_timeout")
    status, answer = asked.post("score", **wrong, priority=3)
    assert status == 400
    assert "priority is 3, and priorities are for servers with --schedule-policy priority" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param", "complaint"),
    [
        ("chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "leave stream out"),
        ("chat/completions", {"token_ids_logprob": [3]}, "token_ids_logprob", "needs logprobs: true"),
        ("chat/completions", {"logits_processors": ["os"]}, "logits_processors", "only: forbid, Fails"),
        ("score", {"query": "a"}, "label_token_ids", "one of them"),
        ("score", {"query": "a", "items": [], "label_token_ids": [1]}, "items", "empty list"),
        ("score", {"query": "a", "items": [[1]], "label_token_ids": [1]}, "items[0]", "query is text"),
        ("score", {"query": [1.5], "labels": ["a"]}, "query", "query"),
    ],
)
def test_what_is_wrong_is_told(asked: Asked, path: str, fields: dict[str, Any], param: str, complaint: str) -> None:
    body = {"messages": CHAT_TEXT, **fields} if path != "score" else fields
    status, answer = asked.post(path, **body)
    assert status == 400, answer
    assert param in answer["error"]["param"]
    assert complaint in answer["error"]["message"]
