"""Searching pictures on the page: vectors here are the mean colours of pictures, and of what is said."""

from __future__ import annotations

import asyncio
import base64
import html
import io
import json
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import gradio_client
import httpx2
import numpy as np
import pytest
from PIL import Image

from tests.vlmserve.api.fake_engine import MODEL
from tests.vlmserve.commands.served import fake_server
from vlmserve.api.listening import listen
from vlmserve.commands.client.chat_client import ChatClient
from vlmserve.commands.demo.chat import Chat
from vlmserve.commands.demo.command import keep_gradio_to_itself
from vlmserve.commands.demo.search import BEST, Album, Search

COLOURS = {"red": (250, 5, 5), "green": (5, 250, 5), "blue": (5, 5, 250)}


def answer(request: httpx2.Request) -> httpx2.Response:
    body = json.loads(request.content)
    content = body["messages"][-1]["content"]
    if isinstance(content, str):
        return _vector(COLOURS.get(content, (1, 1, 1)))
    data = base64.b64decode(content[0]["image_url"]["url"].partition(",")[2])
    colour = np.array(Image.open(io.BytesIO(data)).convert("RGB")).mean((0, 1))
    if (colour < 1).all():
        told = "messages[0].content[0].image_url: this picture is too dark"
        return httpx2.Response(400, json={"error": {"message": told}})
    return _vector(colour)


def _vector(colour: Any) -> httpx2.Response:
    return httpx2.Response(200, json={"data": [{"embedding": [float(one) for one in colour]}]})


@pytest.fixture
def search() -> Search:
    http = httpx2.AsyncClient(transport=httpx2.MockTransport(answer))
    return Search(ChatClient("http://embedder", http=http), "tiny")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for at in range(6):
        for name, colour in COLOURS.items():
            shade = tuple(min(255, one + 20 * at) for one in colour)
            Image.new("RGB", (900, 600), shade).save(tmp_path / f"{name}-{at}.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "dark.png")
    (tmp_path / "notes.txt").write_text("no picture")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    return tmp_path


def test_the_nearest_pictures_come_first_and_bad_ones_are_named(search: Search, folder: Path) -> None:
    async def steps_of(files: list[Path]) -> tuple[list[Album], np.ndarray]:
        return [album async for album in search.look_at(files)], await search.vector_of("green")

    steps, green = asyncio.run(steps_of(sorted(folder.iterdir())))
    album = steps[-1]
    assert [step.given for step in steps] == [21] * 4, "in lots"
    assert [step.is_whole for step in steps] == [False, False, False, True]
    assert len(album.pictures) == 18
    broken, dark, notes = album.problems
    assert broken.startswith("broken.png: ")
    assert (dark, notes) == ("dark.png: this picture is too dark", "notes.txt: this is no picture")
    best = album.nearest(green)
    assert [one.name for one, _ in best[:6]] == [f"green-{at}.png" for at in range(6)]
    assert len(best) == BEST
    assert best[0][1] == pytest.approx(1, abs=1e-6)
    assert Album().nearest(np.ones(3)) == []


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a page with an embedder."""
    with pytest.MonkeyPatch.context() as patch:
        keep_gradio_to_itself(str(tmp_path_factory.mktemp("gradio")), patch.setenv)
        client = ChatClient("http://embedder", http=httpx2.AsyncClient(transport=httpx2.MockTransport(answer)))
        with launched(client, Search(client, "tiny")) as url:
            yield url


@contextmanager
def launched(client: ChatClient, search: Search | str) -> Iterator[str]:
    from vlmserve.commands.demo.page import DemoPage

    with closing(listen("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with closing(DemoPage(Chat(client, "tiny"), [], search)) as page:
        yield page.launch("127.0.0.1", port, share=False, allowed_paths=[])


def test_the_page_searches_a_folder(page: str, folder: Path) -> None:
    client = gradio_client.Client(page, download_files=False, verbose=False, analytics_enabled=False)
    with closing(client):
        assert "Add a folder of pictures first" in client.predict("red", api_name="/find")
        files = [gradio_client.handle_file(str(one)) for one in folder.iterdir()]
        told, _ = client.predict(files, api_name="/look_at")
        assert "18 pictures can be searched" in told
        assert "notes.txt: this is no picture" in told
        found = client.predict("red", api_name="/find")
        assert re.findall(r"(\w+-\d)\.png · (\d\.\d+)", found)[:2] == [("red-0", "1.000"), ("red-1", "0.994")]
        assert found.count("<img") == BEST
        assert "Write a sentence first" in client.predict(" ", api_name="/find")


def test_files_of_the_machine_are_no_folder(page: str) -> None:
    secret = Path(__file__).parents[4] / "assets" / "README.md"
    file = {"path": str(secret), "meta": {"_type": "gradio.FileData"}}
    with httpx2.Client(base_url=page, timeout=60) as http:
        event = http.post("/gradio_api/call/look_at", json={"data": [[file]]})
        assert "event: error" in http.get(f"/gradio_api/call/look_at/{event.json()['event_id']}").text


def test_a_model_that_is_no_embedder_says_so(checkpoint: Path) -> None:
    with fake_server(checkpoint) as (served, url):
        client = ChatClient(url)
        said = asyncio.run(Search.at(client, MODEL))
        assert isinstance(said, str)
        assert "gives answers (POST /v1/chat/completions), no embeddings" in said
        with launched(client, said) as page:
            assert html.escape(said) in httpx2.get(page + "config").json()["components"][-1]["props"]["value"]
        served.assert_idle()


def test_an_embedder_is_found_out(search: Search) -> None:
    assert isinstance(asyncio.run(Search.at(search._client, "tiny")), Search)
