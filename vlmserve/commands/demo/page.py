"""The page: Gradio's components, and the function that each event calls."""

from __future__ import annotations

import html
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import gradio as gr
from gradio.components.chatbot import FileMessage, TextMessage

from vlmserve.commands.demo import panels
from vlmserve.commands.demo.camera import Watch
from vlmserve.commands.demo.chat import LABELS, Chat, Message, View, last_question
from vlmserve.commands.demo.pictures import Question, make_thumbnails
from vlmserve.commands.demo.search import Search
from vlmserve.commands.demo.search_tab import SearchTab

_NOTHING = View(messages=())
_HEADERS = ["", "label", "x1", "y1", "x2", "y2"]
_STYLE = Path(__file__).parent / "page.css"
# A click on a sample also scrolls to the conversation.
_SAMPLE_CLICKS = """
element.addEventListener('click', (event) => {
  const sample = event.target.closest('[data-sample]');
  if (!sample) return;
  document.getElementById('chat').scrollIntoView({block: 'nearest'});
  trigger('click', {index: Number(sample.dataset.sample)});
});
"""
# Its style sheet tells what this class means. Errors of media do not bubble, so they are caught on their way down.
_ON_LOAD = """
() => document.addEventListener('error', (event) => {
  if (event.target.matches('#chat video, #chat img')) event.target.closest('.message').classList.add('not-shown');
}, true)
"""


