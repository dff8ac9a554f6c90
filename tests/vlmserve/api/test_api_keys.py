"""Several keys from a file: who has which, and what they do not share."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from processors.pool.pool import ProcessorCache
from tests.vlmserve.api.fake_engine import MODEL, Served, png_url
from vlmserve.api.api_keys import read_api_keys
from vlmserve.api.batches.journal import ENDED
from vlmserve.config.checks import SettingsError
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.settings import ServerSettings

CHAT = "/v1/chat/completions"
PNG = base64.b64decode(png_url().partition(",")[2])
KEYS = f"""
# who may ask
alice   alices-key
bob     sha256:{hashlib.sha256(b"bobs-key").hexdigest().upper()}
bob     bobs-new-key
"""


def settings_with(path: Path, **others: Any) -> ServerSettings:
    return ServerSettings(engine=EngineArgs(model=""), api_key_file=str(path), **others)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    path.chmod(0o600)
    return path


def test_whose_key_it_is(file: Path) -> None:
    keys = read_api_keys(settings_with(file, api_key="everybodys"))
    assert keys is not None
    tried = (b"alices-key", b"bobs-key", b"bobs-new-key", b"everybodys", b"alices-ke", b"", KEYS.split()[-3].encode())
    names = [None if (holder := keys.holder(key)) is None else holder.name for key in tried]
    assert names == ["alice", "bob", "bob", "", None, None, None], "a digest is no key"
    alice, *bobs, everybody = (keys.holder(key) for key in tried[:4])
    assert bobs[0] == bobs[1], "a new key has the files of the old one"
    assert len({each.owner for each in (alice, bobs[0], everybody)}) == 3
    assert "alices-key" not in repr(vars(keys))


def test_no_keys(tmp_path: Path) -> None:
    assert read_api_keys(ServerSettings(engine=EngineArgs(model=""))) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "there is no key in it"),
        ("# none\n\n", "there is no key in it"),
        ("a key\nsecret\n", "line 2: it has 1 words; it must be a name and a key"),
        ("a key secret\n", "line 1: it has 3 words"),
        ("a/b secret\n", "line 1: a name is"),
        ("a sha256:secret\n", "line 1: sha256: must be followed by 64 hexadecimal digits"),
        ("a secret\nb secret\n", "line 2: the same key is in an earlier line"),
        (f"a secret\nb sha256:{hashlib.sha256(b'secret').hexdigest()}\n", "line 2: the same key is in an earlier line"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_api_keys(settings_with(path))
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_file_that_others_can_read(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    read_api_keys(settings_with(file))
    assert caplog.messages == []
    file.chmod(0o644)
    read_api_keys(settings_with(file))
    assert "chmod 600" in caplog.text


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_metrics_are_the_operators(serve, file: Path) -> None:
    _, client = serve(api_key_file=str(file), admin_api_key="admin")
    for path in ("/metrics", "/server_info"):
        assert "(setting --admin-api-key)" in client.get(path).text
        assert client.get(path, headers=bearer("alices-key")).status_code == 401
        assert client.get(path, headers=bearer("admin")).status_code == 200
    assert client.get("/v1/models", headers=bearer("admin")).status_code == 401
    assert client.get("/health").status_code == client.get("/version").status_code == 200


PICTURE = [{"type": "image_url", "image_url": {"url": png_url()}}, {"type": "text", "text": "What is it?"}]
MESSAGES = [{"role": "user", "content": PICTURE}]
# Whatever generates: (route, body)
GENERATING = {
    CHAT: {"messages": MESSAGES, "max_tokens": 1},
    "/v1/score": {"query": MESSAGES, "items": ["a"], "label_token_ids": [5]},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
}


def seen_by(served: Served, client: TestClient, route: str, *keys: str, **fields: Any) -> list[tuple[str, Any, str]]:
    """Of a request for each key, what the caches go by, and the client."""
    before = len(served.scheduler.requests)
    for key in keys:
        client.post(route, json={"model": MODEL, **GENERATING[route], **fields}, headers=bearer(key))
    made = served.scheduler.requests[before:]
    assert len(made) == len(keys)
    digests = [r.mm_inputs and [(i.digest, i.patch_digests) for i in r.mm_inputs.items] for r in made]
    return [(r.cache_salt, digest, r.client) for r, digest in zip(made, digests, strict=True)]


def test_every_generating_route_is_known_here(serve, file: Path) -> None:
    """And none of them shares between names; requests of one name do, whichever of its keys they bring."""
    served, client = serve(api_key_file=str(file))
    routes = {getattr(route, "path", "") for route in served.app.routes} & GENERATING.keys()
    assert routes == GENERATING.keys()
    for route in sorted(routes):
        alice, bob, again = seen_by(served, client, route, "alices-key", "bobs-key", "bobs-new-key")
        assert bob == again
        assert alice[0] != bob[0]
        assert alice[2] != bob[2], "they take turns"
        if alice[1] is not None:
            assert alice[1] != bob[1]


def test_media_of_warmups_are_not_shared_either(serve, file: Path) -> None:
    served, client = serve(api_key_file=str(file))
    for key in ("alices-key", "bobs-key"):
        assert client.post("/v1/warmup", json={"messages": MESSAGES}, headers=bearer(key)).status_code == 200
    alice, bob = (encode.items[0].digest for encode in served.scheduler.encodes)
    assert alice != bob
    assert seen_by(served, client, CHAT, "alices-key")[0][1][0][0] == alice, "her own requests find it"


def test_nobody_finds_a_name_by_a_salt(serve, file: Path) -> None:
    served, client = serve(api_key_file=str(file), api_key="everybodys")
    ((salt, _, _),) = seen_by(served, client, CHAT, "alices-key")
    others = seen_by(served, client, CHAT, "alices-key", "bobs-key", "everybodys", cache_salt=salt)
    assert len({salt, *(other for other, _, _ in others)}) == 4


def test_sharing_can_be_chosen(serve, file: Path) -> None:
    served, client = serve(api_key_file=str(file), cache_scope="all")
    alice, bob = seen_by(served, client, CHAT, "alices-key", "bobs-key")
    assert alice[:2] == bob[:2]


def test_media_that_are_only_counted_are_not_shared_either(serve, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long /tokenize takes tells whether a picture was there."""
    _, client = serve(api_key_file=str(file))
    made = []
    key = ProcessorCache.key
    monkeypatch.setattr(ProcessorCache, "key", staticmethod(lambda *given: made.append(key(*given)) or made[-1]))
    for name in ("alices-key", "bobs-key", "bobs-new-key"):
        assert client.post("/tokenize", json={"messages": MESSAGES}, headers=bearer(name)).status_code == 200
    assert made[0] != made[1] == made[2]


