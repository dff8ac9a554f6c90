"""What the page shows, read as a conversation."""

from __future__ import annotations

import json
from pathlib import Path

from vlmserve.commands.demo.conversation import (
    Question,
    Turn,
    answer_message,
    answered_turns,
    error_message,
    last_question,
    question_message,
)

SHAPES = Question(text="What is this?", media=(Path("/x/shapes.png"), Path("/x/clip.mp4")))
AGAIN = Question(text="And the colour?")


def test_what_was_shown_is_read_back() -> None:
    messages = [question_message(SHAPES), answer_message("A circle."), question_message(AGAIN), answer_message("Red.")]
    messages = json.loads(json.dumps(messages))  # as through a browser
    assert answered_turns(messages) == (
        Turn(question=SHAPES, answer="A circle."),
        Turn(question=AGAIN, answer="Red."),
    )
    assert last_question(messages) == (messages[:2], AGAIN)


def test_files_have_the_type_that_their_name_says() -> None:
    files = [part["file"] for part in question_message(SHAPES)["content"] if part["type"] == "file"]
    assert [file["mime_type"] for file in files] == ["image/png", "video/mp4"]


def test_questions_without_an_answer_are_left_out() -> None:
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


def test_nothing_was_said() -> None:
    assert answered_turns([]) == ()
    assert last_question([]) is None
    assert last_question([answer_message("Hello!")]) is None
