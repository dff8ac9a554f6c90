"""Rows of tables: what an actor of `map_batches` takes, what it asks, and what becomes of rows that fail."""

from __future__ import annotations

import asyncio
import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from tests.vlmserve.commands.caption.runs import PNG, FakeCaptioner, caption_of, content, medium_of
from tests.vlmserve.commands.warmup.media import data_url, png
from tests.vlmserve.reference import picture
from vlmserve import LLM
from vlmserve.commands.caption import rows
from vlmserve.commands.caption.run import CaptionStopped
from vlmserve.config.checks import SettingsError
from vlmserve.ray import Captioner, VLMProcessor
from vlmserve_common.errors import BadRequestError, EngineError


class FakeEngine(FakeCaptioner):
    def __init__(self, settings, *, concurrency, nothing_twice):
        super().__init__(getattr(FakeEngine, "hook", None))
        self.settings, self.concurrency, self.nothing_twice = settings, concurrency, nothing_twice


@pytest.fixture
def actor(monkeypatch):
    """Makes actors whose engine needs no model."""
    monkeypatch.setattr(rows, "LocalCaptioner", FakeEngine)
    made = []

    def make(kind=Captioner, **arguments):
        made.append(kind(**arguments))
        return made[-1]

    yield make
    for one in made:
        asyncio.run(one.close())


def table(**columns):
    """As Ray hands batches over: objects, but for numbers."""
    return {name: rows._column(values) for name, values in columns.items()}


def ask(actor, **columns):
    answered = asyncio.run(actor(table(**columns)))
    count = len(next(iter(columns.values())))
    assert all(len(values) == count for values in answered.values())
    return answered