def test_responses_follow_the_name(serve, file: Path) -> None:
    _, client = serve(api_key_file=str(file))
    asked = {"model": MODEL, **GENERATING["/v1/responses"]}
    made = client.post("/v1/responses", json=asked, headers=bearer("bobs-key")).json()["id"]
    for key, status in (("alices-key", 404), ("bobs-new-key", 200)):
        for path in (f"/v1/responses/{made}", f"/v1/responses/{made}/input_items"):
            assert client.get(path, headers=bearer(key)).status_code == status
        later = asked | {"previous_response_id": made}
        assert client.post("/v1/responses", json=later, headers=bearer(key)).status_code == status
    assert client.delete(f"/v1/responses/{made}", headers=bearer("alices-key")).status_code == 404


def test_lines_of_a_batch_are_asked_by_its_owner(serve, file: Path) -> None:
    """Their caches, files and stored responses are its owner's, and nobody else sees the batch or its files."""
    served, client = serve(api_key_file=str(file))
    url = "/v1/responses"
    ((salt, digest, _),) = seen_by(served, client, CHAT, "bobs-key")
    with client:  # one event loop for all requests: batches go on between them

        def upload(name: str, data: bytes, purpose: str) -> str:
            form = {"files": {"file": (name, data)}, "data": {"purpose": purpose}}
            return client.post("/v1/files", headers=bearer("bobs-key"), **form).json()["id"]

        first = {"model": MODEL, **GENERATING[url]}
        earlier = client.post(url, json=first, headers=bearer("bobs-key")).json()["id"]
        content = [{"type": "input_image", "file_id": upload("x.png", PNG, "vision")}]
        again = {**first, "input": [{"role": "user", "content": content}], "previous_response_id": earlier}
        line = {"custom_id": "1", "method": "POST", "url": url, "body": again}
        source = upload("in.jsonl", json.dumps(line).encode(), "batch")
        asked = {"input_file_id": source, "endpoint": url, "completion_window": "24h"}
        assert client.post("/v1/batches", json=asked, headers=bearer("alices-key")).status_code == 404
        batch = client.post("/v1/batches", json=asked, headers=bearer("bobs-key")).json()["id"]
        while (found := client.get(f"/v1/batches/{batch}", headers=bearer("bobs-new-key")).json())[
            "status"
        ] not in ENDED:
            pass
        assert (found["status"], found["request_counts"]["completed"]) == ("completed", 1)
        for path in (f"/v1/batches/{batch}", f"/v1/files/{found['output_file_id']}"):
            assert client.get(path, headers=bearer("bobs-new-key")).status_code == 200
            assert client.get(path, headers=bearer("alices-key")).status_code == 404
        assert client.post(f"/v1/batches/{batch}/cancel", headers=bearer("alices-key")).status_code == 404
        assert client.get("/v1/batches", headers=bearer("alices-key")).json()["data"] == []
        output = client.get(f"/v1/files/{found['output_file_id']}/content", headers=bearer("bobs-key")).json()
        stored = client.get(f"{url}/{output['response']['body']['id']}", headers=bearer("bobs-new-key")).json()
    assert stored["previous_response_id"] == earlier
    (made,) = served.scheduler.requests[2:]
    assert made.cache_salt == salt
    assert [(i.digest, i.patch_digests) for i in made.mm_inputs.items] == digest


