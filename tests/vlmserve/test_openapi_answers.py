"""Answers of a real server, of every operation, are what the OpenAPI document says, to the last field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.vlmserve.documented import BY_ID, ask
from tests.vlmserve.server_process import ROOT, SAMPLES, ServerProcess, data_url

PICTURE = data_url(SAMPLES / "shapes.png")
MODEL = {"model": "tiny"}
HI: dict[str, Any] = {**MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
TEXT: dict[str, Any] = {**MODEL, "prompt": "Hello wörld", "max_tokens": 3}
INPUT: dict[str, Any] = {**MODEL, "input": "Hello", "max_output_tokens": 3}
MEDIA = [
    {"type": "image_url", "image_url": {"url": PICTURE}, "max_pixels": 5000},
    {"type": "video_url", "video_url": {"url": data_url(SAMPLES / "rolling.mp4")}, "fps": 1.0, "max_frames": 10**9},
    {"type": "text", "text": "What is it?"},
]
REPORTS = {"return_mm_report": True, "return_usage_details": True, "return_spec_tokens_details": True}
LOGPROBS = {"logprobs": True, "top_logprobs": 2, "token_ids_logprob": [1, 2], "n": 2}

# Of each operation that answers at once: bodies of requests.
BODIES: dict[str, list[dict[str, Any]]] = {
    "createChatCompletion": [
        HI,
        {**HI, **LOGPROBS},
        {**HI, "messages": [{"role": "user", "content": MEDIA}], **REPORTS},
        {**HI, "stop": "o", "ignore_eos": True, "max_tokens": 50},
        {**HI, "max_tokens": 0, "return_hidden_states": "last"},
        {**HI, "prompt_logprobs": 2, "token_ids_logprob": [1], "logprobs": True},
        {**HI, "model": "other"},
        {**HI, "temperature": 9},
    ],
    "createCompletion": [
        TEXT,
        {**TEXT, "echo": True, "logprobs": 2},
        {**TEXT, "logprobs": 1, "n": 2},
        {**TEXT, "guided_choice": ["only this"], "return_spec_tokens_details": True},
        {**TEXT, "prompt": ["Hello", "The red"], "prompt_logprobs": 1},
        {**TEXT, "stop": ["e", "o"], "max_tokens": 20, "ignore_eos": True},
    ],
    "generate": [
        {"text": "Hello", "sampling_params": {"max_new_tokens": 2}},
        {"input_ids": [[1, 2], [3]], "return_logprob": True, "sampling_params": {"max_new_tokens": 2, "n": 2}},
        {
            "input_ids": [1, 2, 3],
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "token_ids_logprob": [5],
            "return_text_in_logprobs": True,
        },
        {"text": "Hello", "stream": True},
    ],
    "createResponse": [
        INPUT,
        {**INPUT, "max_output_tokens": 60, "top_logprobs": 1, "metadata": {"a": "b"}, "instructions": "Be brief."},
        {**INPUT, "text": {"format": {"type": "text"}, "verbosity": "low"}, **REPORTS},
        {
            **INPUT,
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": PICTURE}]}],
            "reasoning": {"effort": "low"},
            **REPORTS,
        },
        {**INPUT, "previous_response_id": "resp_none"},
    ],
    "createScore": [
        {**MODEL, "query": "Is it?", "items": ["a", "b"], "labels": ["yes", "no"], "apply_softmax": True},
        {**MODEL, "query": [{"role": "user", "content": MEDIA}], "label_token_ids": [1, 2]},
        {**MODEL, "query": "Is it?"},
    ],
    # by servers of other models (test_served_embeddings.py); here they are refused
    "createEmbedding": [{**MODEL, "input": "a"}],
    "createCohereEmbedding": [{**MODEL, "texts": ["a"]}],
    "createRanking": [{**MODEL, "query": "a", "documents": ["b"]}],
    "createCohereRanking": [{**MODEL, "query": "a", "documents": ["b"]}],
    "createJinaRanking": [{**MODEL, "query": "a", "documents": ["b"]}],
    "createPairScores": [{**MODEL, "text_1": "a", "text_2": "b"}],
    "createSession": [{**MODEL, "system": "Be brief.", "ttl": 60}, {"ttl": 10**6}, {"model": "other"}],
    "createWarmup": [{"messages": [{"role": "user", "content": MEDIA}]}, {"messages": HI["messages"], "pin": True}],
    "tokenize": [{"prompt": "Hello", "return_token_strs": True}, {"messages": HI["messages"]}, {}],
    "detokenize": [{"tokens": [1, 2]}, {"tokens": [-1]}],
    "updateWeightsFromDisk": [{"model_path": "none"}, {"model_path": 1}],
    "updateWeightsFromTensor": [{"load_format": "safetensors", "serialized_named_tensors": ["AAAA"]}, {}],
    "initWeightsUpdateGroup": [
        {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 2, "world_size": 2, "backend": "gloo"},
        {},
    ],
    "updateWeightsFromDistributed": [{"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}, {}],
    "destroyWeightsUpdateGroup": [{"group_name": "none"}],
    "releaseMemoryOccupation": [{"tags": ["sofa"]}],
    "startProfile": [{"num_steps": 0}, {"num_steps": 10**30}],
    "abortRequest": [{"abort_all": True}, {"rid": "none"}, {}],
}
STREAMED = [
    (name, body)
    for name in ("createChatCompletion", "createCompletion", "createResponse")
    for body in BODIES[name]
    if not {"prompt_logprobs", "return_hidden_states"} & body.keys()
]
# Those without a body, and what stands in their paths.
PLAIN = {
    "listModels": [""],
    "getModel": ["tiny", "other"],
    "getHealth": [""],
    "getHealthOfEngine": [""],
    "getVersion": [""],
    "getMetrics": [""],
    "getServerInfo": [""],
    "flushCache": [""],
    "flushCacheByGet": [""],
    "getWeightVersion": [""],
    "resumeMemoryOccupation": [""],
    "sleep": [""],
    "wakeUp": [""],
    "isSleeping": [""],
    "continueGeneration": [""],
    "stopProfile": [""],
    "getFile": ["none"],
    "getBatch": ["none"],
    "getResponse": ["none"],
    "getSession": ["none"],
    "listSessions": [""],
}


@pytest.fixture
def client(shared_server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{shared_server.port()}", timeout=60) as client:
        yield client


@pytest.mark.parametrize("name", BODIES)
def test_answers_to_bodies(client: httpx.Client, name: str) -> None:
    for body in BODIES[name]:
        answer = ask(client, name, json=body)
        told = answer if isinstance(answer, dict) else {}  # several answers may be a list
        assert (told.get("error") or {}).get("type") != "server_error"


@pytest.mark.parametrize(("name", "body"), STREAMED)
def test_events(client: httpx.Client, name: str, body: dict[str, Any]) -> None:
    plain = ask(client, name, json=body)
    options = {} if name == "createResponse" else {"stream_options": {"include_usage": True}}
    events = ask(client, name, json={**body, "stream": True, **options})
    assert ("error" in events) == (plain.get("error") is not None)


@pytest.mark.parametrize("name", PLAIN)
def test_answers_to_nothing(client: httpx.Client, name: str) -> None:
    for place in PLAIN[name]:
        ask(client, name, place=place)


def test_what_was_asked_for_is_there(client: httpx.Client) -> None:
    """So the shapes above are not those of refusals."""
    chat = BODIES["createChatCompletion"]
    media, scored = (ask(client, "createChatCompletion", json=chat[at]) for at in (2, 5))
    assert [medium["kind"] for medium in media["mm_report"]["media"]] == ["image", "video"]
    assert media["warnings"]
    assert media["usage"]["timings"]["total_s"] > 0
    assert scored["prompt_logprobs"][1]
    assert scored["prompt_token_ids_logprobs"][1]
    assert ask(client, "createChatCompletion", json=chat[4])["choices"][0]["hidden_states"]
    response = ask(client, "createResponse", json=BODIES["createResponse"][3])
    assert response["usage"]["input_tokens_details"]["image_tokens"] > 0
    assert ask(client, "createWarmup", json=BODIES["createWarmup"][0])["items"]


def test_stored_responses(client: httpx.Client) -> None:
    own = ask(client, "createResponse", json=INPUT)["id"]
    assert ask(client, "getResponse", place=own)["id"] == own
    [item] = ask(client, "listInputItems", place=own, params={"limit": 1})["data"]
    assert item["type"] == "message"
    assert ask(client, "listInputItems", place=own, params={"limit": 0})["error"]["param"] == "limit"
    assert ask(client, "deleteResponse", place=own)["deleted"]
    assert ask(client, "deleteResponse", place=own)["error"]["code"] == "response_not_found"


def test_sessions(client: httpx.Client) -> None:
    own = ask(client, "createSession", json={**MODEL, "system": "Be brief."})["id"]

    def to(name: str, **body: Any) -> Any:
        return ask(client, name, place=own, json=body)

    appended = to("appendToSession", content=MEDIA)
    assert appended["session"]["media"] == 2
    assert appended["usage"]["prompt_tokens"] == appended["session"]["tokens"] > 0
    assert to("appendToSession", content="<|image_pad|>")["error"]["param"] == "content"
    assert to("askSession", content="What?", max_tokens=3, **REPORTS)["mm_report"]["media"]
    assert to("askSession", content="What?", max_tokens=3, keep=False, **LOGPROBS)["choices"][1]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    assert to("askSession", content="What?", max_tokens=3, **usage)[-1]["usage"]
    assert to("askSession", content="What?", temperature=9, stream=True)["error"]["param"] == "temperature"
    assert ask(client, "getSession", place=own)["messages"] == 5
    assert own in [one["id"] for one in ask(client, "listSessions")["data"]]
    assert ask(client, "deleteSession", place=own)["deleted"]
    for name in ("appendToSession", "askSession", "deleteSession"):
        body = {} if name == "deleteSession" else {"json": {"content": "a"}}
        assert ask(client, name, place=own, **body)["error"]["code"] == "session_not_found"


def test_sessions_of_live_video(client: httpx.Client) -> None:
    own = ask(client, "createSession", json={**MODEL, "live": {"fps": 1}})["id"]
    standing = {"content": "What?", "every": 0.1, "max_answers": 1, "max_tokens": 2}
    assert ask(client, "askSessionAgainAndAgain", place=own, json=standing | {"every": 0})["error"]["param"] == "every"
    url = {"url": "rtsp://camera/stream"}
    assert ask(client, "pullSessionFrames", place=own, json=url)["error"]["code"] == "host_not_allowed"
    assert ask(client, "stopSessionPull", place=own)["error"]["code"]
    assert ask(client, "deleteSession", place=own)["deleted"]


def test_files_and_batches(client: httpx.Client) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": HI}
    form = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    batches = []
    for content in (json.dumps(line), "", json.dumps({**line, "url": "/v1/score"})):
        files = {"file": ("in.jsonl", content.encode())}
        file = ask(client, "createFile", data=form, files=files)["id"]
        assert ask(client, "getFile", place=file)["purpose"] == "batch"
        assert ask(client, "getFileContent", place=file) == content.encode()
        given = {"input_file_id": file, "endpoint": line["url"], "completion_window": "24h", "metadata": {"a": "b"}}
        batches.append(ask(client, "createBatch", json=given)["id"])
    for batch in batches:
        while ask(client, "getBatch", place=batch)["status"] in ("validating", "in_progress", "finalizing"):
            pass
    done, empty, wrong = (ask(client, "getBatch", place=batch) for batch in batches)
    assert (done["status"], empty["status"], wrong["request_counts"]["failed"]) == ("completed", "failed", 1)
    assert done["usage"]["output_tokens"] > 0
    assert empty["errors"]["data"]
    assert len(ask(client, "listBatches", params={"limit": 2})["data"]) == 2
    assert ask(client, "cancelBatch", place=batches[0])["error"]["code"] == "batch_ended"
    assert ask(client, "createFile", data=form)["error"]["code"] == "invalid_form"
    refused = ask(client, "createTranscription", files={"file": ("a.wav", b"RIFF")})
    assert refused["error"]["code"] == "unsupported_content", "the built-in model takes no sounds"
    assert ask(client, "listFiles", params={"purpose": "batch"})["data"]
    assert ask(client, "deleteFile", place=file)["deleted"]
    assert ask(client, "deleteFile", place=file)["error"]["code"] == "file_not_found"


def test_what_operators_ask(client: httpx.Client) -> None:
    assert ask(client, "pauseGeneration")["paused"]
    assert "error" in ask(client, "pauseGeneration")
    assert ask(client, "getHealth") == {"status": "paused"}
    assert not ask(client, "continueGeneration")["paused"]
    assert ask(client, "startProfile", json={"activities": ["CPU", "CPU"]})["num_steps"] is None
    assert "error" in ask(client, "startProfile")
    assert "path" in ask(client, "stopProfile")
    long = {**HI, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=long) as answer:
        chunks = answer.iter_lines()
        name = json.loads(next(chunks).removeprefix("data: "))["id"]
        assert ask(client, "flushCache")["num_running_reqs"] == 1
        assert ask(client, "abortRequest", json={"rid": name})["aborted"] == [name]
        assert any("request_aborted" in line for line in chunks)


def test_adapters(client: httpx.Client) -> None:
    for load, unload in (
        ("loadLoraAdapter", "unloadLoraAdapter"),
        ("loadLoraAdapterToo", "unloadLoraAdapterToo"),
    ):
        refused = ask(client, load, json={"lora_name": "a", "lora_path": "/a"})
        assert "--enable-lora" in refused["error"]["message"]
        assert ask(client, unload, json={"lora_name": "a"})["error"]["code"] == "model_not_found"


def test_what_trainers_ask(client: httpx.Client, default_model: Path) -> None:
    assert ask(client, "updateWeightsFromDisk", json={"model_path": str(default_model)})["success"]
    assert ask(client, "releaseMemoryOccupation", json={"tags": ["kv_cache"]})["bytes"] > 0
    assert ask(client, "isSleeping")["is_sleeping"]
    assert ask(client, "resumeMemoryOccupation", json={})["success"]


def test_every_operation_is_tried_here() -> None:
    sources = (ROOT / "tests" / "vlmserve" / "test_openapi_answers.py").read_text()
    assert not [name for name in BY_ID if f'"{name}"' not in sources]
