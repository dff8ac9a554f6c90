"""`vlmserve chat` at a terminal, with the real HTTP server and no model behind it."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import ExitStack, closing

import pytest

from tests.vlmserve.api.fake_engine import MODEL, Served
from tests.vlmserve.commands.chat.pty_process import PtyProcess
from tests.vlmserve.commands.served import fake_server
from vlmserve.commands.demo.pictures import FOLDER

KEY = "the key"
PICTURE, CLIP = FOLDER / "red-circle.png", FOLDER / "rolling.mp4"


@pytest.fixture
def server(checkpoint):
    with fake_server(checkpoint, api_key=KEY) as (served, url):
        served.scheduler.say("red")
        yield served, url


@pytest.fixture
def start(server, tmp_path):
    """Starts a chat with the server, in tmp_path."""
    shutil.copy(PICTURE, tmp_path / "two words.png")
    with ExitStack() as started:

        def start(*words: str, key: str = KEY) -> PtyProcess:
            words = ("chat", "--url", f"{server[1]}/v1", "--api-key", key, *words)
            return started.enter_context(closing(PtyProcess(*words, folder=tmp_path)))

        yield start


@pytest.fixture
def chat(start):
    chat = start()
    assert MODEL in chat.read_until("> $")
    return chat


def media_of(served: Served) -> list[int]:
    """How many media each request had."""
    requests = served.scheduler.requests
    return [0 if request.mm_inputs is None else len(request.mm_inputs.items) for request in requests]


def test_turns_with_pictures_and_a_clip(served, chat):
    assert "[picture two words.png] What is in the picture?\nred\n(first token after " in chat.ask(
        r"What is in two\ words.png?"
    )
    again = chat.ask("And now?")
    figures = r"\nred\n\(first token after \d+\.\d\d s · .*prompt \d+ tokens \(\d+ cached\) · answer \d+ tokens\)$"
    assert re.search(figures, again), again
    assert f"[picture {PICTURE.name}, video {CLIP.name}] Ask about it." in chat.ask(f"{PICTURE} '{CLIP}'")
    chat.ask("/set nframes 2")
    chat.ask("/set max_pixels 12544")
    assert "\nred\n" in chat.ask("Which of them?")
    assert media_of(served) == [1, 1, 3]
    first, second, _ = served.scheduler.requests
    assert second.input_ids[: len(first.input_ids)].tolist() == first.input_ids.tolist()
    chat.ask("/new")
    chat.ask("Hello?")
    assert media_of(served)[-1] == 0
    chat.type("\x04")
    assert chat.wait() == 0


def test_what_is_no_medium_is_told_and_nothing_is_lost(served, chat, tmp_path):
    (tmp_path / "broken.png").write_bytes(PICTURE.read_bytes()[:100])
    chat.ask("/image two words.png")
    chat.ask(f"/image 'two words.png' {PICTURE}")
    assert 'there is no file "it\'s"' in chat.ask("/image it's")
    assert "there is no file 'no.png'" in chat.ask("What is in no.png?")
    assert "there is no file 'no.png'" in chat.ask("/image 'no.png' no.png")
    assert "is a picture, not a video" in chat.ask(f"/video {PICTURE}")
    assert served.scheduler.requests == []
    chat.ask("What is it?")
    refused = chat.ask("And broken.png?")
    assert "the PNG picture is broken" in refused
    assert "The question does not count" in refused
    chat.ask("What was it?")
    assert media_of(served) == [3, 3]


def test_options_system_prompt_and_retry(served, chat):
    assert "nothing was asked yet" in chat.ask("/retry")
    assert "did you mean temperature?" in chat.ask("/set temprature 1")
    assert "top_k is '1.5'; it must be a whole number" in chat.ask("/set top_k 1.5")
    chat.ask("/set temperature -1")
    assert "temperature is -1.0; it must be between" in chat.ask("Hello?")
    chat.ask("/set temperature 0.5")
    chat.ask("/set seed=7")
    assert re.search(r"\n  seed +7 ", chat.ask("/set"))
    chat.ask("/retry")
    chat.ask("/retry")
    first, again = served.scheduler.requests
    assert first.input_ids.tolist() == again.input_ids.tolist()
    assert (first.sampling_params.temperature, first.sampling_params.seed) == (0.5, 7)
    chat.ask("/system Be brief.")
    chat.ask("/set seed default")
    chat.ask("Hello?")
    assert len(served.scheduler.requests[-1].input_ids) > 2 * len(first.input_ids)
    assert "did you mean /stats?" in chat.ask("/stat off")
    chat.ask("/stats off")
    assert "first token" not in chat.ask("Hello?")


def test_ctrl_c_stops_an_answer_and_what_was_said_counts(served, chat):
    served.scheduler.say("one two three four five")
    served.scheduler.pause_after = 3
    chat.type("Count!\r")
    chat.read_until("Count!\n(?=o)")
    chat.type("\x03")
    assert "(stopped; what was said counts)" in chat.read_until("> $")
    served.scheduler.wait_until(lambda: bool(served.scheduler.aborts))
    served.scheduler.pause_after = 0
    chat.type("Go on\r")
    served.scheduler.wait_until(lambda: len(served.scheduler.requests) == 2)
    chat.type("\x03")
    assert "(stopped; the question does not count" in chat.read_until("> $")
    served.scheduler.pause_after = None
    chat.ask("Go on!")
    count, stopped, kept = (request.input_ids.tolist() for request in served.scheduler.requests)
    assert stopped[: len(count)] == count
    assert len(stopped) <= len(kept) < len(stopped) + 5, "the turn that was stopped before a word came is left out"


def test_ctrl_c_at_the_prompt_leaves_the_second_time(chat):
    chat.type("something")
    chat.read_until("something$")
    chat.signal_at_prompt()
    assert "Ctrl-C again" in chat.read_until("> $")
    chat.ask("Hello?")
    chat.signal_at_prompt()
    chat.read_until("> $")
    chat.signal_at_prompt()
    assert chat.wait() == 0


def test_lines_of_a_block_are_taken_as_they_are(served, chat):
    chat.type('"""What is\r')
    chat.read_until(r"\n\. $")
    chat.type("no.png?\r")
    chat.read_until(r"\n\. $")
    assert "\nred\n" in chat.ask('"""')
    assert "no.png" in served.scheduler.tokenizer.decode(served.scheduler.requests[0].input_ids.tolist())


