"""The conversation at the terminal: lines are questions, or commands that begin with a slash."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processors.inputs import Modality
from vlmserve.commands.chat.asking import ask, stats_line
from vlmserve.commands.chat.mentions import find_mentions, make_question, split_words
from vlmserve.commands.chat.terminal import Terminal
from vlmserve.commands.client.chat_client import ChatClient, ServerError
from vlmserve.commands.client.conversation import Question, Turn, chat_body, chat_messages
from vlmserve.commands.client.media import KINDS, Medium, MediumError, open_medium
from vlmserve.commands.client.options import OPTIONS, OptionError, option_named, parse_option
from vlmserve.commands.client.own_server import OwnServer
from vlmserve.config.plain_problems import did_you_mean

HELP = """\
Type a question; name pictures and videos in it by path or web address, or drop them on the terminal.
  \"\"\"                    begins and ends text of several lines, in which no paths are looked for
  /image FILE ...        pictures for the next question
  /video FILE ...        videos for the next question
  /retry                 ask the last question again
  /new, /clear           forget the conversation
  /system TEXT           a system prompt, from the next question on; /system off: none
  /set NAME VALUE        an option of the requests; /set NAME default; /set: list them
  /stats on|off          show tokens and times of each answer
  /save FILE             write the conversation: FILE.json as messages of the API, any other as text
  /help                  this
  /exit, /quit           leave, as Ctrl-D does
