"""The command line of `vlmserve chat`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from vlmserve.commands.chat.asking import ask
from vlmserve.commands.chat.session import Session, Talker
from vlmserve.commands.chat.terminal import Terminal, history_file, printable, shown_while
from vlmserve.commands.client.chat_client import ChatClient
from vlmserve.commands.client.conversation import Question, chat_body, chat_messages
from vlmserve.commands.client.media import Medium, ending_modality, is_web_address, medium_of_bytes, open_medium
from vlmserve.commands.client.options import OPTIONS, OptionError, parse_assignment, parse_option
from vlmserve.commands.client.own_server import own_model
from vlmserve.config.checks import SettingsError
from vlmserve.config.fields import flag
from vlmserve.config.flags import CommandParser, add_settings
from vlmserve.config.model_path import resolve_model
from vlmserve.config.settings import ENV_PREFIX, iter_settings, load_settings
from vlmserve_common.errors import CheckpointError

_API_KEY = ENV_PREFIX + "API_KEY"
# What only a server that others use needs; --api-key is the chat's own flag.
_NOT_HERE = frozenset(("host", "port", "port_file", "api_key"))
# Sent inline, again with each question; who else would send as much to a server with a key that nobody knows?
_BODY_MIB = 4096
_ABOUT = """\
Chat with a model in the terminal, about pictures and videos too.

Without --url the model is served for the chat, by a `vlmserve serve` that ends with it. All options of that may be
given (`vlmserve serve --help` lists them). Without a MODEL it is the small built-in one.

FILEs are pictures and videos (or their web addresses) for the first question; - is standard input. In the chat, name
them anywhere in a question, or drop them on the terminal; /help lists the commands. With --ask, or with a question on
standard input, the answer is printed and nothing else, and the exit status says whether there is one.
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

    Raises VlmserveError or OSError, with a message fit for the user, if there is no answer or no server.
    """
    args = _read(argv)
    # a terminal window that is closed: what was made is to be cleared away
    with contextlib.suppress(ValueError):  # in another thread than the main one, where signals are not ours
        signal.signal(signal.SIGHUP, _exit)
    media = _open_all(args.files)
    if args.ask is not None or not sys.stdin.isatty():
        return _answer_one(args, media)

    with _talker(args) as talker:
        terminal = Terminal(history=None if args.no_history else history_file())
        session = Session(talker, terminal, system=args.system, options=args.options, media=media)
        terminal.line(f"{talker.model}: ask away. /help lists the commands, Ctrl-D leaves.")
        session.run()
    return 0


def _answer_one(args: argparse.Namespace, media: Sequence[Medium]) -> int:
    text = args.ask if args.ask is not None else sys.stdin.read().strip()
    if not text:
        _complain("there is no question: give one with --ask, or on standard input")
    question = Question(text=text, media=tuple(media))
    with _talker(args) as talker:
        messages = chat_messages(args.system, (), question, lambda medium: medium.part(args.options))
        try:
            answer, stopped = ask(talker.client, chat_body(talker.model, messages, args.options), _write)
            _write("\n")
        except BrokenPipeError:  # who read the answer has enough of it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
    if stopped:
        return 128 + signal.SIGINT
    for note in answer.notes:
        print(f"vlmserve chat: {note}", file=sys.stderr)
    return 0


@contextlib.contextmanager
def _talker(args: argparse.Namespace) -> Iterator[Talker]:
    """The server that there is, or one of our own."""
    if args.url is not None:
        client = ChatClient(args.url, api_key=args.api_key)
        yield Talker(client=client, model=args.served_name or asyncio.run(client.model()))
        return
    words = ["--max-body-mib", str(_BODY_MIB), *_words(args.serve), *(["--config", args.config] if args.config else [])]
    if args.model:
        folder = resolve_model(args.model)  # fetched here, if need be, where its progress can be seen
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{args.model!r} has no config.json: it is no model (name pictures one by one)")
        words += ["--model", str(folder), "--served-model-name", args.served_name or args.model]
    with contextlib.ExitStack() as stack:
        with shown_while(f"Starting a server for {args.model or 'the small built-in model'}", sys.stderr):
            server, client, model = stack.enter_context(own_model(words))
        yield Talker(client=client, model=model, server=server)


def _read(argv: Sequence[str]) -> argparse.Namespace:
    """What was given: serve are an own server's settings, model of these ("": the built-in one), options the requests',
    files the FILEs."""
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
        _complain("--api-key goes with --url; a server of the chat's own takes nobody else's requests")
    if args.files and "model" not in args.serve and _is_model(args.files[0]):
        args.serve["model"] = args.files.pop(0)
    try:
        loaded = load_settings(args.serve, config=args.config)
    except SettingsError as error:
        _complain(str(error))
    args.model, args.served_name = loaded.engine.model, loaded.served_model_name
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
        help="use the server at http://host:port/v1 (--model NAME: that one of its models)",
    )
    parser.add_argument("--api-key", metavar="KEY", help=f"of that server [env: {_API_KEY}]")
    parser.add_argument("--ask", metavar="TEXT", help="ask this, print the answer, and end")
    parser.add_argument("--system", metavar="TEXT", help="a system prompt")
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="as /set; may be repeated")
    parser.add_argument("--no-history", action="store_true", help="remember no lines from chat to chat")
    options = parser.add_argument_group("options of the requests (/set changes them)")
    for name, option in OPTIONS.items():
        if name not in _servers_own():
            options.add_argument(flag(name), metavar="VALUE", default=None, help=option.help)
    shown = set(parser._actions)
    add_settings(parser, _servers_own())
    for action in parser._actions:
        if action not in shown:
            action.help = argparse.SUPPRESS  # there are a hundred of them
    return parser


def _servers_own() -> set[str]:
    """The settings that an own server may be given."""
    return {setting.name for setting in iter_settings()} - _NOT_HERE


def _options(args: argparse.Namespace) -> dict[str, Any]:
    try:
        given = {name: getattr(args, name, None) for name in OPTIONS if name not in _servers_own()}
        flags = {name: parse_option(name, text) for name, text in given.items() if text is not None}
        return flags | dict(map(parse_assignment, args.set))
    except OptionError as error:
        _complain(str(error))


def _is_model(word: str) -> bool:
    """Whether the first word names a model rather than a file; both may have a slash in them."""
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
    """End the command: it was called wrongly."""
    for line in message.splitlines():
        print(f"vlmserve chat: error: {line}", file=sys.stderr)
    sys.exit(2)
