"""The command line of `vlmserve chat`."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from vlmserve.config.checks import SettingsError
from vlmserve.config.fields import flag
from vlmserve.config.flags import CommandParser, add_settings
from vlmserve.config.settings import ENV_PREFIX, iter_settings, load_settings

if TYPE_CHECKING:
    from vlmserve.chat.media import Medium
    from vlmserve.chat.session import Talker

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


@dataclass(frozen=True, kw_only=True)
class _Command:
    """serve: the settings of an own server; model: of its settings, "" for the built-in one."""

    url: str | None
    api_key: str | None
    model: str
    served_name: str | None
    serve: Mapping[str, Any]
    config: str | None
    files: tuple[str, ...]
    ask: str | None
    system: str | None
    options: Mapping[str, Any]
    history: bool


def main(argv: Sequence[str]) -> int:
    """Chat until the user leaves, or answer one question; returns the exit status.

    Raises VlmserveError or OSError, with a message fit for the user, if there is no answer or no server.
    """
    command = _read(argv)
    # a terminal window that is closed: what was made is to be cleared away
    with contextlib.suppress(ValueError):  # in another thread than the main one, where signals are not ours
        signal.signal(signal.SIGHUP, _exit)
    media = _open_all(command.files)
    if command.ask is not None or not sys.stdin.isatty():
        return _answer_one(command, media)
    from vlmserve.chat.session import Session
    from vlmserve.chat.terminal import Terminal, history_file

    with _talker(command) as talker:
        terminal = Terminal(history=history_file() if command.history else None)
        session = Session(talker, terminal, system=command.system, options=command.options, media=media)
        terminal.line(f"{talker.model}: ask away. /help lists the commands, Ctrl-D leaves.")
        session.run()
    return 0


def _answer_one(command: _Command, media: Sequence[Medium]) -> int:
    from vlmserve.chat.asking import ask
    from vlmserve.chat.conversation import Question, chat_body, chat_messages

    text = command.ask if command.ask is not None else sys.stdin.read().strip()
    if not text:
        _complain("there is no question: give one with --ask, or on standard input")
    question = Question(text=text, media=tuple(media))
    with _talker(command) as talker:
        messages = chat_messages(command.system, (), question, command.options)
        try:
            outcome = ask(talker.client, chat_body(talker.model, messages, command.options), _write)
            _write("\n")
        except BrokenPipeError:  # who read the answer has enough of it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
    if outcome.stopped:
        return 128 + signal.SIGINT
    for note in outcome.answer.notes:
        print(f"vlmserve chat: {note}", file=sys.stderr)
    return 0


@contextlib.contextmanager
def _talker(command: _Command) -> Iterator[Talker]:
    """The server that there is, or one of our own."""
    import asyncio

    from vlmserve.chat.session import Talker
    from vlmserve.chat.terminal import shown_while
    from vlmserve.client.chat_client import ChatClient
    from vlmserve.client.own_server import OwnServer
    from vlmserve.config.model_path import resolve_model
    from vlmserve_common.errors import CheckpointError

    if command.url is not None:
        client = ChatClient(command.url, api_key=command.api_key)
        yield Talker(client=client, model=command.served_name or asyncio.run(client.model()))
        return
    words = [*_words(command.serve), *(["--config", command.config] if command.config else [])]
    if command.model:
        folder = resolve_model(command.model)  # fetched here, if need be, where its progress can be seen
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{command.model!r} has no config.json: it is no model (name pictures one by one)")
        words += ["--model", str(folder), "--served-model-name", command.served_name or command.model]
    words = ["--log-level", "warning", "--shutdown-timeout-s", "0", "--max-body-mib", str(_BODY_MIB), *words]
    key = secrets.token_urlsafe()  # nobody else is to use it
    with contextlib.ExitStack() as stack:
        with shown_while(f"Starting a server for {command.model or 'the small built-in model'}", sys.stderr):
            server = stack.enter_context(OwnServer(words, {_API_KEY: key}))
            client = ChatClient(server.base_url, api_key=key)
            model = asyncio.run(client.model())
        yield Talker(client=client, model=model, whats_wrong=_how_it_ended(server))


def _how_it_ended(server: Any) -> Callable[[], str | None]:
    def tell() -> str | None:
        if server.status is None:
            return None
        return f"the model's server has ended with status {server.status}; /save still works, then start the chat anew"

    return tell


def _read(argv: Sequence[str]) -> _Command:
    args = _parser().parse_intermixed_args(argv)
    settings = {name: value for name, value in vars(args).items() if name in _servers_own()}
    config, files = args.config, tuple(args.words)
    try:
        options = _options(args)
        if args.url is not None:
            served_name = settings.pop("model", None)
            if settings or config:
                name = flag(next(iter(settings))) if settings else "--config"
                _complain(f"with --url, the server's own settings are used: {name} has no place here")
            model = ""
        else:
            if args.api_key is not None:
                _complain("--api-key goes with --url; a server of the chat's own takes nobody else's requests")
            if files and "model" not in settings and _is_model(files[0]):
                settings["model"], *rest_of_files = files
                files = tuple(rest_of_files)
            loaded = load_settings(settings, config=config)
            model, served_name = loaded.engine.model, loaded.served_model_name
            settings.pop("model", None)
    except SettingsError as error:
        _complain(str(error))
    return _Command(
        url=args.url,
        api_key=args.api_key or os.environ.get(_API_KEY) or None,
        model=model,
        served_name=served_name,
        serve=settings,
        config=config,
        files=files,
        ask=args.ask,
        system=args.system,
        options=options,
        history=not args.no_history,
    )


def _parser() -> argparse.ArgumentParser:
    from vlmserve.chat.options import OPTIONS

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
    from vlmserve.chat.options import OPTIONS, OptionError, parse_assignment, parse_option

    try:
        given = {name: getattr(args, name, None) for name in OPTIONS if name not in _servers_own()}
        flags = {name: parse_option(name, text) for name, text in given.items() if text is not None}
        return flags | dict(map(parse_assignment, args.set))
    except OptionError as error:
        _complain(str(error))


def _is_model(word: str) -> bool:
    """Whether the first word names a model rather than a file; both may have a slash in them."""
    from vlmserve.chat.media import ending_modality, is_web_address

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
    from vlmserve.chat.media import medium_of_bytes, open_medium

    return [
        medium_of_bytes("standard input", sys.stdin.buffer.read()) if file == "-" else open_medium(file)
        for file in files
    ]


def _write(text: str) -> None:
    from vlmserve.chat.terminal import printable

    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _exit(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _complain(message: str) -> NoReturn:
    """End the command: it was called wrongly."""
    for line in message.splitlines():
        print(f"vlmserve chat: error: {line}", file=sys.stderr)
    sys.exit(2)