Ctrl-C stops an answer; at the prompt, twice leaves."""
_NOT_SENT = 'Nothing was sent. The up arrow brings the line back; text between """ is taken as it is.'
_BLOCK = '"""'
_LOOKS_LIKE_COMMAND = re.compile(r"/\w*(?:\s|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Talker:
    """Whom the session talks to. server: the chat's own, if it is that."""

    client: ChatClient
    model: str
    server: OwnServer | None = None


class Session:
    """options: as after `/set`. media: for the first question."""

    def __init__(
        self,
        talker: Talker,
        terminal: Terminal,
        *,
        system: str | None = None,
        options: Mapping[str, Any],
        media: Sequence[Medium] = (),
    ) -> None:
        self._talker = talker
        self._terminal = terminal
        self._system = system
        self._options = dict(options)
        self._turns: list[Turn[Medium]] = []
        self._waiting = list(media)
        self._last: Question[Medium] | None = None
        self._stats = True
        self._saved: set[Path] = set()
        self._commands: dict[str, Callable[[str], None]] = {
            "/image": lambda rest: self._attach(rest, Modality.IMAGE),
            "/video": lambda rest: self._attach(rest, Modality.VIDEO),
            "/retry": self._retry,
            "/new": self._forget,
            "/clear": self._forget,
            "/system": self._set_system,
            "/set": self._set,
            "/stats": self._set_stats,
            "/save": self._save,
            "/help": lambda rest: self._terminal.line(HELP),
            "/exit": self._leave,
            "/quit": self._leave,
        }
        terminal.complete(list(self._commands))

    def run(self) -> None:
        """Until the user leaves."""
        interrupted = False
        while True:
            try:
                line, verbatim = self._read()
                interrupted = False
                self._handle(line, verbatim=verbatim)
            except EOFError:
                self._terminal.line("")
                return
            except KeyboardInterrupt:
                self._terminal.line("")
                if interrupted:
                    return
                interrupted = True
                self._terminal.note("Ctrl-C again, or Ctrl-D, leaves; /help lists the commands")
            except (MediumError, OptionError, OSError) as error:
                self._terminal.error(str(error))

    def _read(self) -> tuple[str, bool]:
        """A message, and whether it is to be taken as it is."""
        line = self._terminal.read_line("> ")
        if not line.lstrip().startswith(_BLOCK):
            return line, False
        lines = [line.lstrip().removeprefix(_BLOCK)]
        while not lines[-1].rstrip().endswith(_BLOCK):
            lines.append(self._terminal.read_line(". "))
        lines[-1] = lines[-1].rstrip().removesuffix(_BLOCK)
        return "\n".join(lines).strip("\n"), True

    def _handle(self, line: str, *, verbatim: bool) -> None:
        if not line.strip():
            return
        word, _, rest = line.strip().partition(" ")
        if not verbatim and word in self._commands:
            self._commands[word](rest.strip())
            return
        mentions = [] if verbatim else find_mentions(line)
        if not verbatim and _LOOKS_LIKE_COMMAND.match(line.strip()) and not mentions:
            guess = did_you_mean(word, self._commands, "; /help lists them")
            self._terminal.error(f"there is no command {word}{guess}")
            return
        try:
            named = [open_medium(mention.word) for mention in mentions]
        except MediumError as error:
            self._terminal.error(str(error))
            self._terminal.note(_NOT_SENT)
            return
        question = make_question(line, mentions, named, self._waiting, self._turns)
        if not question.text:
            self._wait_with(named)
            return
        if named:
            self._terminal.note(f"[{_list(question.media)}] {question.text}")
        self._waiting = []
        self._ask(question, self._turns)

    def _ask(self, question: Question[Medium], before: Sequence[Turn[Medium]]) -> None:
        """A question that is answered becomes a turn behind `before`; else all stays as it is."""
        self._last = question
        messages = self._messages(before, question)
        body = chat_body(self._talker.model, messages, self._options)
        try:
            answer, stopped = ask(self._talker.client, body, self._terminal.piece)
        except ServerError as error:
            ended = self._talker.server and self._talker.server.status
            gone = f"the model's server has ended with status {ended}; /save still works, then start the chat anew"
            self._terminal.error(str(error) if ended is None else gone)
            self._terminal.note("The question does not count; /retry asks it again.")
            return
        self._terminal.end_line()
        if stopped:
            kept = "what was said counts" if answer.text else "the question does not count; /retry asks it again"
            self._terminal.note(f"(stopped; {kept})")
        for note in answer.notes:
            self._terminal.note(f"({note})")
        if answer.stats is not None and self._stats:
            self._terminal.note(f"({stats_line(answer.stats)})")
        if answer.text or not stopped:
            self._turns = [*before, Turn(question=question, answer=answer.text)]

    def _messages(self, turns: Sequence[Turn[Medium]], question: Question[Medium] | None) -> list[dict[str, Any]]:
        return chat_messages(self._system, turns, question, lambda medium: medium.part(self._options))

    def _wait_with(self, media: Sequence[Medium]) -> None:
        self._waiting += media
        self._terminal.note(f"[{_list(self._waiting)}] Ask about it.")

    # ---- commands

    def _attach(self, rest: str, modality: Modality) -> None:
        if not rest:
            raise MediumError(f"/{modality} needs the path or web address of a {KINDS[modality]}")
        self._wait_with([open_medium(word, modality) for word in split_words(rest)])

    def _retry(self, rest: str) -> None:
        if self._last is None:
            raise OptionError("nothing was asked yet")
        answered = bool(self._turns) and self._turns[-1].question is self._last
        self._ask(self._last, self._turns[:-1] if answered else self._turns)

    def _forget(self, rest: str) -> None:
        self._turns, self._waiting, self._last = [], [], None
        self._terminal.note("A new conversation; the system prompt and options stay.")

    def _set_system(self, rest: str) -> None:
        if rest:
            self._system = None if rest == "off" else rest
        self._terminal.line(f"system prompt: {self._system or 'none'}")

    def _set(self, rest: str) -> None:
        name, _, value = rest.replace("=", " ", 1).partition(" ")
        if not name:
            for known, option in OPTIONS.items():
                self._terminal.line(f"  {known:20} {self._options.get(known, 'default')!s:10} {option.help}")
            return
        name, value = option_named(name), value.strip()
        if value == "default":
            self._options.pop(name, None)
        elif value:
            self._options[name] = parse_option(name, value)
        self._terminal.line(f"{name}: {self._options.get(name, 'default')}")

    def _set_stats(self, rest: str) -> None:
        if rest not in ("on", "off"):
            raise OptionError(f"/stats is {'on' if self._stats else 'off'}; /stats on or /stats off changes it")
        self._stats = rest == "on"
        self._terminal.line(f"stats: {rest}")

    def _save(self, rest: str) -> None:
        if not rest:
            raise OptionError("/save needs the file to write")
        path = Path(os.path.expanduser(rest)).absolute()
        if path.suffix.lower() == ".json":
            messages = self._messages(self._turns, None)
            text = json.dumps({"model": self._talker.model, "messages": messages}, indent=2, ensure_ascii=False) + "\n"
        else:
            text = _as_text(self._system, self._turns)
        try:
            with path.open("w" if path in self._saved else "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise OptionError(f"{rest!r} is there already, and not from this chat: name another file") from None
        self._saved.add(path)
        count = len(self._turns)
        self._terminal.line(f"saved {count} {'answer' if count == 1 else 'answers'} and what was asked in {path}")

    def _leave(self, rest: str) -> None:
        raise EOFError


def _list(media: Sequence[Medium]) -> str:
    return ", ".join(f"{medium.kind} {os.path.basename(medium.name)}" for medium in media)


def _as_text(system: str | None, turns: Sequence[Turn[Medium]]) -> str:
    paragraphs = [] if system is None else [f"System: {system}"]
    for turn in turns:
        paragraphs += [f"[{medium.kind}: {medium.name}]" for medium in turn.question.media]
        paragraphs += [f"> {turn.question.text}".replace("\n", "\n> "), turn.answer]
    return "\n\n".join(paragraphs) + "\n"
