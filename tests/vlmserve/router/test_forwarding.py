"""What becomes of a request: where it goes, what is tried again, and what the client sees."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.vlmserve.api.fake_engine import WAIT_S
from tests.vlmserve.router.rig import CHAT, FakeServer, fake_servers, routing
from tests.vlmserve.server_process import await_that

EVENTS = {"content-type": "text/event-stream"}


def refuses(status: int, **headers: str):
    return lambda path, given: (status, {"content-type": "application/json", **headers}, [b'{"error": {}}'])


def break_off(path: str, headers: dict[str, str]):
    return 200, {"content-type": "application/json"}, [b"", None]


def test_requests_and_answers_pass_unchanged(servers, router):
    body = json.dumps({"messages": [], "odd": [1, 2.5]}, indent=3).encode()
    sent = {"traceparent": "00-1-2-3", "X-Request-Id": "mine", "Authorization": "Bearer x"}
    sent |= {"Origin": f"http://127.0.0.1:{router.port}"}
    sent |= {"X-Forwarded-For": "1.2.3.4"}
    servers[0].script = servers[1].script = lambda path, headers: (
        201,
        {"x-odd": "1", "date": "then"},
        [b"some", b"thing"],
    )
    status, headers, answer = router.ask("POST", CHAT + "?a=%20b", body, sent)
    assert (status, answer, headers["x-odd"], headers["x-request-id"]) == (201, b"something", "1", "mine")
    assert headers["date"] != "then"
    [(method, path, got, came)] = servers[0].seen + servers[1].seen
    assert (method, path, came) == ("POST", CHAT, body)
    assert (got["traceparent"], got["x-request-id"], got["authorization"]) == ("00-1-2-3", "mine", "Bearer x")
    assert got["x-forwarded-for"] == "1.2.3.4", "what a proxy on this machine says of its client"
    assert not {"origin"} & got.keys()


@pytest.mark.parametrize("script", [refuses(429), refuses(502), refuses(503), break_off])
def test_what_has_not_begun_goes_elsewhere(servers, router, script):
    servers[0].script = script
    answers = [router.chat(f"{number}") for number in range(2)]
    assert [(status, answer["model"]) for status, answer in answers] == [(200, "b")] * 2
    assert servers[0].seen, "it was asked, too"


def test_the_last_refusal_is_the_answer(servers, router):
    servers[0].script = servers[1].script = refuses(429, **{"retry-after": "7"})
    status, headers, _ = router.ask("POST", CHAT, {"messages": []})
    assert (status, headers["retry-after"]) == (429, "7")
    servers[0].script = servers[1].script = break_off
    status, answer = router.chat()
    assert (status, answer["error"]["code"]) == (503, "no_server")
    assert servers[0].url in answer["error"]["message"]


def test_a_batch_is_begun_once(servers, router):
    servers[0].script = servers[1].script = break_off
    status, _, body = router.ask("POST", "/v1/batches", {"input_file_id": "file-1"})
    assert (status, json.loads(body)["error"]["code"]) == (502, "server_lost")
    assert len(servers[0].seen + servers[1].seen) == 1


def test_an_upload_that_was_refused_is_not_sent_again(servers, router):
    servers[0].script = servers[1].script = refuses(503)
    for _ in range(2):
        link = http.client.HTTPConnection("127.0.0.1", router.port, timeout=WAIT_S)
        with contextlib.closing(link):
            link.request("POST", "/v1/files", iter([b"some", b"thing"]))
            assert link.getresponse().status == 503
    assert [body for server in servers for *_, body in server.seen] == [b"something"] * 2


def test_nobody_is_left_out_for_one_broken_connection(servers):
    servers[0].script = break_off
    with routing("--replica", servers[0].url) as router:
        assert router.chat()[0] == 503
        servers[0].script = FakeServer("a").script
        assert router.chat()[0] == 200


def test_events_come_as_they_are_made_and_a_lost_server_ends_them_with_an_error(servers, router):
    go_on = threading.Event()
    for server in servers:
        server.script = lambda path, headers: (
            200,
            EVENTS,
            [b"data: 1\n\n", lambda: go_on.wait(WAIT_S), b"data: 2\n\n", None],
        )
    link = http.client.HTTPConnection("127.0.0.1", router.port, timeout=WAIT_S)
    link.request("POST", CHAT, json.dumps({"messages": [], "stream": True}), {"Content-Type": "application/json"})
    answer = link.getresponse()
    assert answer.read1() == b"data: 1\n\n", "before the second one is made"
    go_on.set()
    rest = answer.read()
    assert rest.startswith(b"data: 2\n\ndata: ")
    assert json.loads(rest.split(b"data: ")[-1])["error"]["code"] == "server_lost"
    assert len(servers[0].seen + servers[1].seen) == 1, "it is not asked again"
    link.close()


def test_any_other_answer_that_breaks_off_breaks_the_connection(servers, router):
    servers[0].script = servers[1].script = lambda path, headers: (200, {"content-length": "100"}, [b"half", None])
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        router.ask("POST", CHAT, {"messages": []})


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_is_left_by_the_router(servers, router, begun):
    for server in servers:
        first = [b"data: 1\n\n"] if begun else []
        server.script = lambda path, headers, of=server, first=first: (
            200,
            EVENTS,
            [*first, lambda: of.left.wait(WAIT_S), b"x"],
        )
    link = http.client.HTTPConnection("127.0.0.1", router.port, timeout=WAIT_S)
    link.request("POST", CHAT, json.dumps({"messages": []}), {"Content-Type": "application/json"})
    if begun:
        link.getresponse().read1()
    await_that(lambda: servers[0].seen + servers[1].seen, WAIT_S)
    link.sock.shutdown(socket.SHUT_RDWR)
    link.close()
    await_that(lambda: servers[0].left.is_set() or servers[1].left.is_set(), WAIT_S)


def test_an_upload_is_passed_on_while_it_comes_and_all_of_a_client_go_to_one_server(servers, router):
    def parts() -> Iterator[bytes]:
        yield b"x" * 100_000
        yield b"y" * 100_000

    for _ in range(3):
        link = http.client.HTTPConnection("127.0.0.1", router.port, timeout=WAIT_S)
        with contextlib.closing(link):
            link.request("POST", "/v1/files", parts(), {"Content-Type": "multipart/form-data; boundary=b"})
            assert link.getresponse().status == 200
    assert sorted(len(server.seen) for server in servers) == [0, 3]
    [holder] = [server for server in servers if server.seen]
    assert {body for *_, body in holder.seen} == {b"x" * 100_000 + b"y" * 100_000}


def test_an_id_leads_to_the_server_that_made_it(servers, router):
    for server in servers:
        server.script = lambda path, headers, of=server: (200, {}, [json.dumps({"id": f"resp-{of.name}"}).encode()])
    for number in range(4):
        made = json.loads(router.ask("POST", "/v1/responses", {"input": f"{number}" * 500})[2])["id"]
        again = json.loads(router.ask("POST", "/v1/responses", {"input": "x", "previous_response_id": made})[2])["id"]
        assert again == made
        assert router.ask("DELETE", f"/v1/responses/{made}")[0] == 200
        asked = {server.name: [path for method, path, *_ in server.seen if method == "DELETE"] for server in servers}
        assert f"/v1/responses/{made}" in asked[made[-1]]
    assert {server.name: len(server.seen) > 0 for server in servers} == {"a": True, "b": True}


def test_all_of_a_session_goes_to_one_server(servers, router):
    for server in servers:
        said = {"id": f"session-{server.name}", "data": [{"id": server.name}]}
        server.script = lambda path, headers, said=said: (200, {}, [json.dumps(said).encode()])
    for number in range(4):
        made = json.loads(router.ask("POST", "/v1/sessions", {"system": f"{number}" * 500})[2])["id"]
        for what in ("append", "ask"):
            answer = router.ask("POST", f"/v1/sessions/{made}/{what}", {"content": f"{number}" * 500})
            assert json.loads(answer[2])["id"] == made
    assert {server.name: len(server.seen) > 0 for server in servers} == {"a": True, "b": True}
    listed = json.loads(router.ask("GET", "/v1/sessions")[2])["data"]
    assert sorted(one["id"] for one in listed) == ["a", "b"]


@pytest.mark.parametrize("where", [0, 1])
def test_an_id_that_nobody_remembers_is_looked_for(servers, router, where):
    servers[where].things.add("files/file-7")
    part = {"type": "image_url", "image_url": {"file_id": "file-7"}}
    for _ in range(2):
        assert router.ask("POST", CHAT, {"messages": [{"role": "user", "content": [part]}]})[0] == 200
    assert [len(server.seen) for server in servers] == ([2, 0] if where == 0 else [0, 2])


def test_a_thing_of_a_server_that_is_gone_is_asked_of_one_that_shares_it(servers, router):
    def at() -> tuple[int, str | None]:
        status, _, body = router.ask("GET", "/v1/files/file-7")
        return status, json.loads(body).get("at")

    for server in servers:
        server.things.add("files/file-7")
    assert {at() for _ in range(4)} == {(200, "a")}
    servers[0].health = (503, {"error": {"message": "gone"}})
    await_that(lambda: router.states()[servers[0].url] == "unhealthy", WAIT_S)
    servers[1].things.clear()
    assert at() == (503, None), "a thing that only one server has"
    servers[1].things.add("files/file-7")
    assert {at() for _ in range(4)} == {(200, "b")}


def test_a_conversation_and_a_picture_stay_where_they_were(servers, router):
    def where(**fields) -> str:
        return router.chat(**fields)[1]["model"]

    first = where(text="x", session_id="s")
    assert {where(text=f"{number}", session_id="s") for number in range(6)} == {first}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    places = {
        json.loads(router.ask("POST", CHAT, {"messages": [{"role": "user", "content": [picture]}]})[2])["model"]
        for _ in range(6)
    }
    assert len(places) == 1
    assert len({where(text="long " * 200 + str(number)) for number in range(6)}) == 1
    assert {where(text=f"short {number}") for number in range(40)} == {"a", "b"}


def test_a_model_is_asked_of_a_server_that_has_it(servers):
    servers[1].model = "other"
    with routing("--replica", *(server.url for server in servers)) as router:
        await_that(lambda: all(worker.models for worker in router.workers), WAIT_S)
        assert {router.chat(f"{number}", model="other")[1]["model"] for number in range(4)} == {"b"}
        assert {router.chat(f"{number}", model="tiny")[1]["model"] for number in range(4)} == {"a"}
        models = json.loads(router.ask("GET", "/v1/models")[2])
        assert [model["id"] for model in models["data"]] == ["tiny", "other"]


def test_bad_bodies_are_the_servers_to_refuse_and_large_ones_the_routers(servers, router):
    servers[0].script = servers[1].script = refuses(400)
    for body in (b"{", b"[1]", b"", b'{"messages": 1, "n": "x", "max_tokens": true, "session_id": 5}'):
        assert router.ask("POST", CHAT, body)[0] == 400
    assert len(servers[0].seen + servers[1].seen) == 4
    with routing("--replica", servers[0].url, "--max-body-mib", "0.01") as small:
        status, _, body = small.ask("POST", CHAT, b"x" * 20_000)
        assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("size", [10, 400_000])
def test_bodies_of_all_sizes_are_looked_into(servers, router, size):
    body = {"messages": [{"role": "user", "content": "x" * size}], "session_id": "s"}
    names = {json.loads(router.ask("POST", CHAT, body)[2])["model"] for _ in range(3)}
    assert len(names) == 1


def test_a_form_is_not_read_as_json(servers):
    with routing("--replica", servers[0].url, "--max-json-values", "1000") as router:
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        assert router.ask("POST", "/v1/audio/transcriptions", b"," * 2000, headers)[0] == 200
        assert router.ask("POST", CHAT, b"," * 2000)[0] == 400


# ---- prefill and decode


def test_servers_that_work_for_others_are_only_watched():
    with (
        fake_servers(3) as (prefill, encode, decode),
        routing("--prefill", prefill.url, "--encode", encode.url, "--decode", decode.url) as router,
    ):
        await_that(lambda: set(router.states().values()) == {"healthy"}, WAIT_S)
        for number in range(4):
            assert router.chat(f"{number}" * 600)[0] == 200
        assert len(decode.seen) == 4
        assert not prefill.seen + encode.seen
        prefill.health = (503, {"error": {"message": "gone"}})
        await_that(lambda: router.states()[prefill.url] == "unhealthy", WAIT_S)
        assert router.chat()[0] == 200
