"""The conversation at the terminal: lines are questions, or commands that begin with a slash."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from processors.inputs import Modality
from vlmserve.commands.chat.terminal import Terminal
from vlmserve.commands.client.chat_client import ChatAnswer, ChatClient, ServerError, Stats
from vlmserve.commands.client.conversation import (
    OPTIONS,
    ChatQuestion,
    ChatTurn,
    OptionError,
    chat_body,
    chat_messages,
    option_named,
    parse_option,
)
from vlmserve.commands.client.media import (
    KINDS,
    Medium,
    MediumError,
    begins_as_medium,
    ending_modality,
    is_web_address,
    local_path,
    open_medium,
)
from vlmserve.commands.client.own_server import ChatTarget
from vlmserve.config.plain_problems import did_you_mean


def ask(client: ChatClient, body: Mapping[str, Any], write: Callable[[str], None]) -> tuple[ChatAnswer, bool]:
    """Ask a question. Returns the answer, as far as it came, and True if Ctrl-C stopped it. Raises ServerError.

    Call it in the main thread, where Ctrl-C arrives. write: takes each piece of text.
    """
    answer = ChatAnswer(text="")

    async def read() -> None:
        nonlocal answer
        async with aclosing(client.ask(body)) as answers:
            async for now in answers:
                piece, answer = now.text[len(answer.text) :], now
                if piece:
                    write(piece)

    try:
        asyncio.run(read())
    except KeyboardInterrupt:
        return answer, True
    return answer, False


def stats_line(stats: Stats) -> str:
    """Return the times and tokens of an answer as a line for people."""
    words = [f"first token after {stats.ttft_s:.2f} s"]
    rate = stats.tokens_per_s()
    if rate is not None:
        words.append(f"{rate:.1f} tokens/s")
    words.append(f"prompt {stats.prompt_tokens} tokens ({stats.cached_tokens} cached)")
    words.append(f"answer {stats.completion_tokens} tokens")
    return " · ".join(words)


HELP = """\
Type a question; name pictures and videos in it by path or web address, or drop them on the terminal.
  \"\"\"                    begins and ends text of several lines, in which no paths are looked for
  /image FILE ...        pictures for the next question
  /video FILE ...        videos for the next question
  /audio FILE ...        sounds for the next question
  /retry                 ask the last question again
  /new, /clear           forget the conversation
  /system TEXT           use a system prompt from the next question on; /system off: none
  /set NAME VALUE        set an option of the requests; /set NAME default; /set lists all
  /stats on|off          show tokens and times of each answer
  /save FILE             write the conversation: FILE.json as messages of the API, any other as text
  /help                  show this
  /exit, /quit           leave, as Ctrl-D does
Ctrl-C stops an answer; at the prompt, twice leaves."""
_NOT_SENT = 'Nothing was sent. The up arrow brings the line back; text between """ is taken as it is.'
_BLOCK = '"""'
_LOOKS_LIKE_COMMAND = re.compile(r"/\w*(?:\s|$)")


