"""Servers that come, go, fall ill and recover; the router's own endpoints; its keys."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from tests.vlmserve.api.fake_engine import WAIT_S
from tests.vlmserve.router.rig import FakeServer, Router, routing
from tests.vlmserve.server_process import await_that
from vlmserve.router.command import read_settings
from vlmserve_common.errors import SettingsError


def names(router: Router, count: int = 6) -> set[str]:
    return {router.chat(f"{number}")[1]["model"] for number in range(count)}


def test_the_sick_get_nothing_until_they_are_well(servers, router):
    assert names(router) == {"a", "b"}
    servers[0].health = (503, {"error": {"message": "the scheduler is stopped"}})
    await_that(lambda: router.states()[servers[0].url] == "unhealthy", WAIT_S)
    assert names(router) == {"b"}
    shown = json.loads(router.ask("GET", f"/workers/{servers[0].url}")[2])
    assert shown["reason"] == "/health answers 503: the scheduler is stopped"
    servers[1].health = (200, {"status": "paused"})
    await_that(lambda: router.states()[servers[1].url] == "paused", WAIT_S)
    assert router.chat()[0] == 503
    status, _, body = router.ask("GET", "/health")
    assert status == 503
    assert "paused" in json.loads(body)["error"]["message"]
    servers[0].health = servers[1].health = (200, {"status": "ok"})
    await_that(lambda: set(router.states().values()) == {"healthy"}, WAIT_S)
    assert names(router, 20) == {"a", "b"}
    assert router.ask("GET", "/health")[0] == 200


def test_a_server_that_hangs_is_cut_off(servers):
    hangs = threading.Event()
    servers[0].script = lambda path, headers: (200, {}, [lambda: hangs.wait(WAIT_S), b"late"])
    words = ("--health-check-timeout-s", "0.2", "--health-failure-threshold", "2")
    with routing("--replica", servers[0].url, *words) as router:
        await_that(lambda: set(router.states().values()) == {"healthy"}, WAIT_S)
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(router.chat()[0]))
        asking.start()
        await_that(lambda: servers[0].seen, WAIT_S)
        servers[0].hangs = hangs
        asking.join(WAIT_S)
        hangs.set()
        assert answers == [503]


def test_a_server_that_drains_ends_what_it_does_and_gets_nothing_more(servers, router):
    go_on = threading.Event()
    servers[0].script = servers[1].script = lambda path, headers: (
        200,
        {},
        [lambda: go_on.wait(WAIT_S), b'{"model": "x"}'],
    )
    answers: list[tuple[int, object]] = []
    asking = threading.Thread(target=lambda: answers.append(router.chat()))
    asking.start()
    await_that(lambda: servers[0].seen + servers[1].seen, WAIT_S)
    busy, other = servers if servers[0].seen else servers[::-1]
    status, _, body = router.ask("DELETE", f"/workers/{busy.url}")
    assert (status, json.loads(body)["state"]) == (202, "draining")
    assert router.ask("DELETE", f"/workers/{busy.url}")[0] == 202, "again does nothing"
    other.script = FakeServer(other.name).script
    assert names(router) == {other.name}
    assert len(busy.seen) == 1
    assert router.states()[busy.url] == "draining"
    go_on.set()
    asking.join(WAIT_S)
    assert answers == [(200, {"model": "x"})]
    await_that(lambda: busy.url not in router.states(), WAIT_S)
    assert router.ask("DELETE", f"/workers/{busy.url}")[0] == 404


def test_what_does_not_end_in_time_is_cut_when_a_server_goes(servers):
    go_on = threading.Event()
    parts = [b"data: 1\n\n", lambda: go_on.wait(WAIT_S), b"data: 2\n\n"]
    servers[0].script = lambda path, headers: (200, {"content-type": "text/event-stream"}, parts)
    with routing("--replica", servers[0].url, "--drain-timeout-s", "0.1") as router:
        found: list[bytes] = []
        asking = threading.Thread(
            target=lambda: found.append(router.ask("POST", "/v1/completions", {"prompt": "x"})[2])
        )
        asking.start()
        await_that(lambda: servers[0].seen, WAIT_S)
        router.ask("DELETE", f"/workers/{servers[0].url}")
        asking.join(WAIT_S)
        go_on.set()
        assert b"server_lost" in found[0]
        await_that(lambda: not router.states(), WAIT_S)


def test_servers_come_while_it_runs(servers):
    with routing("--replica", servers[0].url) as router:
        assert names(router) == {"a"}
        status, _, body = router.ask("POST", "/workers", {"url": servers[1].url + "/"})
        assert (status, json.loads(body)["url"]) == (201, servers[1].url)
        assert names(router) == {"a", "b"}
        for body, wanted, word in (
            ({"url": servers[1].url}, 409, "is there already"),
            ({"url": "ftp://x"}, 400, "no server's URL"),
            ({"url": "http://x/v1"}, 400, "no server's URL"),
            ({"url": "http://x:99999"}, 400, "no server's URL"),
            ({"url": "http://x:1", "role": "cook"}, 400, "role"),
            ({"role": "replica"}, 400, "url"),
            ({"url": "http://x:1", "size": 1}, 400, "size"),
        ):
            status, _, answer = router.ask("POST", "/workers", body)
            assert (status, word in answer.decode()) == (wanted, True), answer
        assert router.ask("PATCH", "/workers")[0] == 405
        assert router.ask("POST", f"/workers/{servers[1].url}", {})[0] == 405


def test_load_that_others_make_counts(servers, router):
    servers[0].running = 50
    await_that(lambda: router.workers._choosers[True]._others[0] > 0, WAIT_S)
    assert names(router) == {"b"}


def test_figures_of_all_have_their_servers_as_a_label(servers, router):
    names(router)
    servers[0].running = 3
    text = router.ask("GET", "/metrics")[2].decode()
    for server, running in ((servers[0], 3), (servers[1], 0)):
        assert f'vlmserve:num_requests_running{{m="x",server="{server.url}"}} {running}.0' in text
        assert f'vlmserve:router_requests_total{{server="{server.url}",status="200"}}' in text
    assert text.count("# TYPE vlmserve:num_requests_running gauge") == 1
    assert 'vlmserve:router_http_requests_total{status="200"}' in text


def test_lists_of_all_servers_are_one(servers, router):
    def script(server: FakeServer, ids: list[int]):
        def answer(path, headers):
            items = [{"id": f"file-{number}", "created_at": number} for number in ids]
            return 200, {}, [json.dumps({"object": "list", "data": items, "has_more": False}).encode()]

        server.script = answer

    script(servers[0], [5, 3, 1])
    script(servers[1], [4, 3, 2])  # servers that share a store have the same

    def listed(query: str) -> list[int]:
        page = json.loads(router.ask("GET", f"/v1/files{query}")[2])
        return [item["created_at"] for item in page["data"]]

    assert listed("") == [5, 4, 3, 2, 1]
    assert listed("?order=asc&limit=2") == [1, 2]
    assert listed("?after=file-4&limit=2") == [3, 2]
    assert router.ask("GET", "/v1/files?limit=x")[0] == 400


def test_control_of_single_servers_is_not_passed_on(servers, router):
    status, _, body = router.ask("POST", "/pause_generation")
    assert status == 404
    assert "/workers" in json.loads(body)["error"]["message"]
    assert not servers[0].seen + servers[1].seen


def test_keys_are_checked_once(servers):
    words = ("--api-key", "sesame", "--admin-api-key", "root", "--upstream-api-key", "theirs")
    with routing("--replica", servers[0].url, *words) as router:

        def status(method: str, path: str, key: str, body: object = None) -> int:
            return router.ask(method, path, body, {"Authorization": f"Bearer {key}"})[0]

        for key, wanted in (("wrong", 401), ("root", 401), ("sesame", 200)):
            assert status("POST", "/v1/chat/completions", key, {"messages": []}) == wanted
        [(_, _, headers, _)] = servers[0].seen
        assert headers["authorization"] == "Bearer theirs"
        assert [status("GET", "/workers", key) for key in ("sesame", "root")] == [401, 200]
        assert [status("DELETE", f"/workers/{servers[0].url}", key) for key in ("sesame", "root")] == [401, 202]
        assert [status("GET", "/metrics", key) for key in ("sesame", "root")] == [401, 200]
        assert router.ask("GET", "/health")[0] in (200, 503)


def test_pages_of_others_get_nothing_from_a_router_without_keys(router):
    assert router.ask("GET", "/v1/models", headers={"Origin": "http://evil.example"})[0] == 403
    assert router.ask("GET", "/v1/models", headers={"Host": "evil.example"})[0] == 403


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("", "name the servers that answer: --replica URL... or --decode URL..."),
        ("--replica x", "--replica: 'x' is no server's URL; it must be http://HOST:PORT"),
        ("--replica http://a:1 http://a:1/", "http://a:1 is given twice"),
        ("--prefill http://a:1", "name the servers that answer"),
        ("--replica http://a:1 --port x", "--port is 'x'; it must be a whole number"),
    ],
)
def test_wrong_flags_get_a_line_each(words: str, complaint: str):
    with pytest.raises(SettingsError) as refused:
        read_settings(words.split())
    assert complaint in str(refused.value)


def test_the_upstream_key_may_be_a_variable(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("VLMSERVE_UPSTREAM_API_KEY", "theirs")
    monkeypatch.setenv("VLMSERVE_PORT", "7")
    settings = read_settings(["--replica", "http://a:1", "http://b:1", "--replica", "https://c"])
    assert (settings.upstream_api_key, settings.http.port) == ("theirs", 7)
    assert settings.servers == tuple(("replica", url) for url in ("http://a:1", "http://b:1", "https://c"))