class DemoPage:
    """A page to chat with one model. samples: questions to begin with. note: a sentence on the model. search: by this
    model, which then does not chat; a text says why it cannot search.

    defaults: the server's values for empty fields of the form, and "max_model_len", as far as they are known.
    """

    def __init__(
        self,
        chat: Chat,
        samples: Sequence[Question],
        search: Search | str,
        note: str = "",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._chat = chat
        self._samples = samples
        self._search = search
        self._note = note
        self._defaults = defaults or {}
        self._watches: WeakValueDictionary[str, Watch] = WeakValueDictionary()  # by page; states own them
        self._blocks = self._build()

    def launch(self, host: str, port: int, *, share: bool, allowed_paths: Sequence[Path]) -> str:
        """Serve the page in threads of its own; returns its address. allowed_paths: of the samples' files.

        Raises OSError if the port is taken.
        """
        _, url, shared = self._blocks.launch(
            server_name=host,
            server_port=port,
            share=share,
            allowed_paths=[str(path) for path in allowed_paths],
            css_paths=_STYLE,
            js=_ON_LOAD,
            prevent_thread_lock=True,
            quiet=True,
            inbrowser=False,
            max_file_size="512mb",
            run_history=False,
            enable_monitoring=False,
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            footer_links=["api"],
        )
        return shared or url

    def close(self) -> None:
        """Stop serving, and end current answers."""
        self._blocks.close(verbose=False)

    def _build(self) -> gr.Blocks:
        with gr.Blocks(title=f"vlmserve: {self._chat.model}", analytics_enabled=False) as blocks:
            searches = isinstance(self._search, Search)
            gr.HTML(panels.head(self._chat.model, self._note, searches=searches), elem_id="head")
            with gr.Tabs(selected="search" if searches else "chat"):
                with gr.Tab("Chat", id="chat", visible=not searches):
                    self._build_chat()
                with gr.Tab("Search pictures", id="search"):
                    SearchTab(self._search)
            blocks.unload(self._leave)
        return blocks

    def _build_chat(self) -> None:
        with gr.Row(equal_height=False):
            with gr.Column(scale=3, min_width=300):
                chatbot = gr.Chatbot(
                    show_label=False,
                    elem_id="chat",
                    height=None,
                    min_height=70,
                    placeholder="Nothing asked yet",
                    buttons=["copy"],
                )
                _take_back_little(chatbot)
                box = gr.MultimodalTextbox(
                    label="question",
                    show_label=False,
                    placeholder="Your question; drop pictures and clips here, or add them by the paper clip",
                    file_count="multiple",
                    autofocus=True,
                )
            with gr.Column(scale=2, min_width=300, visible=False, elem_id="panels") as column:
                picture = gr.Image(
                    label="boxes and points",
                    interactive=False,
                    format="png",
                    visible=False,
                    buttons=["download", "fullscreen"],
                    elem_id="drawing",
                )
                rows = gr.Dataframe(
                    label="in pixels of the picture as it was sent",
                    headers=_HEADERS,
                    column_widths=["10%", "30%", "15%", "15%", "15%", "15%"],
                    wrap=True,
                    interactive=False,
                    visible=False,
                    elem_id="rows",
                )
                saw = gr.HTML(elem_id="saw")
        gallery = gr.HTML(panels.gallery(make_thumbnails(self._samples)), elem_id="samples", js_on_load=_SAMPLE_CLICKS)
        with gr.Accordion("Camera", open=False, elem_id="live"):
            self._add_camera()
        with gr.Accordion("Settings", open=False, elem_id="settings"):
            settings = _settings_inputs(self._defaults)
        outputs = [box, chatbot, column, picture, rows, saw]
        asked = box.submit(self._ask, [box, chatbot, *settings], outputs, api_name="ask", concurrency_limit=None)
        again = chatbot.retry(
            self._ask_again, [chatbot, *settings], outputs, api_visibility="private", concurrency_limit=None
        )
        sampled = gallery.click(
            self._ask_sample,
            settings,
            outputs,
            cancels=[asked, again],
            api_visibility="private",
            concurrency_limit=None,
        )
        nothing = outputs[2:]
        stopping: list[Any] = [asked, again, sampled]
        box.stop(_stopped, None, [box, *nothing], cancels=stopping, api_visibility="private", queue=False)
        chatbot.clear(lambda: _panels(_NOTHING), None, nothing, api_visibility="private")

    async def _ask(
        self,
        message: dict[str, Any],
        history: list[Message],
        max_tokens: str | None = None,
        temperature: str | None = None,
        top_p: str | None = None,
        seed: str | None = None,
        detail: Any = None,
        min_pixels: str | None = None,
        max_pixels: str | None = None,
        fps: str | None = None,
    ) -> AsyncIterator[list[Any]]:
        """Ask about pictures and videos. (The page's own API shows this text and the names.)"""
        settings = (max_tokens, temperature, top_p, seed, detail, min_pixels, max_pixels, fps)
        question = Question(text=message["text"], media=tuple(map(Path, message["files"])))
        async for update in self._updates(history, question, settings):
            yield update

    async def _ask_again(self, history: list[Message], *settings: Any) -> AsyncIterator[list[Any]]:
        found = last_question(history)
        if found is not None:
            async for update in self._updates(*found, settings):
                yield update

    async def _ask_sample(self, chosen: gr.EventData, *settings: Any) -> AsyncIterator[list[Any]]:
        async for update in self._updates([], self._samples[chosen.index], settings):
            yield update

    async def _updates(
        self, history: Sequence[Message], question: Question, settings: Sequence[Any]
    ) -> AsyncIterator[list[Any]]:
        form = dict(zip(LABELS, settings, strict=True))
        view = View(messages=history)
        box, aside = _busy(), _waiting()
        async with aclosing(self._chat.ask(history, question, form)) as views:
            async for view in views:
                yield [box, view.messages, *aside]
                box, aside = gr.skip(), [gr.skip()] * 4
        # The messages again: a caller of the page's API gets the last update.
        yield [_ready(), view.messages, *_panels(view)]

    def _add_camera(self) -> None:
        with gr.Row(equal_height=False):
            webcam = gr.Image(sources=["webcam"], streaming=True, type="numpy", label="camera", elem_id="camera")
            with gr.Column():
                question = gr.Textbox("What do you see?", label="asked again and again", max_lines=2)
                every = gr.Slider(1, 30, 3, step=1, label="seconds from one answer to the next")
                said = gr.HTML(elem_id="camera-answers")
        # Gradio keeps a page's state for an hour after the page is closed, so that late frames find it.
        state = gr.State(None)
        webcam.stream(
            self._see,
            [webcam, question, every, state],
            [said, state],
            stream_every=0.5,
            time_limit=3600,
            concurrency_limit=None,
            api_visibility="private",
        )

    async def _see(
        self, picture: Any, asked: str, seconds: float, watch: Watch | None, request: gr.Request
    ) -> tuple[Any, Any]:
        if picture is None:
            return gr.skip(), watch
        watch = watch or Watch(self._chat.client, self._chat.model)
        self._watches[str(request.session_hash)] = watch
        return f"<pre>{html.escape(await watch.show(picture, asked, seconds))}</pre>", watch

    async def _leave(self, request: gr.Request) -> None:
        """Forget what a page's camera showed: the page is closed."""
        watch = self._watches.get(str(request.session_hash))
        if watch is not None:
            await watch.leave()


def _take_back_little(chatbot: gr.Chatbot) -> None:
    """Let the chatbot accept only texts and uploaded files from the page.

    Gradio would build other components from a caller's history, even with local files. (It writes a file beside the
    code of a subclass, so this replaces a method.)
    """
    preprocess = chatbot._preprocess_content

    def check(message: Any) -> Any:
        if not isinstance(message, TextMessage | FileMessage):
            raise gr.Error("a conversation holds texts and files only")
        return preprocess(message)

    chatbot._preprocess_content = check  # type: ignore[assignment,method-assign]


def _settings_inputs(defaults: Mapping[str, Any]) -> list[Any]:
    """Make an input for each of LABELS, in their order. defaults: see `DemoPage`.

    Numbers have text fields: Gradio's number field turns an empty value into 0 when it is shown.
    """
    inputs: dict[str, Any] = {}

    def field(name: str) -> None:
        empty = "another one each time" if name == "seed" else _by_the_server(name, defaults)
        inputs[name] = gr.Textbox(None, label=LABELS[name], placeholder=empty, max_lines=1, min_width=140)

    for row in (("max_tokens", "temperature", "top_p", "seed"), ("min_pixels", "max_pixels", "fps")):
        with gr.Row():
            for name in row:
                field(name)
            if "fps" in row:
                levels = ["auto", "low", "high"]
                inputs["detail"] = gr.Radio(levels, value="auto", label=LABELS["detail"], min_width=140)
    return [inputs[name] for name in LABELS]


def _by_the_server(name: str, defaults: Mapping[str, Any]) -> str:
    """Return what an empty field stands for."""
    value = defaults.get("max_model_len" if name == "max_tokens" else name)
    if not isinstance(value, int | float):
        return "as the server has it"
    shown = str(value) if isinstance(value, int) else f"{value:g}"
    return f"what fits in {shown}" if name == "max_tokens" else f"{shown} (the server's)"


def _waiting() -> list[Any]:
    """Return the panels while an answer is computed: the same ones as before, but empty."""
    hidden = gr.update(value=None, visible=False)
    return [gr.skip(), hidden, hidden, panels.WAITING]


def _panels(view: View) -> list[Any]:
    """Return the values of column, picture, rows and saw; empty without a complete answer.

    They are made anew each time, since Gradio empties them.
    """
    answer, drawing = view.answer, view.drawing
    image, rows = None, None
    problems: Sequence[str] = ()
    if drawing is not None:
        image, rows, problems = drawing.image, [list(row) for row in drawing.rows], drawing.problems
    saw = ""
    if answer is not None and answer.stats is not None:
        saw = panels.saw(view.media, len(answer.media), answer.stats, (*answer.notes, *problems))
    return [
        gr.update(visible=answer is not None),
        gr.update(value=image, visible=drawing is not None),
        gr.update(value=rows, visible=drawing is not None),
        saw,
    ]


def _busy() -> dict[str, Any]:
    return gr.update(value=None, interactive=False, submit_btn=False, stop_btn=True)


def _stopped() -> list[Any]:
    return [_ready(), *_panels(_NOTHING)]


def _ready() -> dict[str, Any]:
    return gr.update(interactive=True, submit_btn=True, stop_btn=False)
