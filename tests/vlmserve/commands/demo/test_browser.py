"""The page as a person uses it, in a real browser, with the real built-in model: on a desktop and on a telephone."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.processors.clips import make_clip
from tests.vlmserve.browser import PATIENCE_MS, chromium
from tests.vlmserve.commands.demo.demo_process import Demo
from vlmserve.commands.demo.pictures import FOLDER, load_samples

pytestmark = pytest.mark.slow

ANSWERS = {
    (tuple(sample["media"]), sample["question"]): sample["answer"]
    for sample in json.loads((FOLDER / "samples.json").read_text(encoding="utf-8"))
}
# Gradio's page cuts off what does not fit, rather than scroll.
BEYOND_THE_EDGE = """
    [...document.querySelectorAll('main *')].filter((element) => element.checkVisibility({visibilityProperty: true}))
        .filter((element) => element.getBoundingClientRect().right > innerWidth + 1)
        .map((element) => element.outerHTML.slice(0, 200))
"""
PANELS = "#saw, #drawing, #rows"


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def demo(browser, tmp_path_factory):
    """Opened at once, as people do."""
    with closing(Demo(tmp_path_factory.mktemp("demo"), "--num-threads", "1", "--dtype", "float32")) as demo:
        page = browser.new_page()
        logged: list[str] = []
        page.on("console", lambda line: logged.append(line.text))
        page.goto(demo.url)
        expect(page.locator("#doing")).to_contain_text("Starting the model's server ...")
        expect(page.locator(".sample").first).to_be_visible(timeout=PATIENCE_MS)  # by itself
        page.close()
        assert not [line for line in logged if "status of" in line]
        demo.ready()
        yield demo


@pytest.fixture(params=[1280, 400])
def page(request, browser, demo):
    page = browser.new_page(viewport={"width": request.param, "height": 800})
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(demo.url)
    expect(page.locator(".sample").first).to_be_visible()
    yield page
    page.close()
    assert errors == []


def ask_sample(page: Page, *media: str, question: str) -> None:
    [number] = [
        place
        for place, sample in enumerate(load_samples())
        if sample.text == question and [file.name for file in sample.media] == list(media)
    ]
    page.locator(".sample").nth(number).click()
    expect_answer(page, ANSWERS[media, question])


def ask(page: Page, question: str, file: Path | None = None) -> None:
    if file is not None:
        with page.expect_file_chooser() as chooser:
            page.get_by_label("Upload a file").click()
        chooser.value.set_files(file)
        expect(page.locator(".thumbnail-item")).to_have_count(1)
    box = page.locator("textarea").first
    box.fill(question)
    box.press("Enter")


def expect_answer(page: Page, answer: str) -> None:
    """And that the page looks as it should with it."""
    expect(page.locator("#chat [data-testid=bot]").last).to_have_text(answer)
    expect(page.locator(".saw-tokens-table")).to_be_visible()
    expect(page.locator(".stop-button")).to_have_count(0)
    expect_tidy(page)


def expect_tidy(page: Page) -> None:
    """Nothing to scroll sideways for, and no panel without anything in it."""
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    assert page.evaluate(BEYOND_THE_EDGE) == []
    for panel in page.locator(PANELS).all():
        if panel.is_visible():
            expect(panel.locator("img:visible, td:visible, [role=gridcell]:visible").first).to_be_visible()


def pictures(page: Page, place: str) -> list[list[int]]:
    """Width and height of those that have been loaded."""
    images = page.locator(f"{place} img")
    expect(images.first).to_be_visible()
    return images.evaluate_all("all => all.filter(i => i.complete).map(i => [i.naturalWidth, i.naturalHeight])")


def test_it_opens_at_its_beginning(page):
    expect(page.get_by_role("heading", name="vlmserve")).to_be_in_viewport()
    expect(page.locator("#head p")).to_contain_text("vlmserve-default about pictures and video clips")
    expect(page.locator(".sample").first).to_be_in_viewport()
    assert page.evaluate("window.scrollY") == 0
    assert not any(panel.is_visible() for panel in page.locator(PANELS).all())
    assert len(pictures(page, "#samples")) == sum(len(sample.media) for sample in load_samples())
    marked = page.locator(".sample", has_text="▶ clip")
    expect(marked).to_have_text([re.compile("Which way does the circle move"), re.compile("What happens in the video")])
    expect_tidy(page)


def test_a_picture(page):
    ask_sample(page, "shapes.png", question="Describe the picture.")
    assert pictures(page, "#saw") == [[256, 160]]
    expect(page.locator("#saw svg")).to_be_visible()
    expect(page.locator("#saw")).to_contain_text(
        "448×320 resized to 256×160 pixels · 16×10 patches (fine lines) · 40 tokens"
    )
    expect(page.locator("#saw")).to_contain_text("40 of pictures, 17 of text")
    for stage in ("on the way", "prepare", "encode and prefill", "answer"):
        expect(page.locator(".stage-names li", has_text=re.compile(rf"^{stage} \d"))).to_be_visible()
    expect(page.locator("#drawing")).to_be_hidden()
    # The same once more, of which all but the end is cached now.
    page.get_by_label("Retry").click()
    expect(page.locator(".saw-tokens-table tr", has_text="Cached")).to_contain_text("48 tokens")


def test_a_box_and_then_none(page):
    question = "Locate the red circle, output its bbox coordinates using JSON format."
    ask_sample(page, "shapes.png", question=question)
    assert pictures(page, "#drawing") == [[448, 320]]
    expect(page.locator("#rows").get_by_role("row", name="1 red circle 36 39 166 144")).to_be_visible()
    ask_sample(page, "six.png", question="How many circles are there?")
    expect(page.locator("#drawing")).to_be_hidden()
    expect(page.locator("#rows")).to_be_hidden()


def test_a_clip_that_the_browser_cannot_play(page, tmp_path):
    clip = tmp_path / "old.mkv"
    clip.write_bytes(make_clip(16, codec="mpeg4", container="matroska"))
    ask(page, "What happens?", clip)
    expect(page.locator("#chat .not-shown")).to_have_count(1)
    told = page.locator("#chat .not-shown").evaluate("element => getComputedStyle(element, '::before').content")
    assert "This browser cannot play or show this file" in told
    expect(page.locator("#chat .not-shown video")).to_be_hidden()
    expect(page.locator(".saw-clip")).to_be_visible()
    expect_tidy(page)


def test_settings_are_empty_and_an_answer_comes_all_the_same(page):
    page.get_by_role("button", name="Settings").click()
    fields = page.locator("#settings input[type=text], #settings textarea")
    expect(fields).to_have_count(7)
    expect(fields.first).to_be_visible()
    assert fields.evaluate_all("all => all.map(field => field.value)") == [""] * 7
    ask_sample(page, "six.png", question="How many circles are there?")
    page.get_by_role("textbox", name="most tokens of an answer").fill("2")
    page.get_by_role("textbox", name="most pixels of a picture").fill("20000")
    ask(page, "How many circles are there?", FOLDER / "six.png")
    expect(page.locator("#saw")).to_contain_text("the answer is cut off at the most tokens allowed")
    expect_tidy(page)
    assert fields.evaluate_all("all => all.map(field => field.placeholder)")[:2] == [
        "what fits in 4096",
        "0 (the server's)",
    ]
    page.get_by_role("textbox", name="top-p").fill("warm")
    ask(page, "And now?")
    expect(page.locator("#chat")).to_contain_text("\"top-p\" is 'warm'; it must be a number")
    expect(page.locator("#saw")).to_be_hidden()
