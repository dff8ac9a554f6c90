"""A server whose pictures are encoded by another server, which stops, dies and comes back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processors.clips import make_clip
from tests.processors.helpers import encoded, picture
from tests.vlmserve.server_process import ServerProcess, await_that, gone, media_part, serving

KEY = {"VLMSERVE_PEER_KEY": "a secret of the tests"}
LISTEN = ("--role", "encode", "--encoder-listen", "127.0.0.1:0")


@pytest.fixture(scope="module")
def encoder(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("encoder") / "run"
    with serving(folder, *LISTEN, "--encoder-dp-size", "1", model=default_model, **KEY) as server:
        yield server


@pytest.fixture(scope="module")
def server(
    encoder: ServerProcess, default_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Uses the encoder."""
    folder = tmp_path_factory.mktemp("server") / "run"
    with serving(folder, "--encoder-urls", url_of(encoder), model=default_model, **KEY) as server:
        is_linked(server)
        yield server


def url_of(encoder: ServerProcess) -> str:
    return json.loads(encoder.get("server_info")[1])["urls"][0]


def is_linked(server: ServerProcess, links: int = 1) -> None:
    await_that(lambda: server.figures()["encoder_links"] == links)


def image(number: int) -> dict[str, Any]:
    return media_part("image", encoded(picture(number, 120, 90), "PNG"))


def ask(server: ServerProcess, *parts: dict[str, Any]) -> list[tuple[str, float]]:
    """Tokens and logprobs of an answer, streamed."""
    content = [*parts, {"type": "text", "text": "What is there?"}]
    stream = server.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": content}],
        max_tokens=8,
        temperature=0,
        logprobs=True,
        stream=True,
    )
    with contextlib.closing(stream):
        return [
            (token.token, token.logprob)
            for chunk in stream
            for choice in chunk.choices
            for token in (choice.logprobs.content if choice.logprobs else [])
        ]


def test_answers_are_those_of_one_server(server, encoder, shared_server):
    requests = [[image(1)], [image(2), image(3)], [media_part("video", make_clip(12))], [image(1), image(2)]]
    for parts in requests:
        answer = ask(server, *parts)
        assert len(answer) > 0
        assert answer == ask(shared_server, *parts)
    ours, theirs = server.figures(), encoder.figures()
    assert ours["encoder_link_fallbacks_total"] == 0
    assert ours["encoder_link_received_total"] == theirs["temporal_patches_encoded_total"] > 3
    assert ours["encoder_link_requests"] == theirs["encoder_link_requests"] == 0


def test_an_encoder_tells_about_itself_and_of_its_role(encoder):
    assert encoder.get("health") == (200, '{"status":"ok"}')
    status, text = encoder.get("server_info")
    info = json.loads(text)
    assert (status, info["role"], info["settings"]["peer_key"]) == (200, "encode", "set")
    assert KEY["VLMSERVE_PEER_KEY"] not in text
    assert [model["id"] for model in json.loads(encoder.get("v1/models")[1])["data"]] == ["tiny"]
    for path in ("v1/chat/completions", "v1/completions", "v1/responses"):
        status, body = encoder.post(path, model="tiny", messages=[])
        assert (status, body["error"]["code"]) == (400, "wrong_role")
        assert "--role encode" in body["error"]["message"]
    assert {"encoder", "encoder-0"} & set(encoder.processes())
    assert not {"scheduler", "detokenizer"} & set(encoder.processes())


def test_an_encoder_that_stops_dies_or_is_not_there_costs_no_request(server, default_model, shared_server, tmp_path):
    with serving(tmp_path / "run", *LISTEN, model=default_model, **KEY) as encoder:
        urls = f"tcp://127.0.0.1:9,{url_of(encoder)}"
        flags = ("--encoder-urls", urls, "--encoder-peer-timeout-s", "4")
        with serving(tmp_path / "own", *flags, model=default_model, **KEY) as own:
            is_linked(own)
            assert ask(own, image(10)) == ask(shared_server, image(10))
            assert own.figures()["encoder_link_fallbacks_total"] == 0
            pid = encoder.processes()["encoder"]
            os.kill(pid, signal.SIGSTOP)
            assert ask(own, image(11), image(12)) == ask(shared_server, image(11), image(12))
            assert own.figures()["encoder_link_fallbacks_total"] == 2
            os.kill(pid, signal.SIGCONT)
            is_linked(own)
            os.kill(pid, signal.SIGKILL)
            assert ask(own, image(13)) == ask(shared_server, image(13))
            assert encoder.wait() == 1
            is_linked(own, 0)
            assert ask(own, image(14)) == ask(shared_server, image(14))


def test_a_server_that_dies_leaves_nothing_at_its_encoder(encoder, default_model, tmp_path):
    with serving(tmp_path / "own", "--encoder-urls", url_of(encoder), model=default_model, **KEY) as own:
        is_linked(own)
        links = encoder.figures()["encoder_links"]
        ask(own, image(20))
        scheduler, directories = own.processes()["scheduler"], own.directories()
        os.kill(scheduler, signal.SIGKILL)
        await_that(lambda: gone(scheduler))
        await_that(lambda: encoder.figures()["encoder_links"] == links - 1)
        assert encoder.figures()["encoder_link_requests"] == 0
        assert own.wait() == 1
        assert not any(directory.exists() for directory in directories)
    assert 'embedding_cache_held_bytes{model_name="tiny",tier="device"} 0.0' in encoder.get("metrics")[1]


@pytest.mark.slow
def test_an_encoder_with_another_key_is_not_used(encoder, default_model, tmp_path):
    flags = ("--encoder-urls", url_of(encoder), "--peer-key", "another secret, of others")
    with serving(tmp_path / "own", *flags, model=default_model) as own:
        own.await_log(r"the encoder tcp://\S+ is not used: the two servers have different keys \(setting --peer-key\)")
        assert ask(own, image(30))
        assert own.figures()["encoder_link_fallbacks_total"] == 1
