"""Fetching by URL: what is fetched, and everything that is refused, in time and with a reason."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import os
import random
import ssl
import threading
import time

import httpcore2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from processors.fetch import fetching
from processors.fetch.addresses import NameLookup, is_public_address
from processors.fetch.fetching import BlockingFetcher, MediaFetcher
from processors.fetch.limits import FetchSettings
from tests.processors.web import BODY, TLS, closed_port, serve
from vlmserve_common.errors import BadRequestError

SOMEWHERE = "93.184.216.34"


@pytest.fixture(scope="module")
def web():
    with serve() as server:
        yield server


def fetcher(**settings):
    resolver = settings.pop("resolver", None)
    context = settings.pop("ssl_context", None)
    settings = {"allow_private_media": True, "timeout_s": 10.0, **settings}
    more = {} if resolver is None else {"resolver": resolver}
    return MediaFetcher(FetchSettings(**settings), ssl_context=context, **more)


def fetch(url, **settings):
    return asyncio.run(fetcher(**settings).fetch(url))


def refused(url, match, **settings):
    with pytest.raises(BadRequestError, match=match) as caught:
        asyncio.run(fetcher(**settings).fetch(url, param="messages[0].content[1]"))
    assert caught.value.status == 400
    assert caught.value.param == "messages[0].content[1]"
    assert caught.value.code == "invalid_media_url"
    return caught.value


# ---------------------------------------------------------------- data:


def b64(data):
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1000])
def test_data_url(size):
    data = os.urandom(size)
    assert fetch(f"data:image/png;base64,{b64(data)}") == data


@pytest.mark.parametrize(
    "url",
    [
        "data:;base64,aGk/Pg==",
        "DATA:image/png;charset=x;BASE64,aGk/Pg==",
        "data:image/png;base64,aGk/Pg",
        "data:image/png;base64,aGk%2FPg%3D%3D",
        "data:image/png;base64, aGk/\r\n Pg==\n",
        "data:image/png;base64,aGk%2F%0APg==",
    ],
)
def test_data_url_spellings(url):
    assert fetch(url) == b"hi?>"


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("data:image/png;base64,@@@not-base64@@@", "not valid base64"),
        ("data:image/png;base64,aGk/P", "not valid base64"),
        ("data:image/png;base64,aGk=Pg==", "not valid base64"),
        ("data:image/png;base64,aGk_Pg==", "not valid base64"),
        ("data:image/png;base64,aGk/Pg==é", "foreign character 'é'"),
        ("data:image/png;base64", "comma"),
        ("data:image/png,aGk/Pg==", "is not base64"),
    ],
)
def test_data_url_refused(url, match):
    refused(url, match)


@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_large_data_url_is_decoded_piece_by_piece(monkeypatch, more):
    """Each holds Python's lock, and with it the event loop."""
    data = random.Random(0).randbytes(700_000 + more)
    lines = base64.encodebytes(data).decode()  # with line breaks
    whole = b64(data)
    sizes = []
    decode = base64.b64decode
    monkeypatch.setattr(base64, "b64decode", lambda text, **how: sizes.append(len(text)) or decode(text, **how))
    for text in (lines, whole, whole.rstrip("=")):
        sizes.clear()
        assert fetch("data:;base64," + text) == data
        assert len(sizes) > 2
        assert max(sizes) <= 256 * 1024
    refused("data:;base64," + b64(data[:196_607]) + whole, "not valid base64")
    refused("data:;base64," + whole[:400_000] + "*" + whole[400_001:], "not valid base64")


@pytest.mark.parametrize("shift", [0, 1])
def test_percent_encoding_is_decoded_piece_by_piece(monkeypatch, shift):
    """Each byte of it becomes an object: 6 MiB took 477 MiB."""
    data = random.Random(0).randbytes(150_000)
    text = b64(data)
    escaped = text[:shift] + "".join(f"%{ord(letter):02x}" for letter in text[shift:])
    sizes = []
    unquote = fetching.unquote_to_bytes
    monkeypatch.setattr(fetching, "unquote_to_bytes", lambda piece: sizes.append(len(piece)) or unquote(piece))
    assert fetch("data:;base64," + escaped) == data
    assert fetch("data:;base64," + text.replace("/", "%2F").replace("+", "%2b")) == data
    assert len(sizes) > 2
    assert max(sizes) <= 256 * 1024
    for broken in ("%", "%4", "%zz", "%%41"):
        refused("data:;base64," + escaped[: 262_144 - len(broken)] + broken, "not valid base64")
        refused("data:;base64," + escaped + broken, "not valid base64")