def test_a_conversation_is_saved(chat, tmp_path):
    (tmp_path / "kept.txt").write_text("mine")
    chat.ask(f"What is in {PICTURE}?")
    assert "'kept.txt' is there already" in chat.ask("/save kept.txt")
    assert (tmp_path / "kept.txt").read_text() == "mine"
    chat.ask("/save chat.txt")
    chat.ask("And now?")
    chat.ask("/save chat.txt")
    assert (tmp_path / "chat.txt").read_text() == (
        f"[picture: {PICTURE}]\n\n> What is in the picture?\n\nred\n\n> And now?\n\nred\n"
    )
    chat.ask("/save chat.json")
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert saved["model"] == MODEL
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"] * 2
    assert saved["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert "No such file or directory" in chat.ask("/save no/such/folder.txt")


def test_lines_are_remembered_unless_that_is_declined(start, tmp_path):
    history = tmp_path / "vlmserve" / "chat_history"
    silent = start("--no-history")
    silent.read_until("> $")
    silent.ask("secret?")
    silent.type("/exit\r")
    assert silent.wait() == 0
    assert not history.exists()
    first = start()
    first.read_until("> $")
    first.ask("Hello?")
    assert history.read_text() == "Hello?\n"
    assert history.stat().st_mode & 0o777 == 0o600
    second = start()
    second.read_until("> $")
    second.type("\x1b[A")
    assert second.read_until("Hello.$") == "Hello?"
    assert "red" in second.ask("")


def test_nothing_that_a_model_says_commands_the_terminal(served, chat):
    served.scheduler.say("a\x1b]0;title\x07b\x9bc\td")
    chat.type("Hello?\r")
    assert "\na]0;titlebc" in chat.read_until(r"> $")


def test_a_missing_key_is_told_and_ends_it(start):
    chat = start(key="other")
    assert "key" in chat.read_until(r"vlmserve: error: [^\n]+\n")
    assert chat.wait() == 1
