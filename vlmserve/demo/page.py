"""The page: Gradio's components and which function each event calls. Everything it does is done elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import fields
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.components.chatbot import FileMessage, TextMessage

from vlmserve.demo.chat import Chat, View
from vlmserve.demo.conversation import Message, Question, last_question
from vlmserve.demo.request import RequestSettings

_SETTINGS = tuple(field.name for field in fields(RequestSettings))
_HEADERS = ["", "label", "x1", "y1", "x2", "y2"]
_EMPTY = "empty: as the server has it"


class Page:
    """A page to chat with one model. samples: questions offered to begin with."""

    def __init__(self, chat: Chat, samples: Sequence[Question]) -> None:
        self._chat = chat
        self._samples = samples
        self._blocks = self._build()

    def launch(self, host: str, port: int, *, share: bool, allowed_paths: Sequence[Path]) -> str:
        """Serve the page from threads of its own; returns its address. allowed_paths: of the samples' files.

        Raises OSError where the port is taken.
        """
        _, url, shared = self._blocks.launch(
            server_name=host,
            server_port=port,
            share=share,
            allowed_paths=[str(path) for path in allowed_paths],
            prevent_thread_lock=True,
            quiet=True,
            inbrowser=False,
            max_file_size="512mb",
            run_history=False,
            enable_monitoring=False,
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            footer_links=["api", "settings"],
        )
        return shared or url

    def close(self) -> None:
        """Stop serving; answers under way are broken off."""
        self._blocks.close(verbose=False)

    def _build(self) -> gr.Blocks:
        title = f"vlmserve: {self._chat.model}"
        with gr.Blocks(title=title, analytics_enabled=False, fill_height=True) as blocks:
            with gr.Row(equal_height=False):
                with gr.Column(scale=3):
                    chatbot = gr.Chatbot(
                        label=title,
                        height="70vh",
                        examples=[_example(sample) for sample in self._samples],
                        buttons=["copy"],
                    )
                    _take_back_little(chatbot)
                    box = gr.MultimodalTextbox(
                        label="question",
                        show_label=False,
                        placeholder="A question; pictures and videos may be dropped here",
                        file_count="multiple",
                        autofocus=True,
                    )
                    status = gr.Textbox(label="last answer", interactive=False, lines=1, max_lines=8)
                with gr.Column(scale=2):
                    picture = gr.Image(label="boxes, in the last picture", interactive=False, format="png")
                    rows = gr.Dataframe(label="boxes, in pixels", headers=_HEADERS, interactive=False)
                    with gr.Accordion("Settings", open=False):
                        settings = list(_settings_inputs().values())
            outputs = [box, chatbot, status, picture, rows]
            asked = box.submit(self._ask, [box, chatbot, *settings], outputs, api_name="ask", concurrency_limit=None)
            again = chatbot.retry(
                self._ask_again, [chatbot, *settings], outputs, api_visibility="private", concurrency_limit=None
            )
            sampled = chatbot.example_select(
                self._ask_sample, settings, outputs, api_visibility="private", concurrency_limit=None
            )
            box.stop(_ready, None, [box], cancels=[asked, again, sampled], api_visibility="private", queue=False)
            chatbot.clear(lambda: ("", None, None), None, [status, picture, rows], api_visibility="private")
        return blocks

    async def _ask(
        self,
        message: dict[str, Any],
        history: list[Message],
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        detail: Any = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        fps: float | None = None,
    ) -> AsyncIterator[list[Any]]:
        """Ask about pictures and videos. (This is the text of the page's own API; so are the names.)"""
        settings = (max_tokens, temperature, top_p, seed, detail, min_pixels, max_pixels, fps)
        question = Question(text=message["text"], files=tuple(map(Path, message["files"])))
        async for update in self._updates(history, question, settings):
            yield update

    async def _ask_again(self, history: list[Message], *settings: Any) -> AsyncIterator[list[Any]]:
        found = last_question(history)
        if found is not None:
            async for update in self._updates(*found, settings):
                yield update

    async def _ask_sample(self, chosen: gr.SelectData, *settings: Any) -> AsyncIterator[list[Any]]:
        async for update in self._updates([], self._samples[chosen.index], settings):
            yield update

    async def _updates(
        self, history: Sequence[Message], question: Question, settings: Sequence[Any]
    ) -> AsyncIterator[list[Any]]:
        """Values of the outputs, in their order, after each step."""
        asked_for = RequestSettings(**dict(zip(_SETTINGS, settings, strict=True)))
        box, shown = _busy(), [gr.skip()] * 4
        async with aclosing(self._chat.ask(history, question, asked_for)) as views:
            async for view in views:
                shown = _values(view)
                yield [box, *shown]
                box = gr.skip()
        yield [_ready(), *shown]  # all of it again: who calls the page's API gets what came last


def _take_back_little(chatbot: gr.Chatbot) -> None:
    """Have it take texts and uploaded files back from the page. Other things that a caller may put into the history
    would be made of what the caller says, local files too. (Gradio writes a file beside the code for a subclass.)"""
    preprocess = chatbot._preprocess_content

    def check(message: Any) -> Any:
        if not isinstance(message, TextMessage | FileMessage):
            raise gr.Error("a conversation holds texts and files only")
        return preprocess(message)

    chatbot._preprocess_content = check  # type: ignore[assignment,method-assign]


def _settings_inputs() -> dict[str, Any]:
    """An input for each field of RequestSettings, in their order."""
    inputs = {
        "max_tokens": gr.Number(None, label="most tokens of an answer", precision=0, info=_EMPTY),
        "temperature": gr.Number(None, label="temperature", step=0.1, info=_EMPTY),
        "top_p": gr.Number(None, label="top-p", step=0.05, info=_EMPTY),
        "seed": gr.Number(None, label="seed", precision=0, info="empty: another one each time"),
        "detail": gr.Radio(["auto", "low", "high"], value="auto", label="detail of pictures"),
        "min_pixels": gr.Number(None, label="least pixels of a picture", precision=0, info=_EMPTY),
        "max_pixels": gr.Number(None, label="most pixels of a picture", precision=0, info=_EMPTY),
        "fps": gr.Number(None, label="frames a second of a video", step=0.5, info=_EMPTY),
    }
    assert tuple(inputs) == _SETTINGS
    return inputs


def _example(sample: Question) -> Any:
    return {"text": sample.text, "files": [str(path) for path in sample.files]}


def _values(view: View) -> list[Any]:
    """What chatbot, status, picture and rows show."""
    drawing = view.drawing
    image, rows = (None, None) if drawing is None else (drawing.image, [list(row) for row in drawing.rows])
    return [view.messages, view.status, image, rows]


def _busy() -> dict[str, Any]:
    return gr.update(value=None, interactive=False, submit_btn=False, stop_btn=True)


def _ready() -> dict[str, Any]:
    return gr.update(interactive=True, submit_btn=True, stop_btn=False)
