"""The command line of `vlmserve chat`."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from vlmserve.commands.chat.session import ChatSession, ask
from vlmserve.commands.chat.terminal import Terminal, history_file, printable, shown_while
from vlmserve.commands.client.conversation import (
    OPTIONS,
    ChatQuestion,
    OptionError,
    chat_body,
    chat_messages,
    parse_assignment,
    parse_option,
)
from vlmserve.commands.client.media import Medium, ending_modality, is_web_address, medium_of_bytes, open_medium
from vlmserve.commands.client.own_server import ChatTarget, model_at, own_model
from vlmserve.config.checks import SettingsError
from vlmserve.config.fields import flag
from vlmserve.config.flags import CommandParser, add_settings
from vlmserve.config.model_path import resolve_model
from vlmserve.config.settings import ENV_PREFIX, iter_settings, load_settings
from vlmserve_common.errors import CheckpointError

_API_KEY = ENV_PREFIX + "API_KEY"
# Settings that only a public server needs; --api-key is the chat's own flag.
_NOT_HERE = frozenset(("host", "port", "port_file", "api_key"))
# All media are sent inline, again with each question, and nobody else can reach the server.
_BODY_MIB = 4096
_ABOUT = """\
Chat with a model in the terminal, about pictures and videos too.

Without --url, a `vlmserve serve` of the chat's own serves the model, and ends with the chat. It takes all options that
`vlmserve serve --help-all` lists. Without a MODEL, it serves the small built-in one.

FILEs are pictures and videos (or their web addresses) for the first question; - is standard input. In the chat, name
files anywhere in a question, or drop them on the terminal; /help lists the commands. With --ask, or with a question on
standard input, only the answer is printed, and the exit status is 0 if there is one.
"""
_EPILOG = """\
examples:
  vlmserve chat
  vlmserve chat Qwen/Qwen3-VL-2B-Instruct --dtype bfloat16
  vlmserve chat --ask "What is this?" picture.png
  vlmserve chat --url http://127.0.0.1:8000/v1 --api-key KEY
