"""The page's conversation, and the requests that it becomes, which the server's own models accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vlmserve.commands.client.media import data_url
from vlmserve.commands.demo.chat import (
    Turn,
    answer_message,
    answered_turns,
    demo_body,
    error_message,
    files_of,
    last_question,
    question_message,
    read_settings,
)
from vlmserve.commands.demo.pictures import FOLDER, Question
from vlmserve.frontend.openai.protocol import ChatCompletionRequest

SHAPES = Question(text="What is this?", media=(Path("/x/shapes.png"), Path("/x/clip.mp4")))
AGAIN = Question(text="And the colour?")


def test_what_was_shown_is_read_back():
    messages = [question_message(SHAPES), answer_message("A circle."), question_message(AGAIN), answer_message("Red.")]
    messages = json.loads(json.dumps(messages))  # as through a browser
    assert answered_turns(messages) == (
        Turn(question=SHAPES, answer="A circle."),
        Turn(question=AGAIN, answer="Red."),
    )
    assert last_question(messages) == (messages[:2], AGAIN)


def test_questions_without_an_answer_are_left_out():
    failed, broken_off = Question(text="bad picture"), Question(text="broken off")
    stopped, stopped_early = Question(text="stopped"), Question(text="stopped early")
    messages = [
        *(question_message(failed), error_message("no picture")),
        *(question_message(broken_off), answer_message("A ci"), error_message("the engine is gone")),
        *(question_message(stopped), answer_message("A squ")),
        *(question_message(stopped_early), answer_message("")),
        question_message(AGAIN),
    ]
    assert answered_turns(messages) == (Turn(question=stopped, answer="A squ"),)
    assert last_question(messages) == (messages[:-1], AGAIN)
    assert answered_turns([]) == ()
    assert last_question([]) is last_question([answer_message("Hello!")]) is None


PICTURE, CLIP = FOLDER / "six.png", FOLDER / "rolling.mp4"


def parts_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    ChatCompletionRequest.model_validate(body)
    contents = [message["content"] for message in body["messages"] if message["role"] == "user"]
    return [part for content in contents for part in ([{"type": "text"}] if isinstance(content, str) else content)]


def test_a_conversation_with_its_media():
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


def test_settings_go_where_they_belong():
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


def test_a_question_may_lack_a_part_and_an_unknown_file_is_left_to_the_server(tmp_path):
    (tmp_path / "film.mp4").write_bytes(b"no film")
    for media, kinds in (([PICTURE], ["image_url"]), ([], ["text"]), ([tmp_path / "film.mp4"], ["image_url"])):
        body = demo_body("m", [], Question(text="", media=tuple(media)), {})
        assert [part["type"] for part in parts_of(body)] == kinds


def test_an_empty_field_leaves_it_to_the_server():
    form = {"max_tokens": " 7 ", "temperature": "", "top_p": None, "seed": "  ", "detail": "low", "fps": "0.5"}
    assert read_settings(form) == {"max_tokens": 7, "detail": "low", "fps": 0.5}