def test_no_name_takes_all_files_and_batches(serve, file: Path) -> None:
    served, client = serve(api_key_file=str(file), max_files=8, max_batches=2)
    served.scheduler.pause_after = 0  # no batch comes to its end
    line = {"custom_id": "1", "method": "POST", "url": CHAT, "body": {"model": MODEL, **GENERATING[CHAT]}}
    upload = {"files": {"file": ("in.jsonl", json.dumps(line).encode())}, "data": {"purpose": "batch"}}
    asked = {"endpoint": CHAT, "completion_window": "24h"}

    def taken(key: str) -> list[int]:
        """How many files and batches a key gets."""
        files = [client.post("/v1/files", headers=bearer(key), **upload) for _ in range(6)]
        body = asked | {"input_file_id": files[0].json()["id"]}
        batches = [client.post("/v1/batches", json=body, headers=bearer(key)) for _ in range(3)]
        return [sum(one.status_code == 200 for one in tries) for tries in (files, batches)]

    assert [taken("alices-key"), taken("bobs-key")] == [[4, 1], [2, 1]]
    _, alone = serve(api_key="alices-key", max_files=4)
    made = [alone.post("/v1/files", headers=bearer("alices-key"), **upload).status_code for _ in range(5)]
    assert made == [200] * 4 + [400], "a key without others has all"


def test_files_follow_the_name(serve, file: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    _, client = serve(api_key_file=str(file), file_store_dir=str(tmp_path / "store"))
    upload = {"files": {"file": ("x.png", PNG)}, "data": {"purpose": "vision"}}
    made = client.post("/v1/files", headers=bearer("bobs-key"), **upload).json()["id"]
    assert not any(b"bobs-key" in path.read_bytes() for path in (tmp_path / "store").glob("*.json"))
    content = [{"type": "file", "file": {"file_id": made}}, {"type": "text", "text": "what"}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    for key, status in (("alices-key", 404), ("bobs-new-key", 200)):
        asked = client.post(CHAT, json=body, headers=bearer(key))
        assert asked.status_code == status
        assert status == 200 or asked.json()["error"]["param"] == "messages[0].content[0].file.file_id"
        assert len(client.get("/v1/files", headers=bearer(key)).json()["data"]) == (status == 200)
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            assert client.request(method, f"/v1/files/{made}{path}", headers=bearer(key)).status_code == status
