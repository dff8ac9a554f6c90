"""The page at / as a person uses it, in a real browser: on a desktop and on a telephone."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.vlmserve.browser import PATIENCE_MS, chromium
from tests.vlmserve.server_process import SAMPLES, ServerProcess, serving

pytestmark = pytest.mark.slow

CHAT = "**/v1/chat/completions"
MARKUP = '<img src="x" onerror="document.title = `run`"><b>bold</b>'
# A file as the browser has it after a drop, or in the clipboard.
GIVE = """async ([event, field, name, type, base64]) => {
    const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    const data = new DataTransfer();
    data.items.add(new File([bytes], name, { type }));
    const kind = event === "paste" ? ClipboardEvent : DragEvent;
    document.body.dispatchEvent(new kind(event, { [field]: data, bubbles: true, cancelable: true }));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def guarded_server(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    with serving(folder / "run", model=default_model, VLMSERVE_API_KEY="a-key") as server:
        yield server


def opened(browser: Browser, server: ServerProcess, *, width: int = 1280) -> Page:
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    page.goto(f"http://127.0.0.1:{server.port()}/")
    return page


@pytest.fixture(params=[1280, 360])
def page(request: pytest.FixtureRequest, browser: Browser, shared_server: ServerProcess) -> Iterator[Page]:
    """Nothing may go wrong in it, and nothing may be wider than it."""
    page = opened(browser, shared_server, width=request.param)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if "Content Security" in message.text else None)
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") <= request.param
    assert page.title() == "tiny - vlmserve"
    page.close()
    assert errors == []


def ask(page: Page, question: str) -> None:
    page.get_by_label("Question").fill(question)
    page.keyboard.press("Enter")


def expect_answer(page: Page, answer: str) -> None:
    expect(page.locator("article.assistant").last).to_contain_text(answer)
    expect(page.locator("article.assistant").last).to_contain_text("tokens read")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def event(**delta: object) -> str:
    return f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': None}]})}\n\n"


def test_a_picture_and_further_turns(page: Page) -> None:
    page.evaluate("window.steps = 0")
    page.evaluate("new MutationObserver(all => steps += all.length).observe(log, {subtree: true, characterData: true})")
    with page.expect_file_chooser() as chooser:
        page.get_by_label("Picture").press("Enter")
    chooser.value.set_files(SAMPLES / "shapes.png")
    expect(page.locator("#media img")).to_have_attribute("alt", "shapes.png")
    ask(page, "Describe the picture.")
    expect_answer(page, "A red circle, a green triangle, a yellow star and a blue square.")
    assert page.evaluate("window.steps") > 4, "the answer came in one piece"
    expect(page.locator("article.user img")).to_be_visible()
    expect(page.locator("#media img")).to_have_count(0)
    ask(page, "How many shapes are there?")
    expect_answer(page, "Four.")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)
    page.locator("#choose").set_input_files(SAMPLES / "rolling.mp4")
    ask(page, "Which way does the circle move?")
    expect_answer(page, "Right.")


@pytest.mark.parametrize(("event", "field"), [("drop", "dataTransfer"), ("paste", "clipboardData")])
def test_pictures_that_are_dropped_or_pasted(page: Page, event: str, field: str) -> None:
    data = base64.b64encode((SAMPLES / "six.png").read_bytes()).decode()
    page.evaluate(GIVE, [event, field, "six.png", "image/png", data])
    page.evaluate(GIVE, [event, field, "again.png", "image/png", data])
    page.get_by_role("button", name="Remove again.png").click()
    expect(page.locator("#media img")).to_have_count(1)
    ask(page, "How many circles are there?")
    expect_answer(page, "Six.")
    page.evaluate(GIVE, [event, field, "notes.txt", "text/plain", data])
    expect(page.get_by_role("alert")).to_have_text("notes.txt is neither a picture nor a video")


def test_a_refused_question_is_there_to_be_asked_again(page: Page) -> None:
    page.locator("#choose").set_input_files({"name": "bad.png", "mimeType": "image/png", "buffer": b"no picture"})
    ask(page, "What is it?")
    expect(page.get_by_role("alert")).to_contain_text("the data is not a picture of a supported format")
    expect(page.get_by_label("Question")).to_have_value("What is it?")
    expect(page.locator("article")).to_have_count(0)
    page.get_by_role("button", name="Remove bad.png").click()
    page.locator("#choose").set_input_files(SAMPLES / "six.png")
    ask(page, "How many circles are there?")
    expect_answer(page, "Six.")
    expect(page.get_by_role("alert")).to_be_hidden()


def test_what_a_model_writes_is_text(page: Page) -> None:
    last = 'data: {"choices": [{"delta": {}, "finish_reason": "length"}], "warnings": ["w <i>"]}\n\ndata: [DONE]\n\n'
    said = event(reasoning_content=MARKUP) + event(content=MARKUP[:9]) + event(content=MARKUP[9:]) + last
    page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=said))
    ask(page, MARKUP)
    answer = page.locator("article.assistant")
    expect(answer.locator("details")).to_contain_text(MARKUP)
    expect(answer.locator("small")).to_contain_text("w <i>; the answer is cut off")
    assert page.locator("article.user").inner_text() == MARKUP
    assert page.locator("article b, article i, article img").count() == 0


def test_an_answer_that_is_stopped_or_fails(page: Page) -> None:
    """The question comes back, unless a part of the answer is there."""
    page.route(CHAT, lambda route: None)  # never answered
    ask(page, "How long?")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.get_by_label("Question")).to_have_value("How long?")
    expect(page.get_by_role("alert")).to_be_hidden()
    page.unroute(CHAT)
    page.route(CHAT, lambda route: route.abort())
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_contain_text("the server does not answer")
    failing = event(content="So far") + 'data: {"error": {"message": "out of memory"}}\n\n'
    page.unroute(CHAT)
    page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=failing))
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_have_text("out of memory")
    expect(page.locator("article.assistant")).to_have_text("So far")


def test_a_key_is_asked_for_and_kept_for_the_tab(browser: Browser, guarded_server: ServerProcess) -> None:
    page = opened(browser, guarded_server)
    ask(page, "Hello")
    expect(page.get_by_role("alert")).to_contain_text("a valid API key is needed")
    expect(page.get_by_label("API key")).to_be_focused()
    page.keyboard.type("a-key")
    page.get_by_role("button", name="Send").click()
    expect_answer(page, "")
    page.reload()
    expect(page.get_by_label("API key")).to_have_value("a-key")
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    page.close()
