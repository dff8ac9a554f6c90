"""Finds the pictures and videos that a line names, also in the forms in which terminals paste dropped files.

Quoted ('/a b.png'), with backslashes (/a\\ b.png), as a URI (file:///a%20b.png), with `~`, or bare, spaces and all.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from urllib.parse import urlsplit

from vlmserve.commands.client.conversation import ChatQuestion, ChatTurn
from vlmserve.commands.client.media import Medium, begins_as_medium, ending_modality, is_web_address, local_path

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
    """Find all mentions, in order; also missing files with endings of pictures and videos."""
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
