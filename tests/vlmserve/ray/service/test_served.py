"""The app on a real cluster: answers, replicas that are killed, changed, added and removed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import serve

from tests.postgres import PostgresServer
from tests.vlmserve.ray.service.on_ray import NAME, OURS, Load, OnRay, a_cluster, await_that
from tests.vlmserve.server_process import SAMPLES, data_url
from vlmserve.commands.bench.processes import children_of
from vlmserve.ray.service.choosing import Order
from vlmserve.routing.replicas import Demand

pytestmark = pytest.mark.slow
MODEL = "vlmserve-default"
GET_HEALTH = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "GET",
    "scheme": "http",
    "path": "/health",
    "raw_path": b"/health",
    "query_string": b"",
    "root_path": "",
    "headers": [],
}


@pytest.fixture(scope="module")
def on_ray() -> Iterator[OnRay]:
    with a_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two(on_ray: OnRay) -> OnRay:
    """An app of two replicas."""
    on_ray.deploy(replicas=2)
    return on_ray


def answer_of(number: int | None, scope: dict[str, Any], demand: Demand) -> tuple[str, int, bytes]:
    """Ask a replica as a front does: return its name, and its answer's status and body."""
    answer = serve.get_deployment_handle("Server", NAME).options(stream=True).answer
    name, *batches = list(answer.remote(Order(demand=demand, number=number, scope=scope, body=b"")))
    messages = [message for batch in batches for message in batch]
    return name, messages[0]["status"], b"".join(message.get("body", b"") for message in messages)


def ask(on_ray: OnRay, content: Any, **more: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return on_ray.client().chat.completions.create(model=MODEL, messages=messages, **more)


def test_clients_are_answered_through_two_replicas(two: OnRay) -> None:
    picture = {"type": "image_url", "image_url": {"url": data_url(SAMPLES / "shapes.png")}}
    content = [picture, {"type": "text", "text": "Describe the picture."}]
    whole = ask(two, content, max_tokens=16, temperature=0).choices[0]
    parts = list(ask(two, content, max_tokens=16, temperature=0, stream=True))
    assert len(parts) > 4
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == whole.message.content
    assert [model.id for model in two.client().models.list()] == [MODEL]


def test_files_and_batches_are_found_again(two: OnRay) -> None:
    client = two.client()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body})
        for number in range(3)
    ]
    file = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    await_that(lambda: client.batches.retrieve(batch.id).status == "completed")
    output = client.batches.retrieve(batch.id).output_file_id
    assert output is not None
    assert len(client.files.content(output).text.splitlines()) == 3
    first = client.responses.create(model=MODEL, input="Hello.", max_output_tokens=4)
    second = client.responses.create(model=MODEL, input="And?", max_output_tokens=4, previous_response_id=first.id)
    assert second.previous_response_id == first.id


def test_a_beginning_goes_where_it_was(two: OnRay) -> None:
    def replica_of(number: int, beginning: str) -> str:
        keys = tuple(beginning[: end + 1].encode() for end in range(8))
        name, status, _ = answer_of(None, GET_HEALTH, Demand(rids=(f"{beginning}{number}",), tokens=256, prefix=keys))
        assert status == 200
        return name

    first = replica_of(0, "a" * 8)
    went: dict[str, str] = {}

    def other_goes_elsewhere() -> bool:
        letter = chr(ord("b") + len(went))
        went[letter] = replica_of(0, letter * 8)
        return went[letter] != first

    await_that(other_goes_elsewhere)  # what the test before asked for may count as work of one, for a second
    letter, other = went.popitem()
    assert [replica_of(number, "a" * 8) for number in range(1, 4)] == [first] * 3
    assert [replica_of(number, letter * 8) for number in range(1, 4)] == [other] * 3


def test_errors_are_those_of_a_server(two: OnRay) -> None:
    import httpx2

    with httpx2.Client(base_url=two.url) as client:
        for path, status, code in (("/v1/nothing", 404, None), ("/flush_cache", 404, "not_found")):
            answer = client.post(path, json={})
            assert answer.status_code == status
            assert answer.json()["error"]["code"] == code or code is None
        answer = client.post("/v1/chat/completions", content=b"{")
        assert answer.status_code == 400
        assert answer.headers["x-request-id"]
        assert client.get("/health").json() == {"status": "ok"}


def test_a_killed_replica_costs_nobody_else_an_answer(two: OnRay) -> None:
    load = Load(two)
    load.await_more(12)
    victim = two.processes(f"ray::ServeReplica:{NAME}:Server")[0]
    its_own = children_of(victim)
    os.kill(victim, signal.SIGKILL)
    load.await_more(12)
    await_that(lambda: len(set(two.processes(f"ray::ServeReplica:{NAME}:Server")) - {victim}) == 2)
    await_that(lambda: two.running() == 2)
    load.await_more(6)
    outcomes = load.stop()
    assert outcomes["ok"] >= 30
    assert set(outcomes) <= {"ok", "503", "replica_lost"}
    assert outcomes["503"] + outcomes["replica_lost"] <= 6, "no more than were under way"
    await_that(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in its_own))


def test_a_dead_engine_is_replaced(two: OnRay) -> None:
    before = two.processes("scheduler")
    load = Load(two, clients=4)
    load.await_more(4)
    os.kill(before[0], signal.SIGKILL)
    await_that(lambda: before[0] not in two.processes("scheduler") and len(two.processes("scheduler")) == 2)
    await_that(lambda: two.running() == 2)
    load.await_more(4)
    outcomes = load.stop()
    assert set(outcomes) <= {"ok", "503", "engine_unavailable", "replica_lost"}


def test_a_changed_app_takes_over_without_a_lost_request(two: OnRay, postgres: PostgresServer, tmp_path: Path) -> None:
    load = Load(two, clients=4)
    load.await_more(4)
    two.deploy(replicas=2, database_url=postgres.new_database(), file_store_url=tmp_path.as_uri())
    load.await_more(4)
    assert load.stop().keys() == {"ok"}
    sent = two.client().files.create(file=("a.jsonl", b"{}"), purpose="batch")
    scope = GET_HEALTH | {"path": f"/v1/files/{sent.id}/content"}
    answers = [answer_of(number, scope, Demand(rids=(f"file{number}",))) for number in range(2)]
    assert len({name for name, _, _ in answers}) == 2
    assert [body for _, _, body in answers] == [b"{}"] * 2


def test_nothing_is_left_of_a_deleted_app(two: OnRay) -> None:
    load = Load(two, clients=4, tokens=64)
    load.await_more(4)
    assert two.processes(*OURS)
    two.delete()
    outcomes = load.stop()
    assert set(outcomes) <= {"ok", "404", "503"}, "those under way were waited for"


def test_replicas_are_added_for_work_and_removed_without(on_ray: OnRay) -> None:
    on_ray.deploy(
        replicas=1, max_replicas=2, max_running_requests=2, upscale_delay_s=1, downscale_delay_s=3, target_use=0.9
    )
    assert on_ray.running() == 1
    load = Load(on_ray, clients=8, tokens=96)
    await_that(lambda: on_ray.running() == 2)
    load.await_more(4)
    assert load.stop().keys() == {"ok"}
    await_that(lambda: on_ray.running() == 1)
    on_ray.delete()
