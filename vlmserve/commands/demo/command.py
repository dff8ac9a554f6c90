"""The command line of `vlmserve demo`."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from vlmserve.api.listening import listen
from vlmserve.commands.demo.waiting import WaitingPage
from vlmserve.config.flags import CommandParser
from vlmserve.config.model_path import DEFAULT_MODEL_NAME
from vlmserve.config.settings import ENV_PREFIX
from vlmserve_common.errors import EngineError, VlmserveError
from vlmserve_common.process.stop_signals import StopRequested, ignore_stop_signals, stop_signals_raise

if TYPE_CHECKING:
    from vlmserve.commands.client.own_server import OwnServer
    from vlmserve.commands.demo.chat import Chat

USAGE_ERROR = 2
_SMALL = "It is the small built-in model: it knows drawn shapes, and little else."
_API_KEY = ENV_PREFIX + "API_KEY"
_ABOUT = """\
A page to chat with a model about pictures and videos.

Without --url, the model is served for it here, by a `vlmserve serve` that ends with this command. MODEL and all other
options go to that (`vlmserve serve --help` lists them); without a MODEL it is the small built-in one.
"""
_EPILOG = """\
examples:
  vlmserve demo
  vlmserve demo Qwen/Qwen3-VL-2B-Instruct --dtype bfloat16 --port 0
  vlmserve demo --url http://127.0.0.1:8000/v1 --api-key KEY
"""


class DemoError(VlmserveError):
    """The demo cannot run; the message says what to do."""


def main(argv: Sequence[str]) -> int:
    """Serve the page until SIGINT or SIGTERM; returns the exit status.

    Raises VlmserveError or OSError, with a message fit for the user, if it cannot be, or if the model's server ends.
    """
    args = _read(argv)
    if importlib.util.find_spec("gradio") is None:
        raise DemoError("the demo needs Gradio: pip install 'vlmserve[demo]'")
    with ExitStack() as stack:
        stack.enter_context(stop_signals_raise())
        try:
            _run(args, stack)
        except StopRequested:
            return 0
        finally:
            ignore_stop_signals()  # from here on everything is short, and must be done
    return 0


def _run(args: argparse.Namespace, stack: ExitStack) -> None:
    """Never returns. What it starts, the stack ends."""
    listener = listen(args.host, args.port)  # a taken port is known before a model is loaded
    port = listener.getsockname()[1]
    doing = "Starting the model's server" if args.url is None else f"Asking {args.url} for its model"
    with WaitingPage(listener, f"{doing} ...") as waiting:
        host = f"[{args.host}]" if ":" in args.host else args.host
        print(f"{doing} and loading the page: http://{host}:{port}/ is there already", file=sys.stderr, flush=True)
        keep_gradio_to_itself(stack.enter_context(tempfile.TemporaryDirectory(prefix="vlmserve-demo-")))
        chat, server = _connect(args, stack)
        waiting.doing = f"{chat.model} is there; loading the page ..."

        from vlmserve.commands.demo.page import Page
        from vlmserve.commands.demo.samples import FOLDER, load_samples

        page = Page(chat, load_samples(), _SMALL if chat.model == DEFAULT_MODEL_NAME else "")
    stack.callback(page.close)
    url = page.launch(args.host, port, share=args.share, allowed_paths=[FOLDER])
    print(f"vlmserve demo: {chat.model} at {url}", flush=True)
    while server is None:
        signal.pause()
    raise EngineError(f"the model's server ended with status {server.wait()}")


def _connect(args: argparse.Namespace, stack: ExitStack) -> tuple[Chat, OwnServer | None]:
    """The chat with a model that is there, and the server, if it is the demo's own."""
    from vlmserve.commands.client.chat_client import ChatClient
    from vlmserve.commands.client.own_server import own_model
    from vlmserve.commands.demo.chat import Chat

    if args.url is not None:
        client = ChatClient(args.url, api_key=args.api_key)
        return Chat(client, asyncio.run(client.model())), None
    loading = threading.Thread(target=_load_page, daemon=True)
    loading.start()  # Gradio takes seconds, and this thread is about to wait for the server
    server, client, model = stack.enter_context(own_model(args.serve))
    loading.join()
    return Chat(client, model), server


def _load_page() -> None:
    with suppress(Exception):  # the import that follows in the main thread tells what is wrong
        importlib.import_module("vlmserve.commands.demo.page")


def _read(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of the demo's own, and as `serve` the words that go to its server."""
    parser = CommandParser(prog="vlmserve demo", usage="%(prog)s [MODEL] [options]", description=_ABOUT, epilog=_EPILOG)
    parser.add_argument("--url", metavar="URL", help="use the server at http://host:port/v1, and load no model")
    parser.add_argument("--api-key", metavar="KEY", help=f"of that server [env: {_API_KEY}]")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address of the page; 0.0.0.0 for all: whoever reaches it may ask"
    )
    parser.add_argument(
        "--port", type=int, default=7860, help="port of the page; 0 lets the system choose [default: 7860]"
    )
    parser.add_argument("--share", action="store_true", help="have Gradio make a public address for the page")
    args, rest = parser.parse_known_args(argv)
    if args.url is not None and rest:
        parser.error(f"with --url, the server's own model and settings are used: {rest[0]!r} has no place here")
    if args.url is None and args.api_key is not None:
        parser.error("--api-key goes with --url; a server of the demo's own takes nobody else's requests")
    if not 0 <= args.port <= 65535:
        parser.error(f"--port is {args.port}; it must be between 0 and 65535")
    args.serve = rest
    args.api_key = args.api_key or os.environ.get(_API_KEY) or None
    return args


def keep_gradio_to_itself(folder: str, set_variable: Callable[[str, str], None] = os.environ.__setitem__) -> None:
    """Before Gradio is imported: keep its files in `folder`, its reports unsent, its way to this machine direct."""
    set_variable("GRADIO_ANALYTICS_ENABLED", "False")
    set_variable("GRADIO_TEMP_DIR", folder)
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    for name in ("no_proxy", "NO_PROXY"):
        set_variable(name, ",".join(filter(None, (direct, "127.0.0.1", "localhost"))))