def test_data_url_is_measured_before_it_is_decoded(monkeypatch):
    assert fetch("data:;base64," + b64(bytes(999)), max_bytes=999) == bytes(999)
    refused("data:;base64," + b64(bytes(1000)), "the limit is 999 .*--media-max-bytes", max_bytes=999)
    monkeypatch.setattr(base64, "b64decode", lambda *_, **__: pytest.fail("decoded"))
    refused("data:;base64," + b64(bytes(5000)), "the limit is 999", max_bytes=999)


# ---------------------------------------------------------------- other schemes


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("", "empty media URL"),
        ("::::", "is not a media URL"),
        ("/etc/hostname", "is not a media URL"),
        ("ftp://127.0.0.1/x.png", "scheme 'ftp' is not supported"),
        ("javascript:alert(1)", "scheme 'javascript'"),
        ("http:///x.png", "without a host"),
        ("http:x.png", "host"),
        ("http://[::1/x.png", "malformed|Invalid"),
        ("http://host:99999/", "malformed"),
        ("http://host:x/", "malformed"),
        ("http://a%2eb/", "malformed"),
        ("http://[fe80::1%25eth0]/", "malformed"),
        ("https://user:secret@example.com/x.png", "user name or password"),
        ("http://\udcff/", "malformed|Invalid|cannot"),
        ("http://" + "a" * 300 + "/", "cannot|malformed"),
        ("http://exa\0mple/", "malformed|Invalid|cannot"),
    ],
)
def test_refused_urls(url, match):
    def no_such_host(host, port):
        raise OSError("no such host")

    refused(url, match, resolver=no_such_host)


def test_long_urls_are_shortened_in_messages():
    assert len(refused("nonsense" * 10_000, "not a media URL").message) < 300


# ---------------------------------------------------------------- file:


def test_files_are_refused_by_default(tmp_path):
    (tmp_path / "a").write_bytes(BODY)
    refused(f"file://{tmp_path}/a", "--allowed-local-media-path")


def test_files_below_the_allowed_folder(tmp_path):
    folder = tmp_path / "media"
    (folder / "a" / "a").mkdir(parents=True)
    (folder / "a" / "a" / "a b.png").write_bytes(BODY)
    (folder / "link").symlink_to(folder / "a")
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "out").symlink_to(tmp_path / "secret")
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "x").write_bytes(b"secret")
    os.mkfifo(folder / "pipe")
    allowed = {"allowed_local_media_path": str(folder)}

    assert fetch(f"file://{folder}/a/a/a%20b.png", **allowed) == BODY
    assert fetch(f"file://localhost{folder}/link/../a/./a/a b.png", **allowed) == BODY
    assert fetch(f"file://{folder}/link/a/a b.png", **allowed) == BODY
    for outside in (f"{folder}/out", f"{folder}/../secret", f"{folder}/%2e%2e/secret", f"{tmp_path}/media2/x", "/",
                    f"{folder}", f"{folder}/", "/etc/hostname"):  # fmt: skip
        refused(f"file://{outside}", "not below the folder", **allowed)
    refused(f"file://{folder}/missing", "No such file", **allowed)
    refused(f"file://{folder}/a", "not a regular file", **allowed)
    refused(f"file://{folder}/pipe", "not a regular file", **allowed)
    refused(f"file://otherhost{folder}/a/a", "not of the form", **allowed)
    refused(f"file://{folder}/a%00b", "not of the form", **allowed)
    refused(f"file://{folder}/a/a/a b.png", "the limit is 5", max_bytes=5, **allowed)


@pytest.mark.parametrize("url", ["file://[", "file://]/x", "file://\u2100/x", "file:///a\ud800", "file:a"])
def test_what_cannot_be_a_path_is_refused(tmp_path, url):
    refused(url, "is not of the form file:///absolute/path", allowed_local_media_path=str(tmp_path))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=st.sampled_from(["file:", "file://", "file:///"]),
    rest=st.text(st.one_of(st.sampled_from("/[]@:%?#.\0\u2100\ud800"), st.characters()), max_size=12),
)
def test_any_file_url_is_refused_and_nothing_worse(tmp_path, start, rest):
    with pytest.raises(BadRequestError):
        fetch(start + rest, allowed_local_media_path=str(tmp_path))


