"""Models, health, metrics, keys, limits, and OpenAI's error body on every other path."""

from __future__ import annotations

import asyncio
import re
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.vlmserve.api.fake_engine import BODY, CHAT, MODEL, http_scope
from vlmserve import __version__


def assert_error(reply, status, kind="invalid_request_error"):
    assert reply.status_code == status, reply.text
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert reply.json()["error"]["type"] == kind


def figures(client) -> dict[tuple[str, ...], float]:
    reply = client.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain")
    for line in reply.text.splitlines():
        assert not line or line.startswith("#") or re.match(r"^[a-zA-Z_:][a-zA-Z0-9_:]*(\{.*\})? \S+$", line)
    found = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == MODEL
            found[(sample.name, *labels.values())] = sample.value
    return found


def test_models(client):
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"]) == (MODEL, "model")
    for written in (MODEL, MODEL.replace("/", "%2F")):
        assert client.get(f"/v1/models/{written}").json() == model
    assert_error(client.get("/v1/models/no-such-model"), 404, "not_found_error")


def test_version(client):
    assert client.get("/version").json() == {"version": __version__}


def test_metrics(client, served):
    served.scheduler.say("a red square")
    client.post(CHAT, json=BODY)
    client.post(CHAT, json={**BODY, "max_tokens": 50, "n": 2})
    client.post(CHAT, json={**BODY, "temperature": 9})
    client.get("/nowhere/at/all")
    found = figures(client)
    prompt = len(served.scheduler.requests[0].input_ids)
    whole = len(served.scheduler.tokenizer.encode("a red square")) + 1
    assert found["vlmserve:request_success_total", "length"] == 1
    assert found["vlmserve:request_success_total", "stop"] == 2
    assert found[("vlmserve:prompt_tokens_total",)] == 2 * prompt
    assert found[("vlmserve:prompt_tokens_cached_total",)] == 2 * (prompt // 2)
    assert found[("vlmserve:generation_tokens_total",)] == 4 + 2 * whole
    assert found[("vlmserve:inter_token_latency_seconds_count",)] == 3 + 2 * (whole - 1)
    for name in ("time_to_first_token", "e2e_request_latency", "request_time_per_output_token"):
        assert found[(f"vlmserve:{name}_seconds_count",)] == 3
    assert found["vlmserve:http_requests_total", CHAT, "200"] == 2
    assert found["vlmserve:http_requests_total", CHAT, "400"] == 1
    assert found["vlmserve:http_requests_total", "other", "404"] == 1
    assert found["vlmserve:requests_refused_total", "invalid_value"] == 1
    assert found["vlmserve:requests_refused_total", "not_found"] == 1
    assert found[("vlmserve:num_requests_running",)] == 0
    assert found[("vlmserve:kv_cache_usage_perc",)] == pytest.approx(0.3)
    assert found["vlmserve:embedding_cache_hits_total", "disk"] == 3
    assert found["vlmserve:embedding_cache_hits_total", "device"] == 0
    assert ("vlmserve:embedding_cache_hits_total", "host") not in found, "there is no such tier"
    assert found[("vlmserve:temporal_patches_encoded_total",)] == 0


def test_metrics_without_the_scheduler(client, served):
    served.scheduler.answers_stats = False
    began = time.monotonic()
    assert ("vlmserve:num_requests_running",) not in figures(client)
    assert time.monotonic() - began < 15, "a scrape does not wait as long as an operator"


def test_health_follows_the_engine(client, served):
    assert client.get("/health").status_code == 200
    served.frontend.fail_all("the scheduler died")
    assert_error(client.get("/health"), 503, "server_error")
    reply = client.post(CHAT, json=BODY)
    assert_error(reply, 503, "server_error")
    assert "the scheduler died" in reply.json()["error"]["message"]
    assert int(reply.headers["retry-after"]) > 0
    assert ("vlmserve:num_requests_running",) not in figures(client)


def test_api_keys(serve):
    _, client = serve(api_key="sésame")
    with client:
        for header in (None, "Bearer wrong", "Bearer ", "sésame", "Basic sésame", "Bearer sésamee"):
            headers = {} if header is None else {"Authorization": header.encode()}
            for reply in (client.post(CHAT, json=BODY, headers=headers), client.get("/v1/models", headers=headers)):
                assert_error(reply, 401, "authentication_error")
                assert reply.headers["www-authenticate"] == "Bearer"
        good = {"Authorization": "Bearer sésame".encode()}
        assert client.post(CHAT, json=BODY, headers=good).status_code == 200
        assert client.get("/nothing").status_code == 401
        for path in ("/health", "/metrics", "/version"):
            assert client.get(path).status_code == 200


def test_a_body_that_is_too_large(serve):
    _, client = serve(max_body_mib=0.01)
    with client:
        large = b" " * 20000
        for content in (large, iter([large[:9000], large[9000:]])):  # announced, and not
            reply = client.post(CHAT, content=content)
            assert_error(reply, 413)
            assert "--max-body-mib" in reply.json()["error"]["message"]
        assert client.post(CHAT, json=BODY).status_code == 200


@pytest.mark.parametrize(("headers", "parts_read"), [([(b"content-length", b"99999999")], 0), ([], 2)])
def test_no_more_of_a_large_body_is_read_than_allowed(serve, headers, parts_read):
    """The client goes on for ever; only an early answer ends this."""
    served, _ = serve(max_body_mib=1.5)
    read, sent = [], []

    async def receive():
        assert len(read) <= parts_read, "reads on"
        read.append(1)
        return {"type": "http.request", "body": bytes(2**20), "more_body": True}

    async def send(message):
        sent.append(message)

    asyncio.run(served.app(http_scope(CHAT, headers), receive, send))
    assert sent[0]["status"] == 413
    assert len(read) == parts_read


def test_a_full_house_answers_429(serve):
    served, client = serve({"max_running_requests": 2, "max_queued_requests": 1})
    with client:
        reply = client.post(CHAT, json={**BODY, "n": 4})
        assert_error(reply, 429, "rate_limit_error")
        assert int(reply.headers["retry-after"]) > 0
        assert "--max-queued-requests" in reply.json()["error"]["message"]
        assert client.post(CHAT, json={**BODY, "n": 3}).status_code == 200
    assert len(served.scheduler.requests) == 3


def test_a_request_may_choose_its_replica_and_there_is_room_for_what_all_can_take(serve):
    served, client = serve({"dp_size": 2, "max_running_requests": 2, "max_queued_requests": 3})
    routes = {CHAT: BODY, "/v1/completions": {"prompt": "hi"}, "/v1/responses": {"input": "hi"}}
    with client:
        for route, fields in routes.items():
            body = {"model": MODEL, **fields}
            before = len(served.scheduler.requests)
            for choice in ({}, {"data_parallel_rank": 0}, {"data_parallel_rank": 1}):
                assert client.post(route, json=body | choice).status_code == 200
            told = "below the number of replicas, which is 2 (setting --dp-size)"
            for rank, words in ((2, told), (-1, "0"), ("1", "")):
                reply = client.post(route, json=body | {"data_parallel_rank": rank})
                assert_error(reply, 400)
                assert "data_parallel_rank" in reply.json()["error"]["param"]
                assert words in reply.json()["error"]["message"]
            assert [request.data_parallel_rank for request in served.scheduler.requests[before:]] == [None, 0, 1]
        assert client.post(CHAT, json={**BODY, "n": 10}).status_code == 200
        assert client.post(CHAT, json={**BODY, "n": 11}).status_code == 429


def test_settings_of_the_engine_reach_requests(serve):
    served, client = serve({"sampling_defaults": "openai", "schedule_policy": "priority"})
    with client:
        assert client.post(CHAT, json={**BODY, "temperature": None, "priority": -5}).status_code == 200
    (request,) = served.scheduler.requests
    params = request.sampling_params
    assert (params.temperature, params.top_p, params.top_k, request.priority) == (1.0, 1.0, -1, -5)