"""


def main(argv: Sequence[str]) -> int:
    """Chat until the user leaves, or answer one question; returns the exit status.

    Raises VlmserveError or OSError, with a message for the user, if there is no answer or no server.
    """
    args = _read(argv)
    # when the terminal's window is closed, the server must end and its files go
    with contextlib.suppress(ValueError):  # not in the main thread, where alone signals can be set
        signal.signal(signal.SIGHUP, _exit)
    media = _open_all(args.files)
    if args.ask is not None or not sys.stdin.isatty():
        return _answer_one(args, media)

    with _served(args) as served:
        terminal = Terminal(history=None if args.no_history else history_file())
        session = ChatSession(served, terminal, system=args.system, options=args.options, media=media)
        terminal.line(f"{served.model}: ask away. /help lists the commands, Ctrl-D leaves.")
        session.run()
    return 0


def _answer_one(args: argparse.Namespace, media: Sequence[Medium]) -> int:
    text = args.ask if args.ask is not None else sys.stdin.read().strip()
    if not text:
        _complain("there is no question: give one with --ask, or on standard input")
    question = ChatQuestion(text=text, media=tuple(media))
    with _served(args) as served:
        messages = chat_messages(args.system, (), question, lambda medium: medium.part(args.options))
        try:
            answer, stopped = ask(served.client, chat_body(served.model, messages, args.options), _write)
            _write("\n")
        except BrokenPipeError:  # the reader of the answer has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
    if stopped:
        return 128 + signal.SIGINT
    for note in answer.notes:
        print(f"vlmserve chat: {note}", file=sys.stderr)
    return 0


@contextlib.contextmanager
def _served(args: argparse.Namespace) -> Iterator[ChatTarget]:
    if args.url is not None:
        yield model_at(args.url, api_key=args.api_key, name=args.served_name)
        return
    words = ["--max-body-mib", str(_BODY_MIB), *_words(args.serve), *(["--config", args.config] if args.config else [])]
    if args.model:
        folder = resolve_model(args.model, args.revision)  # a download shows its progress here
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{args.model!r} has no config.json: it is no model (name pictures one by one)")
        words += ["--model", str(folder), "--served-model-name", args.served_name or args.model]
    with contextlib.ExitStack() as stack:
        with shown_while(f"Starting a server for {args.model or 'the small built-in model'}", sys.stderr):
            served = stack.enter_context(own_model(words))
        yield served


def _read(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line. serve: the own server's settings. model: "" is the built-in one. options: of requests."""
    args = _parser().parse_intermixed_args(argv)
    args.serve = {name: value for name, value in vars(args).items() if name in _servers_own()}
    args.files = list(args.words)
    args.options = _options(args)
    if args.url is not None:
        args.served_name, args.model = args.serve.pop("model", None), ""
        if args.serve or args.config:
            name = flag(next(iter(args.serve), "config"))
            _complain(f"with --url, the server's own settings are used: {name} has no place here")
        args.api_key = args.api_key or os.environ.get(_API_KEY) or None
        return args
    if args.api_key is not None:
        _complain("--api-key goes with --url; the chat's own server has a key of its own")
    if args.files and "model" not in args.serve and _is_model(args.files[0]):
        args.serve["model"] = args.files.pop(0)
    try:
        loaded = load_settings(args.serve, config=args.config)
    except SettingsError as error:
        _complain(str(error))
    args.model, args.served_name = loaded.engine.model, loaded.served_model_name
    args.revision = loaded.engine.revision
    args.serve.pop("model", None)
    return args


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="vlmserve chat", usage="%(prog)s [MODEL] [FILE ...] [options]", description=_ABOUT, epilog=_EPILOG
    )
    parser.add_argument("words", metavar="MODEL, FILE", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument(
        "--url",
        metavar="URL",
        help="use the server at http://host:port/v1 (--model NAME chooses one of its models)",
    )
    parser.add_argument("--api-key", metavar="KEY", help=f"API key of that server [env: {_API_KEY}]")
    parser.add_argument("--ask", metavar="TEXT", help="ask TEXT, print the answer, and end")
    parser.add_argument("--system", metavar="TEXT", help="a system prompt")
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="an option of the requests, as with /set; may be repeated",
    )
    parser.add_argument("--no-history", action="store_true", help="do not keep a history of lines")
    options = parser.add_argument_group("options of the requests (/set changes them)")
    for name, option in OPTIONS.items():
        if name not in _servers_own():
            options.add_argument(flag(name), metavar="VALUE", default=None, help=option.help)
    shown = set(parser._actions)
    add_settings(parser, _servers_own(), help_all=False)
    for action in parser._actions:
        if action not in shown:
            action.help = argparse.SUPPRESS  # `vlmserve serve --help-all` shows them
    return parser


def _servers_own() -> set[str]:
    return {setting.name for setting in iter_settings()} - _NOT_HERE


def _options(args: argparse.Namespace) -> dict[str, Any]:
    try:
        given = {name: getattr(args, name, None) for name in OPTIONS if name not in _servers_own()}
        flags = {name: parse_option(name, text) for name, text in given.items() if text is not None}
        return flags | dict(map(parse_assignment, args.set))
    except OptionError as error:
        _complain(str(error))


def _is_model(word: str) -> bool:
    """Return True if the first word names a model, not a file. Both may have a slash."""
    if is_web_address(word) or word == "-":
        return False
    path = Path(word).expanduser()
    return path.is_dir() or (not path.exists() and ending_modality(word) is None)


def _words(settings: Mapping[str, Any]) -> list[str]:
    words = []
    for name, value in settings.items():
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        else:
            words += [flag(name), value]
    return words


def _open_all(files: Sequence[str]) -> list[Medium]:
    return [
        medium_of_bytes("standard input", sys.stdin.buffer.read()) if file == "-" else open_medium(file)
        for file in files
    ]


def _write(text: str) -> None:
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _exit(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _complain(message: str) -> NoReturn:
    for line in message.splitlines():
        print(f"vlmserve chat: error: {line}", file=sys.stderr)
    sys.exit(2)
