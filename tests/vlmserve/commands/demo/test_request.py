"""The request that a conversation becomes, which the server's own shapes accept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vlmserve.api.protocol import ChatCompletionRequest
from vlmserve.commands.client.chat_files import data_url
from vlmserve.commands.client.conversation import OptionError
from vlmserve.commands.demo.conversation import Question, Turn, demo_body, files_of, read_settings
from vlmserve.commands.demo.samples import FOLDER, load_samples

PICTURE, CLIP = FOLDER / "six.png", FOLDER / "rolling.mp4"


def parts_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    ChatCompletionRequest.model_validate(body)
    contents = [message["content"] for message in body["messages"] if message["role"] == "user"]
    return [part for content in contents for part in ([{"type": "text"}] if isinstance(content, str) else content)]


def test_a_conversation_with_its_media() -> None:
    turn = Turn(question=Question(text="How many?", media=(PICTURE,)), answer="Six.")
    question = Question(text="Which way?", media=(CLIP,))
    body = demo_body("m", [turn], question, {})
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert body["messages"][1]["content"] == "Six."
    picture, how_many, clip, which_way = parts_of(body)
    assert picture == {
        "type": "image_url",
        "image_url": {"url": data_url(PICTURE.read_bytes())},
    }
    assert clip == {"type": "video_url", "video_url": {"url": data_url(CLIP.read_bytes())}}
    assert (how_many["text"], which_way["text"]) == ("How many?", "Which way?")
    assert body["stream"] is body["return_mm_report"] is body["stream_options"]["include_usage"] is True
    assert "temperature" not in body
    assert "max_tokens" not in body
    assert files_of([turn], question) == [PICTURE, CLIP]


def test_settings_go_where_they_belong() -> None:
    settings = {"max_tokens": 5, "temperature": 0.0, "top_p": 0.5, "seed": 0}
    settings |= {"detail": "low", "min_pixels": 784, "max_pixels": 1568, "fps": 0.5}
    body = demo_body("m", [], Question(text="?", media=(PICTURE, CLIP)), settings)
    picture, clip, _ = parts_of(body)
    assert (body["max_tokens"], body["temperature"], body["top_p"], body["seed"]) == (5, 0.0, 0.5, 0)
    assert picture["image_url"]["detail"] == "low"
    assert (picture["min_pixels"], picture["max_pixels"]) == (784, 1568)
    assert clip["fps"] == 0.5
    assert "fps" not in picture
    assert "max_pixels" not in clip


@pytest.mark.parametrize(("text", "files", "kinds"), [("", [PICTURE], ["image_url"]), ("", [], ["text"])])
def test_a_question_may_lack_a_part(text: str, files: list[Path], kinds: list[str]) -> None:
    body = demo_body("m", [], Question(text=text, media=tuple(files)), {})
    assert [part["type"] for part in parts_of(body)] == kinds


def test_what_is_no_picture_is_left_to_the_server(tmp_path: Path) -> None:
    file = tmp_path / "film.mp4"
    file.write_bytes(b"no film")
    body = demo_body("m", [], Question(text="?", media=(file,)), {})
    assert parts_of(body)[0]["type"] == "image_url"


def test_the_samples_are_there() -> None:
    samples = load_samples()
    assert Question(text="Which way does the circle move?", media=(CLIP,)) in samples
    assert len(samples) == 12
    assert all(path.is_file() for sample in samples for path in sample.media)


def test_an_empty_field_leaves_it_to_the_server() -> None:
    form = {"max_tokens": " 7 ", "temperature": "", "top_p": None, "seed": "  ", "detail": "low", "fps": "0.5"}
    assert read_settings(form) == {"max_tokens": 7, "detail": "low", "fps": 0.5}


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [("seed", "1.5", "a whole number"), ("top_p", "nan", "a number"), ("fps", "inf", "a number"), ("seed", "x", "a")],
)
def test_what_is_no_number_is_named(name: str, text: str, kind: str) -> None:
    with pytest.raises(OptionError, match=f"^{name} is '{text}'; it must be {kind}"):
        read_settings({name: text})