def test_a_link_slipped_in_after_the_check_is_not_followed(tmp_path, monkeypatch):
    folder = tmp_path / "media"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "x").write_bytes(BODY)
    (tmp_path / "x").write_bytes(b"secret")
    real = os.path.realpath

    def realpath_then_swap(path, **options):
        resolved = real(path, **options)
        if resolved.endswith("/x"):
            (folder / "sub").rename(folder / "old")
            (folder / "sub").symlink_to(tmp_path)
        return resolved

    monkeypatch.setattr(os.path, "realpath", realpath_then_swap)
    refused(f"file://{folder}/sub/x", "cannot read", allowed_local_media_path=str(folder))


# ---------------------------------------------------------------- http:


def test_http(web):
    assert fetch(web.url("/good")) == BODY
    assert fetch(web.url("/empty")) == b""
    headers = {name.lower(): value for name, value in web.headers[-1].items()}
    assert headers["host"] == f"127.0.0.1:{web.port}"
    assert headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("/missing", "HTTP status 404"),
        ("/error", "HTTP status 500"),
        ("/no_content", "HTTP status 204"),
        ("/zipped", "Content-Encoding 'gzip'"),
        ("/nowhere", "302 without a Location"),
        ("/short", "cannot fetch"),
        ("/garbage", "cannot fetch"),
        ("/to?/to", "302 without a Location"),
        ("/to?file:///etc/hostname", "redirected to a file URL"),
        ("/to?ftp://127.0.0.1/", "redirected to a ftp URL"),
        ("/to?data:image/png;base64,aGk=", "redirected to a data URL"),
        ("/to?http://user@127.0.0.1/", "redirected to a URL with a user name"),
        ("/to?http://[", "redirected to a malformed URL"),
        ("/hops?6", "more than 5 redirects .*--media-max-redirects"),
    ],
)
def test_http_answers_that_are_refused(web, path, match):
    refused(web.url(path), match)


def test_redirects_are_followed(web):
    assert fetch(web.url("/hops?5")) == BODY
    assert fetch(web.url(f"/to?{web.url('/good')}")) == BODY
    assert fetch(web.url("/good"), max_redirects=0) == BODY
    refused(web.url("/hops?1"), "more than 0 redirects", max_redirects=0)


def test_size_limit(web):
    assert fetch(web.url("/size?1000"), max_bytes=1000) == bytes(1000)
    refused(web.url("/size?1001"), "1001 bytes, more than the limit of 1000 .*--media-max-bytes", max_bytes=1000)
    refused(web.url("/claims?99999999999"), "99999999999 bytes, more than", max_bytes=1000)
    refused(web.url("/endless"), "more than the limit of 300000 bytes", max_bytes=300_000)


@pytest.mark.parametrize("path", ["/stall", "/drip", "/drip_headers", "/claims?50"])
def test_the_deadline_covers_the_whole_answer(web, path):
    start = time.monotonic()
    refused(web.url(path), r"did not deliver within 0\.3 s .*--media-timeout-s", timeout_s=0.3)
    assert time.monotonic() - start < 5


def test_the_deadline_covers_the_name_lookup():
    release = threading.Event()
    start = time.monotonic()
    try:
        refused(
            "http://media.example/x",
            "did not deliver within 0.1 s",
            timeout_s=0.1,
            resolver=lambda host, port: release.wait(5) and [],
        )
        assert time.monotonic() - start < 2.5
    finally:
        release.set()


def test_one_deadline_for_all_redirects(web):
    calls = []

    def slow_resolver(host, port):
        calls.append(host)
        threading.Event().wait(0.1)
        return ["127.0.0.1"]

    refused(
        web.url("/hops?100", host="media.example"), "did not deliver", timeout_s=0.35, max_redirects=100,
        resolver=slow_resolver,
    )  # fmt: skip
    assert 2 <= len(calls) <= 4


def test_a_dead_address_does_not_hide_a_live_one(web):
    resolver = lambda host, port: ["127.0.0.9", "127.0.0.1"]  # noqa: E731
    assert fetch(web.url("/good", host="media.example"), resolver=resolver) == BODY


def test_proxies_of_the_environment_are_ignored(web, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{closed_port()}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert fetch(web.url("/good")) == BODY


# ---------------------------------------------------------------- where it may go


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0x7f.0.0.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
    ],
)
def test_this_machine_is_refused_by_default(web, host):
    before = len(web.paths)
    refused(web.url("/good", host=host), "or reserved address.*--allow-private-media", allow_private_media=False)
    assert len(web.paths) == before, "not even connected to"