def test_a_picture_may_be_bytes_a_path_a_url_or_a_dict(actor, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    ends_with_zeros = content(1) + b"\0\0"
    given = [
        *(PNG, str(path), path.as_uri(), data_url(PNG), ends_with_zeros),
        *({"bytes": PNG, "path": None}, {"bytes": None, "path": str(path)}),
    ]
    answered = ask(actor(), image=given)
    assert list(answered["error"]) == [""] * len(given)
    expected = [caption_of(ends_with_zeros if one is ends_with_zeros else PNG) for one in given]
    assert list(answered["caption"]) == expected
    assert list(answered["image"]) == given, "columns stay"
    assert list(answered["finish_reason"]) == ["stop"] * len(given)
    assert list(answered["completion_tokens"]) == [3] * len(given)


def test_pixels_are_kept_as_they_are(actor):
    engine = actor()
    pixels = np.asarray(picture(1, 40, 30))
    answered = ask(engine, image=[pixels, pixels[:, :, :1], np.dstack([pixels, pixels[:, :, :1]])])
    assert list(answered["error"]) == [""] * 3
    sent = [Image.open(io.BytesIO(data)) for data in engine._engine.asked]
    back = {image.mode: np.asarray(image) for image in sent}
    assert set(back) == {"RGB", "L", "RGBA"}
    assert np.array_equal(back["RGB"], pixels)
    assert np.array_equal(back["L"], pixels[:, :, 0])


def test_a_bad_row_is_an_error_row(actor, tmp_path):
    gone = str(tmp_path / "gone.png")
    given = [PNG, b"no picture", gone, None, 7, np.zeros((2, 2), np.float32), np.zeros((3, 4, 5), np.uint8)]
    answered = ask(actor(), image=given)
    assert list(answered["caption"]) == [caption_of(PNG), *[""] * 6]
    assert [list(map(type, values)) for name, values in answered.items() if name in ("captions", "prompt_tokens")] == [
        *([list] * 7, [int] * 7)
    ], "columns have one type, whatever fails"
    told = list(answered["error"])
    assert told[0] == ""
    assert "neither a picture nor a video" in told[1]
    assert "gone.png" in told[2]
    assert "no picture or video" in told[3]
    assert told[4] == "image is a value of type int; it must be a path, a URL or a file's bytes"
    assert told[5] == "image is an array of float32, [2, 2]; a picture is one of uint8, [height, width, 3]"
    assert told[6].startswith("image is an array of uint8, [3, 4, 5]")


def test_what_the_engine_refuses_or_breaks_on_is_told_in_the_row(actor, monkeypatch):
    def hook(request):
        if medium_of(request) == content(1):
            raise BadRequestError("the picture has 9 pixels, the limit is 4")
        if medium_of(request) == content(2):
            raise EngineError("the encoder failed")
        if medium_of(request) == content(3):
            raise ZeroDivisionError("oh")

    monkeypatch.setattr(FakeEngine, "hook", staticmethod(hook), raising=False)
    answered = ask(actor(), image=[content(n) for n in range(4)])
    assert list(answered["error"]) == [
        *("", "the picture has 9 pixels, the limit is 4", "the encoder failed", "ZeroDivisionError: oh")
    ]


def test_an_engine_that_is_gone_ends_the_process(actor, monkeypatch):
    class Ended(BaseException):
        pass

    def leave(status):
        raise Ended(status)

    def hook(request):
        raise CaptionStopped("the engine has failed")

    monkeypatch.setattr(FakeEngine, "hook", staticmethod(hook), raising=False)
    monkeypatch.setattr(rows.os, "_exit", leave)
    with pytest.raises(Ended):
        ask(actor(), image=[PNG])


def test_rows_of_several_batches_are_under_way_together(actor, monkeypatch):
    engine = actor(concurrency=6)
    six, under_way, most = asyncio.Event(), 0, 0
    answer = engine._answer

    async def gate(row):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        if under_way == 6:
            six.set()
        await six.wait()  # for ever, unless rows of both batches are here
        answered = await answer(row)
        under_way -= 1
        return answered

    monkeypatch.setattr(engine, "_answer", gate)

    async def two_batches():
        return await asyncio.gather(*(engine(table(image=[content(n) for n in range(k, k + 4)])) for k in (0, 4)))

    first, second = asyncio.run(two_batches())
    assert [*first["caption"], *second["caption"]] == [caption_of(content(n)) for n in range(8)]
    assert most == 6, "and not more than concurrency"


def test_prompts_are_templates_of_the_columns(actor):
    engine = actor(prompt="Is it a {{ kind }}?", prompt_column="own", prefix="{{ size }}: ", media_column="file")
    answered = ask(
        engine,
        file=[content(0), content(1), content(2)],
        kind=["cat", "dog", "cow"],
        own=[None, "What is it?", "{{ nothing }}"],
        size=[np.int64(3), np.float32(0.5), 7],
    )
    asked = [request.messages[-1]["content"][1]["text"] for request in engine._engine.requests]
    assert sorted(asked) == ["Is it a cat?", "What is it?"]
    assert [caption.partition(":")[0] for caption in answered["caption"]] == ["3", "0.5", ""]
    assert "nothing" in answered["error"][2]
    with pytest.raises(SettingsError, match="--prompt: the template"):
        Captioner(prompt="{{ oh")


def test_equal_rows_are_equal_requests(actor):
    first, second = actor(options={"n": 2, "temperature": 0.7}), actor(options={"n": 2, "temperature": 0.7})
    one, two = ask(first, image=[PNG, content(1)]), ask(second, image=[PNG, content(1)])
    seeds = [[request.options["seed"] for request in engine._engine.requests] for engine in (first, second)]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2
    assert list(one["captions"]) == list(two["captions"])
    assert [len(captions) for captions in one["captions"]] == [2, 2]
    assert first._engine.settings.engine.disable_radix_cache is False, "a prompt comes twice"
    assert actor()._engine.settings.engine.disable_radix_cache is True


def test_the_medium_may_be_left_out_of_the_result(actor):
    engine = actor(keep_media=False)
    assert list(ask(engine, image=[PNG], name=["a"])) == ["name", *Captioner.columns]
    empty = asyncio.run(engine(table(image=[], name=[])))
    assert all(len(values) == 0 for values in empty.values())
    assert "caption" in empty


def test_settings_are_checked_before_a_model_is_loaded(actor):
    with pytest.raises(SettingsError, match="LLM has no setting 'page_sizes'"):
        Captioner(page_sizes=3)
    with pytest.raises(BadRequestError, match="temperature"):
        Captioner(options={"temperature": "hot"})
    engine = actor(max_images_per_request=3, media_processes=2)._engine
    assert (engine.settings.max_images_per_request, engine.settings.engine.media_processes) == (3, 2)
    assert actor()._engine.settings.engine.media_processes >= 1, "strangers' files are decoded apart"


def test_a_chat_request_is_a_list_or_json_and_its_files_are_read(actor, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(content(1))
    text = {"type": "text", "text": "What is it?"}

    def messages(medium):
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": medium}}, text]}]

    # a table has all fields in all parts
    filled = [{"role": "user", "content": [{"type": "image", "image": PNG, "text": None}, {"image": None, **text}]}]
    given = [messages(str(path)), json.dumps(messages(str(path))), filled, messages(str(tmp_path / "gone")), 3, "{"]
    engine = actor(VLMProcessor, options={"max_tokens": 8}, options_column="options")
    own = [None, json.dumps({"max_tokens": 4}), {"seed": 5, "top_p": None}, None, None, None]
    answered = ask(engine, messages=given, options=own)
    assert list(answered["answer"]) == [*[caption_of(content(1))] * 2, caption_of(PNG), "", "", ""]
    asked = [request.options for request in engine._engine.requests]  # in any order
    assert all(one in asked for one in ({"max_tokens": 8}, {"max_tokens": 4}, {"max_tokens": 8, "seed": 5}))
    assert json.loads(answered["response"][0])["choices"][0]["finish_reason"] == "stop"
    told = list(answered["error"])
    assert told[:3] == [""] * 3
    assert "gone" in told[3]
    assert told[4] == "messages is int; it must be a list of messages"
    assert told[5].startswith("messages is no JSON")


def test_captions_are_those_of_the_engine_and_files_are_decoded_apart():
    pictures = [png(1), png(2)]
    settings = {"num_threads": 1, "dtype": "float32", "max_total_tokens": 2048, "max_pixels": 256 * 256}
    with LLM(media_processes=0, **settings) as llm:
        expected = [
            llm.chat("Describe the picture.", images=[one], max_tokens=8, temperature=0.0).text for one in pictures
        ]
    engine = Captioner(options={"max_tokens": 8}, media_processes=1, **settings)
    try:
        broken = b"\x89PNG\r\n\x1a\n" + base64.b64encode(bytes(99))
        answered = ask(engine, image=[pictures[0], broken, pictures[1]])
    finally:
        asyncio.run(engine.close())
    assert [answered["caption"][0], answered["caption"][2]] == expected
    assert answered["error"][1]
