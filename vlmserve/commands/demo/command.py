"""The command line of `vlmserve demo`, and the page that stands at its address until the real one is loaded."""

from __future__ import annotations

import argparse
import asyncio
import html
import importlib
import importlib.util
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from vlmserve.api.listening import listen
from vlmserve.config.flags import CommandParser
from vlmserve.config.model_path import DEFAULT_MODEL_NAME
from vlmserve.config.settings import ENV_PREFIX
from vlmserve_common.errors import EngineError, VlmserveError
from vlmserve_common.installing import install
from vlmserve_common.process.stop_signals import StopRequested, ignore_stop_signals, made_whole, stop_signals_raise

if TYPE_CHECKING:
    from vlmserve.commands.client.own_server import ChatTarget

# The real page lacks this header, so the browser knows when to load it. Its value: when to look again, in milliseconds.
_MARK = "X-Vlmserve-Starting"
_PAGE = """\
<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>vlmserve: starting</title>
<style>
  :root {{ color-scheme: light dark; }}
  body {{ font: 16px/1.5 system-ui, sans-serif; margin: 15vh auto 0; max-width: 34rem; padding: 0 1rem; }}
  progress {{ width: 100%; }}
</style>
<h1>vlmserve</h1>
<p id="doing">{doing} ({seconds:.0f} s so far)</p>
<progress></progress>
<p>The page appears here by itself. Errors are shown on the terminal.</p>
<script>
  let silent = 0, pause = 500;
  async function look() {{
    try {{
      const reply = await fetch(location.href, {{cache: "no-store"}});
      if (!reply.headers.has("{mark}")) return location.reload();
      pause = Number(reply.headers.get("{mark}"));
      const there = new DOMParser().parseFromString(await reply.text(), "text/html");
      document.getElementById("doing").textContent = there.getElementById("doing").textContent;
      silent = 0;
    }} catch {{
      pause = 500;
      if (++silent > 20) document.getElementById("doing").textContent = "It has ended; the terminal says why.";
    }}
    setTimeout(look, pause);
  }}
  setTimeout(look, 500);
</script>
<noscript><meta http-equiv="refresh" content="2"></noscript>
</html>
"""


class WaitingPage(ThreadingHTTPServer):
    """Answers every request with a page that shows the current activity. A context manager.

    listener: a bound socket. It is closed at the end, and the address is free then.
    """

    daemon_threads = True

    def __init__(self, listener: socket.socket, doing: str) -> None:
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_activate()
        self.doing = doing
        self.pause_ms = 500
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Return the page."""
        seconds = time.monotonic() - self._started
        return _PAGE.format(doing=html.escape(self.doing), seconds=seconds, mark=_MARK)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that close the connection."""

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = 5
    server: WaitingPage

    def do_GET(self) -> None:
        content = self.server.text().encode()
        self.send_response(200)  # browsers log errors on their console
        self.send_header(_MARK, str(self.server.pause_ms))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


USAGE_ERROR = 2
_SMALL = "It is the small built-in model: it knows drawn shapes, and little else."
_API_KEY = ENV_PREFIX + "API_KEY"
_ABOUT = """\
A page to chat with a model about pictures and videos, or with an embedder, to search pictures by a sentence.

Without --url, a `vlmserve serve` of the demo's own serves the model, and ends with this command. MODEL and all other
options go to that server (`vlmserve serve --help-all` lists them). Without a MODEL, it serves the small built-in one.
"""
_EPILOG = """\
examples:
  vlmserve demo
  vlmserve demo Qwen/Qwen3-VL-2B-Instruct --dtype bfloat16 --port 0
  vlmserve demo --url http://127.0.0.1:8000/v1 --api-key KEY
"""


class DemoError(VlmserveError):
    """The demo cannot run. The message says what to do."""


def main(argv: Sequence[str]) -> int:
    """Serve the page until SIGINT or SIGTERM; returns the exit status.

    Raises VlmserveError or OSError, with a message for the user, if that fails or the model's server ends.
    """
    args = _read(argv)
    if importlib.util.find_spec("gradio") is None:
        raise DemoError(f"the demo needs Gradio: {install('demo')}")
    with ExitStack() as stack:
        stack.enter_context(stop_signals_raise())
        try:
            _run(args, stack)
        except StopRequested:
            return 0
        finally:
            ignore_stop_signals()  # the rest is short, and must not be interrupted
    return 0