def test_one_private_address_among_public_ones_is_refused():
    for answer in ([SOMEWHERE, "10.0.0.1"], ["::1", SOMEWHERE]):
        refused(
            "http://media.example/", "private or reserved", allow_private_media=False,
            resolver=lambda host, port, answer=answer: answer,
        )  # fmt: skip


@pytest.fixture
def connections(web, monkeypatch):
    """Every connection lands on the test server, whatever its address, and is written down."""
    seen = []
    connect = httpcore2.AnyIOBackend.connect_tcp

    async def connect_tcp(self, host, port, *args, **kwargs):
        seen.append(host)
        return await connect(self, "127.0.0.1", web.port, *args, **kwargs)

    monkeypatch.setattr(httpcore2.AnyIOBackend, "connect_tcp", connect_tcp)
    return seen


def test_rebinding_a_name_gains_nothing(connections):
    """The name server answers with a public address first and a private one from then on."""
    answers = [[SOMEWHERE]]
    asked = []

    def resolver(host, port):
        asked.append(host)
        return answers.pop(0) if answers else ["127.0.0.1"]

    safe = {"resolver": resolver, "allow_private_media": False}
    assert fetch("http://rebind.example/good", **safe) == BODY
    assert asked == ["rebind.example"], "looked up once"
    assert connections == [SOMEWHERE], "connected to what was checked"
    refused("http://rebind.example/good", "private or reserved", **safe)
    assert connections == [SOMEWHERE]


def test_every_redirect_is_checked_again(connections):
    names = {"public.example": [SOMEWHERE], "inside.example": ["10.1.2.3"]}
    settings = {"allow_private_media": False, "resolver": lambda host, port: names.get(host, [host])}
    refused("http://public.example/to?http://inside.example/good", "'inside.example' is at a private", **settings)
    refused("http://public.example/to?http://127.0.0.1/good", "'127.0.0.1' is at a private", **settings)
    refused("http://public.example/to?//inside.example/good", "'inside.example' is at a private", **settings)
    assert connections == [SOMEWHERE] * 3


def test_allowed_domains(connections):
    settings = {
        "allow_private_media": False,
        "allowed_media_domains": ("media.example", ".cdn.example"),
        "resolver": lambda host, port: [SOMEWHERE],
    }
    for host in ("media.example", "MEDIA.example", "media.example.", "a.cdn.example", "a.b.cdn.example"):
        assert fetch(f"http://{host}/good", **settings) == BODY
    for host in ("cdn.example", "xmedia.example", "media.example.evil.example", "a.media.example"):
        refused(f"http://{host}/good", "--allowed-media-domains", **settings)
    refused("http://media.example/to?http://evil.example/good", "redirected to host 'evil.example'", **settings)


# ---------------------------------------------------------------- https:


def test_tls_checks_the_certificate_against_the_name():
    context = ssl.create_default_context(cafile=TLS / "media.example.cert.pem")
    with serve(tls=True) as server:
        trusting = {"resolver": lambda host, port: ["127.0.0.1"], "ssl_context": context}
        url = server.url("/good", host="media.example", scheme="https")
        assert fetch(url, **trusting) == BODY
        assert server.server_names == ["media.example"]
        refused(server.url("/good", host="other.example", scheme="https"), "(?i)certificate|hostname", **trusting)
        assert server.server_names[1] == "other.example"
        refused(url, "(?i)certificate", resolver=trusting["resolver"])
        assert server.paths == ["/good"]


def test_tls_that_never_shakes_hands(web):
    with serve() as plain:
        plain.url("/")
        refused(plain.url("/good", scheme="https"), "cannot fetch|did not deliver", timeout_s=2)


# ---------------------------------------------------------------- several at a time


def test_cancelling_ends_the_transfer():
    async def scenario():
        with serve() as server:
            loading = asyncio.create_task(fetcher(timeout_s=60).fetch(server.url("/until_gone")))
            assert await asyncio.to_thread(server.stalled.wait, 20)
            loading.cancel()
            await asyncio.wait([loading])
            assert await asyncio.to_thread(server.gone.wait, 20), "the connection is closed"

    asyncio.run(scenario())


def test_one_host_keeps_nobody_waiting_but_its_own(web):
    """However many of its URLs there are, and however long it takes."""

    async def scenario():
        one = fetcher(timeout_s=60, max_per_host=2)
        with serve() as slow:
            stuck = [asyncio.create_task(one.fetch(slow.url("/stall"))) for _ in range(40)]
            assert await asyncio.to_thread(slow.stalled.wait, 20)
            assert await one.fetch(web.url("/good", host="localhost")) == BODY
            assert len(slow.paths) <= 2
            for task in stuck:
                task.cancel()
            await asyncio.wait(stuck)
            slow.release.set()
            assert await one.fetch(slow.url("/good")) == BODY, "what was cancelled gave its turn back"

    asyncio.run(scenario())


