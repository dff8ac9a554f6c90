"""Paths in a line, as people type them and terminals drop them."""

from __future__ import annotations

import shutil

import pytest

from processors.inputs import Modality
from vlmserve.commands.chat.session import find_mentions, make_question, question_text
from vlmserve.commands.client.conversation import ChatQuestion, ChatTurn
from vlmserve.commands.client.media import Medium, MediumError, open_medium
from vlmserve.commands.demo.pictures import FOLDER


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, and the user's home, with a few files."""
    for name in ("cat.png", "my cat's.png", "two words.png"):
        shutil.copy(FOLDER / "red-circle.png", tmp_path / name)
    shutil.copy(FOLDER / "rolling.mp4", tmp_path / "clip.mp4")
    (tmp_path / "notes").write_text("no picture")
    (tmp_path / "notes.png").write_text("no picture")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def words(line: str) -> list[str]:
    return [mention.word for mention in find_mentions(line)]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("What is in cat.png?", ["cat.png"]),
        ("What is this? (cat.png)", ["cat.png"]),
        ("~/cat.png ./clip.mp4, and cat.png.", ["~/cat.png", "./clip.mp4", "cat.png"]),
        ("'two words.png' what's this", ["two words.png"]),
        ('what is "two words.png"?', ["two words.png"]),
        (r"two\ words.png, what is it", ["two words.png"]),
        (r"'my cat'\''s.png' and it's here", ["my cat's.png"]),
        ("see ./two words.png for it", ["./two words.png"]),
        ("https://example.com/a.JPG?x=1 is https://example.com/page", ["https://example.com/a.JPG?x=1"]),
        ("is dog.png there", ["dog.png"]),
        ("'dog days.png'?", ["dog days.png"]),
        ("what's in cat.png, dog's or hers", ["cat.png"]),
        ("notes about and/or, JPEG/PNG, e.g. 3.5 of .png", []),
        ("it's 'quoted' and \\ odd \"", []),
        ("look at ./notes", ["./notes"]),
        ("/no/such/folder/at/all", []),
        ("", []),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_counts_as_a_medium(line, found):
    assert words(line) == found


def test_a_file_uri(folder):
    [mention] = find_mentions(f"file://{folder}/two%20words.png what?")
    assert open_medium(mention.word).modality is Modality.IMAGE


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("What is in cat.png?", "What is in A?"),
        ("What is this? cat.png", "What is this?"),
        (" cat.png clip.mp4 what are they", "what are they"),
        ("compare cat.png with clip.mp4", "compare A with B"),
        ("cat.png: is it in clip.mp4?", ": is it in B?"),
        ("  two  blanks  'cat.png' ", "two  blanks"),
        ("cat.png clip.mp4", ""),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_the_model_is_asked(line, text):
    mentions = find_mentions(line)
    assert question_text(line, mentions, ["A", "B"][: len(mentions)]) == text


def test_labels_count_through_the_conversation():
    picture = Medium(name="a", modality=Modality.IMAGE, url="data:")
    clip = Medium(name="b", modality=Modality.VIDEO, url="data:")
    line = "is x.png or y.mp4 red?"
    mentions = find_mentions(line)
    alone = make_question(line, mentions, [picture, clip], [], [])
    assert alone.text == "is the picture or the video red?"
    earlier = ChatTurn(question=ChatQuestion(text="?", media=(picture,)), answer="!")
    later = make_question(line, mentions, [picture, clip], [picture], [earlier])
    assert later.text == "is picture 3 or the video red?"
    assert later.media == (picture, picture, clip)


@pytest.mark.parametrize(
    ("word", "modality", "reason"),
    [
        ("dog.png", None, "there is no file 'dog.png'"),
        ("notes.png", None, "'notes.png' is neither a picture nor a video"),
        (".", None, "'.' is a folder"),
        ("/dev/zero", None, "'/dev/zero' is no ordinary file"),
        ("clip.mp4", Modality.IMAGE, "'clip.mp4' is a video, not a picture"),
        ("cat.png", Modality.VIDEO, "'cat.png' is a picture, not a video"),
        ("a\0b", None, "cannot be read"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_cannot_be_sent_is_told(word, modality, reason):
    with pytest.raises(MediumError, match=reason):
        open_medium(word, modality)
