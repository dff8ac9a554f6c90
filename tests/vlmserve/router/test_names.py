"""Servers behind a DNS name: pods that come and go."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.vlmserve.api.fake_engine import WAIT_S
from tests.vlmserve.router.rig import FakeServer, Router, routing
from tests.vlmserve.router.test_workers import names
from tests.vlmserve.server_process import await_that
from vlmserve.router.command import read_settings
from vlmserve.router.names import servers_of
from vlmserve_common.errors import SettingsError

NAME = "dns+http://pods.test:8000"


class Dns:
    """What DNS says of pods.test: the addresses of these servers, or an error's number. looks: how often it was asked.

    Pods have addresses of their own and the same port; servers of a test have ports of their own and one address.
    """

    def __init__(self) -> None:
        self.says: list[FakeServer] | int = []
        self.looks = 0
        self._ask = socket.getaddrinfo

    def getaddrinfo(self, host, port, *args, **kwargs):
        if host != "pods.test":
            return self._ask(host, port, *args, **kwargs)
        self.looks += 1
        if isinstance(self.says, int):
            raise socket.gaierror(self.says, "what DNS said")
        places = [urlsplit(server.url) for server in self.says]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (place.hostname, place.port)) for place in places]

    def says_now(self, what: list[FakeServer] | int) -> None:
        """Change the answer, and wait until the router has dealt with it."""
        self.says, looks = what, self.looks
        await_that(lambda: self.looks > looks + 2, WAIT_S)


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Dns:
    dns = Dns()
    monkeypatch.setattr(socket, "getaddrinfo", dns.getaddrinfo)
    return dns


@pytest.fixture
def router(dns: Dns) -> Iterator[Router]:
    with routing("--replica", NAME) as router:
        yield router


def await_states(router: Router, **wanted: str) -> None:
    await_that(lambda: router.states() == wanted, WAIT_S)


def test_pods_come_and_go(servers, dns, router):
    first, second = servers
    assert router.ask("GET", "/health")[0] == 503
    dns.says = [first]
    await_states(router, **{first.url: "healthy"})
    assert names(router) == {"a"}
    dns.says = [first, second]
    await_states(router, **{first.url: "healthy", second.url: "healthy"})
    assert names(router) == {"a", "b"}
    dns.says = [second]
    await_states(router, **{second.url: "healthy"})
    assert names(router) == {"b"}
    dns.says = socket.EAI_NONAME
    await_states(router)
    assert router.chat()[0] == 503


def test_a_pod_that_goes_ends_what_it_does_and_may_come_back(servers, dns, router):
    first, second = servers
    dns.says = [first]
    await_states(router, **{first.url: "healthy"})
    go_on = threading.Event()
    usual, first.script = first.script, lambda path, headers: (200, {}, [lambda: go_on.wait(WAIT_S), b'{"model": "x"}'])
    answers: list[tuple[int, object]] = []
    asking = threading.Thread(target=lambda: answers.append(router.chat()))
    asking.start()
    await_that(lambda: first.seen, WAIT_S)
    dns.says = [second]
    await_states(router, **{first.url: "draining", second.url: "healthy"})
    assert names(router) == {"b"}
    dns.says_now([first, second])  # too early: it still drains
    assert router.states() == {first.url: "draining", second.url: "healthy"}
    first.script = usual
    go_on.set()
    asking.join(WAIT_S)
    assert answers == [(200, {"model": "x"})]
    await_states(router, **{first.url: "healthy", second.url: "healthy"})
    assert names(router) == {"a", "b"}


def test_while_dns_fails_all_stays_as_it_is(servers, dns, router):
    first, second = servers
    dns.says = [first]
    await_states(router, **{first.url: "healthy"})
    dns.says_now(socket.EAI_AGAIN)
    assert router.states() == {first.url: "healthy"}
    dns.says = [second]
    await_states(router, **{second.url: "healthy"})


def test_a_name_leaves_the_servers_of_others_alone(servers, dns):
    first, second = servers
    with routing("--replica", first.url, "--decode", NAME) as router:
        dns.says = [first, second]
        await_states(router, **{first.url: "healthy", second.url: "healthy"})
        shown = {worker.url: worker.role for worker in router.workers}
        assert shown == {first.url: "replica", second.url: "decode"}
        router.ask("DELETE", f"/workers/{second.url}")
        await_states(router, **{first.url: "healthy"})
        dns.says_now([second])  # an operator's word holds until the address was gone
        assert router.states() == {first.url: "healthy"}
        dns.says_now([])
        dns.says = [second]
        await_states(router, **{first.url: "healthy", second.url: "healthy"})


def test_names_are_looked_up_by_the_system(monkeypatch: pytest.MonkeyPatch):
    assert "http://127.0.0.1:80" in asyncio.run(servers_of("http://localhost"))
    both = [(socket.AF_INET6, 1, 6, "", ("fd00::1", 8000, 0, 0)), (socket.AF_INET, 1, 6, "", ("10.0.0.1", 8000))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: both)
    assert asyncio.run(servers_of("http://x:8000")) == {"http://[fd00::1]:8000", "http://10.0.0.1:8000"}


@pytest.mark.parametrize("url", ["dns+https://pods.test:8000", "dns+pods.test", "dns+http://pods.test:8000/v1"])
def test_wrong_names_are_refused(url: str):
    with pytest.raises(SettingsError, match="no server's URL"):
        read_settings(["--replica", url])
    assert read_settings(["--replica", NAME]).servers == (("replica", NAME),)