def test_large_bodies_wait_for_memory_and_the_deadline_waits_with_them(web):
    size = 3 * 2**20

    async def scenario():
        one = fetcher(memory_mib=4, timeout_s=1.0)
        with one.claim() as first:
            assert len(await one.fetch(web.url(f"/size?{size}"), claim=first)) == size
            with one.claim() as second, one.claim() as small:
                waits = asyncio.create_task(one.fetch(web.url(f"/size?{size}"), claim=second))
                done, _ = await asyncio.wait([waits], timeout=1.5)
                assert not done
                assert await one.fetch(web.url("/good"), claim=small) == BODY, "little ones do not wait"
                first.__exit__(None, None, None)
                assert len(await waits) == size

    asyncio.run(scenario())


def test_threads_without_a_loop(web):
    blocking = BlockingFetcher(FetchSettings(allow_private_media=True, timeout_s=60))
    assert blocking.fetch(web.url("/good")) == BODY
    failures = []

    def run(url):
        with pytest.raises(BadRequestError) as caught:
            blocking.fetch(url)
        failures.append(caught.value)

    with serve() as server:
        thread = threading.Thread(target=run, args=(server.url("/stall"),))
        thread.start()
        assert server.stalled.wait(20)
        blocking.close()
        thread.join(20)
        assert not thread.is_alive()
    run(web.url("/good"))
    assert ["not fetched" in error.message for error in failures] == [True] * 2


# ---------------------------------------------------------------- which addresses are public, and looking hosts up


PRIVATE = """
127.0.0.1 127.8.9.10 0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 172.16.0.1 172.31.255.254 192.168.0.1 169.254.169.254
169.254.0.1 100.64.0.1 100.127.255.254 100.100.100.200 168.63.129.16 192.0.0.192 192.0.2.1 198.18.0.1 198.51.100.7
203.0.113.9 192.88.99.1 224.0.0.1 239.255.255.250 240.0.0.1 255.255.255.255
:: ::1 fe80::1 fe80::1%eth0 fec0::1 fc00::1 fd00:ec2::254 ff02::1 2001:db8::1 3fff::1 2001:2::1 100::1 4000::1 5f00::1
::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 ::127.0.0.1 ::10.0.0.1 ::8.8.8.8
64:ff9b::127.0.0.1 64:ff9b::a00:1 64:ff9b::169.254.169.254 64:ff9b:1::8.8.8.8
2002:7f00:1::1 2002:a00:1::1 2002:a9fe:a9fe::1 2001:0:4136:e378:8000:63bf:3fff:fdd2
2a00:1450:4001:80b:0:5efe:127.0.0.1 2a00:1450:4001:80b:200:5efe:10.0.0.1
"""
PUBLIC = """
8.8.8.8 1.1.1.1 93.184.216.34 172.15.255.255 172.32.0.1 100.63.255.255 100.128.0.1 169.253.1.1 223.255.255.254
2606:4700:4700::1111 2a00:1450:4001:80b::200e ::ffff:8.8.8.8 64:ff9b::8.8.8.8 2002:808:808::1
2a00:1450:4001:80b:0:5efe:8.8.8.8
"""


@pytest.mark.parametrize(
    ("address", "public"), [*((one, False) for one in PRIVATE.split()), *((one, True) for one in PUBLIC.split())]
)
def test_which_are_public(address, public):
    assert is_public_address(ipaddress.ip_address(address)) is public


def test_so_many_names_at_a_time_are_looked_up_and_no_more():
    release = threading.Event()

    async def scenario():
        lookup = NameLookup(lambda host, port: release.wait(20) and ["1.1.1.1"], most=2)
        stuck = [asyncio.create_task(lookup.resolve("media.example", 80)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OSError, match="too many host names"):
            await lookup.resolve("other.example", 80)
        release.set()
        await asyncio.gather(*stuck)
        assert await lookup.resolve("other.example", 80)

    try:
        asyncio.run(scenario())
    finally:
        release.set()


@pytest.mark.parametrize("answer", [[], ["no address"], OSError("no such host"), UnicodeError("label too long")])
def test_resolve_turns_every_failure_into_oserror(answer):
    def resolver(host, port):
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(OSError, match=r"media\.example|no such host"):
        asyncio.run(NameLookup(resolver).resolve("media.example", 80))