def _run(args: argparse.Namespace, stack: ExitStack) -> None:
    """Serve the page; never returns. The stack ends everything that is started here."""
    listener = listen(args.host, args.port)  # a taken port is known before a model is loaded
    port = listener.getsockname()[1]
    doing = "Starting the model's server" if args.url is None else f"Asking {args.url} for its model"
    with WaitingPage(listener, f"{doing} ...") as waiting:
        host = f"[{args.host}]" if ":" in args.host else args.host
        address = f"http://{host}:{port}/"
        shown = f"{address} can be opened now, and shows the progress until the page is there"
        print(f"{doing} and loading the page: {shown}", file=sys.stderr, flush=True)
        folder = made_whole(partial(tempfile.TemporaryDirectory, prefix="vlmserve-demo-"))
        keep_gradio_to_itself(stack.enter_context(folder))
        served = _with_adapter(_connect(args, stack), args.adapter)
        waiting.doing = f"{served.model} is loaded; loading the page ..."
        waiting.pause_ms = 2500  # in between, nobody listens at this port
        defaults = asyncio.run(served.client.defaults())

        from vlmserve.commands.demo.chat import Chat
        from vlmserve.commands.demo.page import DemoPage
        from vlmserve.commands.demo.pictures import FOLDER, load_samples
        from vlmserve.commands.demo.search import Search

        search = asyncio.run(Search.at(served.client, served.model))
        note = _SMALL if served.model == DEFAULT_MODEL_NAME else ""
        page = DemoPage(Chat(served.client, served.model), load_samples(), search, note, defaults)
    stack.callback(page.close)
    url = page.launch(args.host, port, share=args.share, allowed_paths=[FOLDER])
    print(f"vlmserve demo: {served.model} at {url}", flush=True)
    while served.server is None:
        signal.pause()
    raise EngineError(f"the model's server ended with status {served.server.wait()}")


def _connect(args: argparse.Namespace, stack: ExitStack) -> ChatTarget:
    from vlmserve.commands.client.own_server import model_at, own_model

    if args.url is not None:
        return model_at(args.url, api_key=args.api_key)
    loading = threading.Thread(target=_load_page, daemon=True)
    loading.start()  # Gradio takes seconds, and this thread is about to wait for the server
    served = stack.enter_context(own_model(args.serve))
    loading.join()
    return served


def _with_adapter(served: ChatTarget, name: str | None) -> ChatTarget:
    if name is None:
        return served
    names = asyncio.run(served.client.models())
    if name not in names:
        raise DemoError(f"--adapter is {name!r}; the server has {', '.join(map(repr, names))} (--lora-paths)")
    return replace(served, model=name)


def _load_page() -> None:
    with suppress(Exception):  # the import in the main thread raises it again
        importlib.import_module("vlmserve.commands.demo.page")


def _read(argv: Sequence[str]) -> argparse.Namespace:
    """Read the demo's own flags. serve: the words that go to its server."""
    parser = CommandParser(prog="vlmserve demo", usage="%(prog)s [MODEL] [options]", description=_ABOUT, epilog=_EPILOG)
    parser.add_argument("--url", metavar="URL", help="use the server at http://host:port/v1, and load no model")
    parser.add_argument("--api-key", metavar="KEY", help=f"API key of that server [env: {_API_KEY}]")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address of the page; 0.0.0.0 opens it to everybody who can reach this machine",
    )
    parser.add_argument(
        "--port", type=int, default=7860, help="port of the page; 0 lets the system choose [default: 7860]"
    )
    parser.add_argument("--adapter", metavar="NAME", help="the server's LoRA adapter to chat with")
    parser.add_argument("--share", action="store_true", help="let Gradio make a public address for the page")
    args, rest = parser.parse_known_args(argv)
    if args.url is not None and rest:
        parser.error(f"with --url, the server's own model and settings are used: {rest[0]!r} has no place here")
    if args.url is None and args.api_key is not None:
        parser.error("--api-key goes with --url; the demo's own server has a key of its own")
    if not 0 <= args.port <= 65535:
        parser.error(f"--port is {args.port}; it must be between 0 and 65535")
    args.serve = rest
    args.api_key = args.api_key or os.environ.get(_API_KEY) or None
    return args


def keep_gradio_to_itself(folder: str, set_variable: Callable[[str, str], None] = os.environ.__setitem__) -> None:
    """Keep Gradio's files in `folder`, send no reports, and use no proxy to this machine. Call it before the import."""
    set_variable("GRADIO_ANALYTICS_ENABLED", "False")
    set_variable("GRADIO_TEMP_DIR", folder)
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    for name in ("no_proxy", "NO_PROXY"):
        set_variable(name, ",".join(filter(None, (direct, "127.0.0.1", "localhost"))))