class ChatSession:
    """A conversation with a served model. options: of requests. media: for the first question."""

    def __init__(
        self,
        served: ChatTarget,
        terminal: Terminal,
        *,
        system: str | None = None,
        options: Mapping[str, Any],
        media: Sequence[Medium] = (),
    ) -> None:
        self._served = served
        self._terminal = terminal
        self._system = system
        self._options = dict(options)
        self._turns: list[ChatTurn[Medium]] = []
        self._waiting = list(media)
        self._last: ChatQuestion[Medium] | None = None
        self._stats = True
        self._saved: set[Path] = set()
        self._commands: dict[str, Callable[[str], None]] = {
            "/image": lambda rest: self._attach(rest, Modality.IMAGE),
            "/video": lambda rest: self._attach(rest, Modality.VIDEO),
            "/audio": lambda rest: self._attach(rest, Modality.AUDIO),
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
        """Read lines and answer them until the user leaves."""
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
        """Read a message. Returns True with it if the text is to be used verbatim."""
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

    def _ask(self, question: ChatQuestion[Medium], before: Sequence[ChatTurn[Medium]]) -> None:
        """Ask a question. If it is answered, it becomes a turn after `before`."""
        self._last = question
        messages = self._messages(before, question)
        body = chat_body(self._served.model, messages, self._options)
        try:
            answer, stopped = ask(self._served.client, body, self._terminal.piece)
        except ServerError as error:
            ended = self._served.server and self._served.server.status
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
            self._turns = [*before, ChatTurn(question=question, answer=answer.text)]

    def _messages(
        self, turns: Sequence[ChatTurn[Medium]], question: ChatQuestion[Medium] | None
    ) -> list[dict[str, Any]]:
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
            text = json.dumps({"model": self._served.model, "messages": messages}, indent=2, ensure_ascii=False) + "\n"
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


def _as_text(system: str | None, turns: Sequence[ChatTurn[Medium]]) -> str:
    paragraphs = [] if system is None else [f"System: {system}"]
    for turn in turns:
        paragraphs += [f"[{medium.kind}: {medium.name}]" for medium in turn.question.media]
        paragraphs += [f"> {turn.question.text}".replace("\n", "\n> "), turn.answer]
    return "\n\n".join(paragraphs) + "\n"


_SHELL_WORD = re.compile(r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*")+""")
_BARE_WORD = re.compile(r"(?:[^\s\\]|\\.|\\$)+")
_NOT_BLANK = re.compile(r"\S")
_WORD_END = re.compile(r"(?=\s)|[?!.,;:]?$")
_OPENING = "([{<"
_CLOSING = ")]}>?!.,;:'\""
_MOST_SPACES = 20  # in a path that is not quoted


@dataclass(frozen=True, kw_only=True, slots=True)
class Mention:
    """The place of a path or address in a line. word: the path or address without quotes."""

    start: int
    end: int
    word: str


def find_mentions(line: str) -> list[Mention]:
    """Find all mentions, in order; also missing files with endings of pictures and videos.

    Dropped files are known in all forms of terminals: '/a b.png', /a\\ b.png, file:///a%20b.png, ~/a.png, bare.
    """
    mentions = []
    place = 0
    while found := _NOT_BLANK.search(line, place):
        place = found.start()
        if line[place] in _OPENING:
            place += 1
            continue
        mention = _mention_at(line, place)
        if mention is not None:
            mentions.append(mention)
            place = mention.end
        else:
            bare = _BARE_WORD.match(line, place)
            place = bare.end() if bare else place + 1
    return mentions


def make_question(
    line: str,
    mentions: Sequence[Mention],
    named: Sequence[Medium],
    waiting: Sequence[Medium],
    turns: Sequence[ChatTurn[Medium]],
) -> ChatQuestion[Medium]:
    """Make the question of a line, with the media that it names and those that waited for it."""
    all_media = [*(medium for turn in turns for medium in turn.question.media), *waiting, *named]
    labels = [_label(all_media, len(all_media) - len(named) + number) for number in range(len(named))]
    return ChatQuestion(text=question_text(line, mentions, labels), media=(*waiting, *named))


def question_text(line: str, mentions: Sequence[Mention], labels: Sequence[str]) -> str:
    """Return the line without its mentions: the text for the model.

    Mentions before and after all text are left out. Mentions inside a sentence become labels, and then those after it
    do, too ("compare a.png with b.png").
    """
    count = len(mentions)
    ends = [0, *(mention.end for mention in mentions)]
    starts = [*(mention.start for mention in mentions), len(line)]
    texts = [line[end:start] for end, start in zip(ends, starts, strict=True)]
    before = next((number for number, text in enumerate(texts) if text.strip()), count)
    behind = next((number for number, text in enumerate(reversed(texts)) if text.strip()), count)
    shown = range(before, count) if before + behind < count else range(0)
    pieces = [texts[0]]
    for number in range(count):
        pieces += [labels[number] if number in shown else "", texts[number + 1]]
    return "".join(pieces).strip()


def split_words(text: str) -> list[str]:
    """Split the rest of a /image line: one path with spaces if there is such a file, otherwise as a shell does."""
    if os.path.isfile(local_path(text)):
        return [text]
    try:
        return shlex.split(text)
    except ValueError:
        return [text]


def _mention_at(line: str, place: int) -> Mention | None:
    missing = None
    for end, word, explicit in _candidates(line, place):
        if is_web_address(word):
            if ending_modality(urlsplit(word).path) is not None:
                return Mention(start=place, end=end, word=word)
        elif os.path.isfile(local_path(word)):
            if explicit or begins_as_medium(local_path(word)):
                return Mention(start=place, end=end, word=word)
        elif missing is None and ending_modality(word) is not None:
            missing = Mention(start=place, end=end, word=word)
    return missing


def _candidates(line: str, place: int) -> Iterator[tuple[int, str, bool]]:
    """Yield candidates: the end, the word, and True if it can hardly be anything but a path."""
    for pattern in (_SHELL_WORD, _BARE_WORD):
        found = pattern.match(line, place)
        if found is None:
            continue
        text = found.group()
        while text:
            word = _unquoted(text)
            if word:
                yield place + len(text), word, "/" in word or word != text
            if text[-1] not in _CLOSING:
                break
            text = text[:-1]
    if line.startswith(("/", "~/", "./", "../"), place):
        for end in islice(_WORD_END.finditer(line, place), _MOST_SPACES):
            yield end.start(), line[place : end.start()], True


def _unquoted(text: str) -> str:
    try:
        return "".join(shlex.split(text))
    except ValueError:  # an apostrophe, maybe
        return text


def _label(media: Sequence[Medium], place: int) -> str:
    """Return the label of a medium in the text. place: its number in the conversation."""
    medium = media[place]
    alike = [other for other, one in enumerate(media) if one.modality is medium.modality]
    return f"the {medium.kind}" if len(alike) == 1 else f"{medium.kind} {1 + alike.index(place)}"
