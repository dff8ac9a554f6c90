"""The page over HTTP, with the real server and no model behind it, and the requests that its conversation becomes."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import gradio_client
import httpx2
import pytest

from tests.vlmserve.api.fake_engine import MODEL, WAIT_S, Served
from tests.vlmserve.commands.served import fake_server
from tests.vlmserve.server_process import await_that
from vlmserve.api.listening import listen
from vlmserve.commands.client.chat_client import ChatClient
from vlmserve.commands.client.conversation import OptionError
from vlmserve.commands.client.media import data_url
from vlmserve.commands.demo.chat import (
    ERROR_TITLE,
    Chat,
    Turn,
    View,
    answer_message,
    answered_turns,
    demo_body,
    error_message,
    files_of,
    in_the_pages_words,
    last_question,
    question_message,
    read_settings,
)
from vlmserve.commands.demo.command import keep_gradio_to_itself
from vlmserve.commands.demo.pictures import FOLDER, Question, load_samples
from vlmserve.frontend.openai.protocol import ChatCompletionRequest

PICTURE = FOLDER / "red-circle.png"


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    """The server, the address of the page, and the server's own."""
    with pytest.MonkeyPatch.context() as patch, fake_server(checkpoint) as (served, url):
        keep_gradio_to_itself(str(tmp_path_factory.mktemp("gradio")), patch.setenv)
        from vlmserve.commands.demo.page import DemoPage

        with closing(listen("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        client = ChatClient(url)
        page = DemoPage(Chat(client, MODEL), load_samples(), "no embedder", defaults=asyncio.run(client.defaults()))
        yield served, page.launch("127.0.0.1", port, share=False, allowed_paths=[FOLDER]), url
        page.close()
        served.assert_idle()


@pytest.fixture
def served(server):
    served = server[0]
    served.scheduler.pause_after = None
    served.scheduler.say("red")
    return served


@pytest.fixture
def url(server, served):
    return server[1]


@pytest.fixture
def client(url, tmp_path):
    client = gradio_client.Client(url, download_files=False, verbose=False, analytics_enabled=False)
    yield client
    client.close()


def message(text: str, *files: Path) -> dict[str, Any]:
    return {"text": text, "files": [gradio_client.handle_file(str(file)) for file in files]}


def said(history: list[dict[str, Any]]) -> str:
    return history[-1]["content"][0]["text"]


def call(url: str, name: str, body: dict[str, Any]) -> str:
    """The events of one call, as text, without a client that uploads anything."""
    with httpx2.Client(base_url=url, timeout=WAIT_S) as http:
        event = http.post(f"/gradio_api/call/{name}", json=body)
        return http.get(f"/gradio_api/call/{name}/{event.json()['event_id']}").text


def test_a_conversation_with_a_picture(client, served):
    before = len(served.scheduler.requests)
    _, history, image, rows, saw = client.predict(message("What is it?", PICTURE), [], "40", api_name="/ask")
    assert said(history) == "red"
    assert "of pictures, " in saw
    assert not image["visible"]
    assert not rows["visible"]
    _, history, *_ = client.predict(message("And now?"), history, "40", api_name="/ask")
    assert [entry["role"] for entry in history] == ["user", "assistant"] * 2
    one, two = served.scheduler.requests[before:]
    assert len(one.mm_inputs.items) == len(two.mm_inputs.items) == 1
    assert two.sampling_params.max_new_tokens == 40


def show(page: httpx2.Client, name: str) -> None:
    """Let a page's camera show a frame, and wait until that is done."""
    functions = page.get("/config").json()["dependencies"]
    [stream] = [one["id"] for one in functions if one["targets"] and one["targets"][0][1] == "stream"]
    frame = {"url": data_url(PICTURE.read_bytes()), "is_stream": True}
    body = {"data": [frame, "What?", 2, None], "fn_index": stream, "session_hash": name}
    page.post("/gradio_api/queue/join", json=body).raise_for_status()
    with page.stream("GET", "/gradio_api/queue/data", params={"session_hash": name}) as events:
        for line in events.iter_lines():
            event = json.loads(line.removeprefix("data: ") or "{}")
            assert event.get("success", True), event
            if event.get("msg") == "process_streaming":
                return


def test_the_session_of_a_camera_ends_with_its_page(server, served):
    """Gradio knows of the end by a connection that each page holds open."""

    def sessions() -> list[Any]:
        return httpx2.get(f"{server[2]}/v1/sessions").json()["data"]

    with httpx2.Client(base_url=server[1], timeout=WAIT_S) as page:
        for name in ("one", "two"):
            with page.stream("GET", f"/gradio_api/heartbeat/{name}") as alive:
                lines = alive.iter_lines()
                next(lines)
                show(page, name)
                assert [one["live"]["received"] for one in sessions()] == [1]
            await_that(lambda: not sessions(), WAIT_S)
        show(page, "two")  # which was on its way
        assert not sessions()


def test_settings_reach_the_server(client, served):
    settings = {"max_tokens": "7", "temperature": "0.5", "top_p": "0.25", "seed": "3", "max_pixels": "3136"}
    client.predict(message("?", PICTURE), [], api_name="/ask", **settings)
    request = served.scheduler.requests[-1]
    params = request.sampling_params
    assert (params.max_new_tokens, params.temperature, params.top_p, params.seed) == (7, 0.5, 0.25, 3)
    height, width = request.mm_inputs.items[0].grid_thw[1:]
    assert height * width * 14 * 14 <= 3136


@pytest.mark.parametrize("mark", ['"bbox_2d": [0, 0, 500, 500]', '"point_2d": [500, 500]'])
def test_boxes_and_points_are_drawn(client, served, mark):
    served.scheduler.say(f'[{{{mark}, "label": "it"}}]')
    _, _, image, rows, _ = client.predict(message("Where?", PICTURE), [], "60", api_name="/ask")
    assert image["visible"]
    assert rows["value"]["data"][0][:2] == [1, "it"]
    assert httpx2.get(image["value"]["url"]).content.startswith(b"\x89PNG")


def test_a_refused_question_is_forgotten(client, served, tmp_path):
    (tmp_path / "note.png").write_bytes(b"no picture at all")
    before = len(served.scheduler.requests)
    _, history, *_, saw = client.predict(message("?", tmp_path / "note.png"), [], api_name="/ask")
    assert said(history).startswith("note.png: the data is not a picture of a supported format")
    assert (history[-1]["metadata"]["title"], saw) == (ERROR_TITLE, "")
    _, history, *_ = client.predict(message("And this?", PICTURE), history, api_name="/ask")
    assert said(history) == "red"
    [request] = served.scheduler.requests[before:]
    assert len(request.mm_inputs.items) == 1


@pytest.mark.parametrize(
    ("question", "files", "settings", "told"),
    [
        ("?", ["empty.png"], {}, "empty.png is empty: there is nothing in this file, or its upload broke off"),
        (" ", [], {}, "there is no question: write one, or add a picture or clip"),
        ("?", [], {"max_tokens": "0"}, '"most tokens of an answer" is 0; it must be at least 1'),
        ("?", [], {"top_p": "warm"}, "\"top-p\" is 'warm'; it must be a number, or empty to leave it to the server"),
        ("?", ["red.png"], {"min_pixels": "-4"}, 'red.png: "least pixels of a picture" is -4'),
        ("?", ["rolling.mp4"], {"fps": "-1"}, 'rolling.mp4: "frames a second of a clip" is -1'),
    ],
)
def test_an_error_is_in_the_words_of_the_page(client, served, tmp_path, question, files, settings, told):
    (tmp_path / "empty.png").touch()
    (tmp_path / "red.png").write_bytes(PICTURE.read_bytes())
    (tmp_path / "rolling.mp4").write_bytes(CLIP.read_bytes())
    before = len(served.scheduler.requests)
    asked = message(question, *(tmp_path / file for file in files))
    _, history, *_ = client.predict(asked, [], api_name="/ask", **settings)
    assert (said(history)[: len(told)], history[-1]["metadata"]["title"]) == (told, ERROR_TITLE)
    assert len(served.scheduler.requests) == before


def test_files_of_earlier_questions_are_named_and_other_places_stay():
    asked = [Question(text="?", media=(Path("a.png"), Path("b.png"))), Question(text="?", media=(Path("c.png"),))]
    text = "messages[0].content[1]: x; messages[2].content[0].image_url: y; messages[2].content[1]: z"
    assert in_the_pages_words(text, asked) == "b.png: x; c.png: y; messages[2].content[1]: z"


def test_empty_fields_show_the_servers_values(url, checkpoint):
    def shown(config: dict[str, Any]) -> dict[str, str]:
        fields = [part["props"] for part in config["components"] if part["type"] == "textbox"]
        return {field["label"]: field["placeholder"] for field in fields if "placeholder" in field}

    assert shown(httpx2.get(url + "config").json()) == {
        "most tokens of an answer": "what fits in 256",
        "temperature": "0.7 (the server's)",
        "top-p": "0.8 (the server's)",
        "seed": "another one each time",
        "least pixels of a picture": "784 (the server's)",
        "most pixels of a picture": "50176 (the server's)",
        "frames a second of a clip": "2 (the server's)",
    }
    with fake_server(checkpoint, admin_api_key="other") as (_, closed):  # which does not tell everybody
        assert asyncio.run(ChatClient(closed).defaults()) == {}


def test_a_file_that_is_gone_is_told(tmp_path):
    async def last() -> View:
        question = Question(text="?", media=(tmp_path / "gone.png",))
        return [view async for view in Chat(ChatClient("http://127.0.0.1:9"), MODEL).ask([], question, {})][-1]

    shown = asyncio.run(last()).messages
    assert shown[-1]["metadata"]["title"] == ERROR_TITLE
    assert "gone.png" in said(shown)


def test_a_failure_after_the_beginning_keeps_what_was_said(checkpoint):
    views: list[View] = []

    async def ask(chat: Chat, served: Served) -> None:
        async for view in chat.ask([], Question(text="What is it?", media=(PICTURE,)), {"max_tokens": "60"}):
            views.append(view)
            if len(views) == 3:
                served.frontend.fail_all("the engine is gone")

    with fake_server(checkpoint) as (served, url):
        served.scheduler.say("one two three four five six")
        served.scheduler.pause_after = 3
        asyncio.run(ask(Chat(ChatClient(url), MODEL), served))
    first, *growing, last = views
    assert [part["type"] for part in first.messages[-1]["content"]] == ["file", "text"]
    assert len({said(view.messages) for view in growing}) > 1, "it comes bit by bit"
    assert (said(last.messages), last.messages[-1]["metadata"]["title"]) == ("the engine is gone", ERROR_TITLE)
    assert last.messages[-2]["role"] == "assistant"


def test_stop_cancels_on_the_server(client, served):
    served.scheduler.pause_after = 2
    requests, aborts = len(served.scheduler.requests), len(served.scheduler.aborts)
    job = client.submit(message("?", PICTURE), [], 40, api_name="/ask")
    served.scheduler.wait_until(lambda: len(served.scheduler.requests) > requests)
    job.cancel()
    served.scheduler.wait_until(lambda: len(served.scheduler.aborts) > aborts)
    served.assert_idle()


_SETTINGS = [None, None, None, None, "auto", None, None, None]


@pytest.mark.parametrize("place", ["nowhere", "message", "history", "component"])
def test_files_of_this_machine_cannot_be_read(url, served, tmp_path, place):
    """A caller may name uploaded files, and nothing else."""
    before = len(served.scheduler.requests)
    secret = tmp_path / "secret.png"
    secret.write_bytes(PICTURE.read_bytes())
    file = {"path": str(secret), "meta": {"_type": "gradio.FileData"}}
    asked = {"text": "What is it?", "files": [file] if place == "message" else []}
    component = {"component": "image", "value": {"path": str(secret)}, "constructor_args": {}, "props": {}}
    contents = {
        "history": {"type": "file", "file": file},
        "component": {"type": "component", **component},
    }
    earlier = [
        {"role": "user", "content": [contents.get(place, {"type": "text", "text": "Hello"})]},
        {"role": "assistant", "content": [{"type": "text", "text": "A secret."}]},
    ]
    events = call(url, "ask", {"data": [asked, earlier, *_SETTINGS]})
    assert ("event: error" in events) == (place != "nowhere")
    assert len(served.scheduler.requests) == before + (place == "nowhere")


def test_the_page_fetches_nothing_from_elsewhere(url):
    page = httpx2.get(url).text
    fetched = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(https?://[^"]*)"', page)
    assert fetched == []
    assert "http" not in "".join(httpx2.get(url + "config").json()["stylesheets"])
    styles = httpx2.get(url + "theme.css").text
    assert "font" in styles
    assert not re.search(r"""(url\(|@import)\s*["']?\s*http""", styles)


def test_all_samples_are_offered(url):
    config = httpx2.get(url + "config").json()
    [gallery] = [part["props"]["value"] for part in config["components"] if part["props"].get("elem_id") == "samples"]
    samples = load_samples()
    assert re.findall(r'data-sample="(\d+)" title="([^"]*)"', gallery) == [
        (str(number), sample.text) for number, sample in enumerate(samples)
    ]
    clips = [any(file.suffix == ".mp4" for file in sample.media) for sample in samples]
    assert ["clip</span>" in button for button in gallery.split("<button")[1:]] == clips
    assert not config["analytics_enabled"]


def test_a_sample_that_is_clicked_is_asked(url, served):
    config = httpx2.get(url + "config").json()
    [gallery] = [part["id"] for part in config["components"] if part["props"].get("elem_id") == "samples"]
    [number] = [d["id"] for d in config["dependencies"] if [gallery, "click"] in d["targets"] and d["inputs"]]
    [album] = [place for place, sample in enumerate(load_samples()) if len(sample.media) == 2]
    before = len(served.scheduler.requests)
    body = {
        "data": [None] * 8,
        "event_data": {"index": album},
        "fn_index": number,
        "session_hash": "one",
        "trigger_id": None,
    }
    with httpx2.Client(base_url=url, timeout=WAIT_S) as http:
        http.post("/gradio_api/queue/join", json=body).raise_for_status()
        with http.stream("GET", "/gradio_api/queue/data?session_hash=one") as events:
            for line in events.iter_lines():
                if line.startswith("data:") and json.loads(line[5:])["msg"] == "process_completed":
                    column = json.loads(line[5:])["output"]["data"][2]
                    break
    assert column["visible"], "with what the model saw"
    [request] = served.scheduler.requests[before:]
    assert len(request.mm_inputs.items) == 2


SHAPES = Question(text="What is this?", media=(Path("/x/shapes.png"), Path("/x/clip.mp4")))
AGAIN = Question(text="And the colour?")


def test_what_was_shown_is_read_back():
    messages = [question_message(SHAPES), answer_message("A circle."), question_message(AGAIN), answer_message("Red.")]
    messages = json.loads(json.dumps(messages))  # as through a browser
    files = [part["file"] for part in messages[0]["content"] if part["type"] == "file"]
    assert [file["mime_type"] for file in files] == ["image/png", "video/mp4"]
    assert answered_turns(messages) == (
        Turn(question=SHAPES, answer="A circle."),
        Turn(question=AGAIN, answer="Red."),
    )
    assert last_question(messages) == (messages[:2], AGAIN)


def test_questions_without_an_answer_are_left_out():
    failed, broken_off = Question(text="bad picture"), Question(text="broken off")
    stopped, stopped_early = Question(text="stopped"), Question(text="stopped early")
    messages = [
        *(question_message(failed), error_message("no picture")),
        *(question_message(broken_off), answer_message("A ci"), error_message("the engine is gone")),
        *(question_message(stopped), answer_message("A squ")),
        *(question_message(stopped_early), answer_message("")),
        question_message(AGAIN),
    ]
    assert answered_turns(messages) == (Turn(question=stopped, answer="A squ"),)
    assert last_question(messages) == (messages[:-1], AGAIN)
    assert answered_turns([]) == ()
    assert last_question([]) is last_question([answer_message("Hello!")]) is None


SIX, CLIP = FOLDER / "six.png", FOLDER / "rolling.mp4"


def parts_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    ChatCompletionRequest.model_validate(body)
    contents = [message["content"] for message in body["messages"] if message["role"] == "user"]
    return [part for content in contents for part in ([{"type": "text"}] if isinstance(content, str) else content)]


def test_settings_go_where_they_belong():
    settings = {"max_tokens": 5, "temperature": 0.0, "top_p": 0.5, "seed": 0}
    settings |= {"detail": "low", "min_pixels": 784, "max_pixels": 1568, "fps": 0.5}
    turn, question = (
        Turn(question=Question(text="How many?", media=(SIX,)), answer="Six."),
        Question(text="?", media=(CLIP,)),
    )
    body = demo_body("m", [turn], question, settings)
    picture, _, clip, _ = parts_of(body)
    assert files_of([turn], question) == [SIX, CLIP], "in the order of the prompt"
    assert clip["video_url"] == {"url": data_url(CLIP.read_bytes())}
    assert (body["max_tokens"], body["temperature"], body["top_p"], body["seed"]) == (5, 0.0, 0.5, 0)
    assert picture["image_url"]["detail"] == "low"
    assert (picture["min_pixels"], picture["max_pixels"]) == (784, 1568)
    assert clip["fps"] == 0.5
    assert "fps" not in picture
    assert "max_pixels" not in clip


def test_a_question_may_lack_a_part_and_an_unknown_file_is_left_to_the_server(tmp_path):
    (tmp_path / "film.mp4").write_bytes(b"no film")
    for media, kinds in (([SIX], ["image_url"]), ([], ["text"]), ([tmp_path / "film.mp4"], ["image_url"])):
        body = demo_body("m", [], Question(text="", media=tuple(media)), {})
        assert [part["type"] for part in parts_of(body)] == kinds


def test_an_empty_field_leaves_it_to_the_server():
    form = {"max_tokens": " 7 ", "temperature": "", "top_p": None, "seed": "  ", "detail": "low", "fps": "0.5"}
    assert read_settings(form) == {"max_tokens": 7, "detail": "low", "fps": 0.5}
    for name, text, kind in (
        ("seed", "1.5", "a whole number"),
        ("top_p", "nan", "a number"),
        ("fps", "inf", "a number"),
    ):
        with pytest.raises(OptionError, match=f"^{name} is '{text}'; it must be {kind}"):
            read_settings({name: text})
