"""What callers of `LLM` may write shorter, what they are told of what is wrong, and media loaded ahead."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.processors.helpers import encoded
from vlmserve import LLM, AsyncLLM, ChatPrompt, GenerateReqInput, SamplingOverrides
from vlmserve.commands.offline.inputs import conversation, read_settings, sampling_of
from vlmserve.config.checks import SettingsError
from vlmserve.frontend.openai.json_bodies import checked
from vlmserve.frontend.openai.protocol import ChatCompletionRequest
from vlmserve_common.errors import BadRequestError, EngineError

SAMPLES = Path(__file__).resolve().parents[2] / "assets" / "samples"
SIX = str(SAMPLES / "six.png")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_threads=1, max_num_seqs=4) as llm:
        yield llm


def test_a_text_and_pictures_by_path(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    question = {"type": "text", "text": "How many circles are there?"}
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": SIX},
        {"type": "image", "image": Path(SIX)},
        {"type": "image_url", "image_url": {"url": SIX, "detail": "high"}},
        {"type": "image_url", "image_url": SIX},
    ]
    whole = [llm.chat([{"role": "user", "content": [part, question]}], temperature=0, max_tokens=8) for part in parts]
    shutil.copy(SIX, tmp_path / "six.png")
    monkeypatch.chdir(tmp_path)
    several = (["six.png"], "six.png", [Image.open(SIX)], np.asarray(Image.open(SIX).convert("RGB")))
    whole += [llm.chat(question["text"], images=images, temperature=0, max_tokens=8) for images in several]
    assert {answer.token_ids for answer in whole} == {whole[0].token_ids}
    assert "six" in whole[0].text.lower()
    assert whole[0].prompt_tokens > 50


def test_videos_by_path(llm: LLM) -> None:
    clip = str(SAMPLES / "rolling.mp4")
    part = {"type": "video_url", "video_url": {"url": clip}, "fps": 1.0}
    text = {"type": "text", "text": "What happens?"}
    in_full = llm.chat([{"role": "user", "content": [part, text]}], temperature=0, max_tokens=12)
    short = llm.chat("What happens?", videos=clip, temperature=0, max_tokens=12, mm_processor_kwargs={"fps": 1.0})
    assert (short.token_ids, short.prompt_tokens) == (in_full.token_ids, in_full.prompt_tokens)
    frames = llm.chat("What is this?", videos=[[SIX, SIX, SIX, SIX]], max_tokens=2)
    assert frames.prompt_tokens > 50


def test_texts_and_options(llm: LLM) -> None:
    hello = llm.chat("Hello", max_tokens=3)
    assert len(hello.token_ids) == 3
    assert llm.chat([{"role": "user", "content": "Hello"}], SamplingOverrides(max_tokens=3)).text == hello.text
    first, second = llm.chat_batch(["Hello", [{"role": "user", "content": "Hello"}]], max_tokens=3)
    assert first.text == second.text == hello.text
    assert len(llm.generate("Hello", max_tokens=2)[0].token_ids) == 2


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "more", "kind", "complaint"),
    [
        ("x", {"images": ["/no/such.png"]}, BadRequestError, "cannot read '/no/such.png': No such file"),
        ("x", {"images": [str(SAMPLES)]}, BadRequestError, "Is a directory"),
        ("x", {"images": [Path("a\0b")]}, BadRequestError, "cannot read .*null byte"),
        ("x", {"images": [Path("a\ud800")]}, BadRequestError, "cannot read .*surrogates"),
        ("x", {"videos": [b""] * 9}, BadRequestError, "has 9 videos, the limit is 8 .*setting max_videos_per_request"),
        ("x", {"images": [SAMPLES / "rolling.mp4"]}, BadRequestError, "not a picture: .* video_url, or video"),
        ("x", {"videos": [SIX]}, BadRequestError, "a PNG picture, not a video: send it in a part of type"),
        ("x", {"images": ["file:///etc/hostname"]}, BadRequestError, "file: URLs are refused"),
        ("x", {"images": [3]}, BadRequestError, "image is of type int; it must be a URL"),
        ("x", {"max_token": 3}, TypeError, "there is no option 'max_token'; did you mean max_tokens"),
        ("x", {"max_tokens": "3"}, TypeError, "max_tokens is '3'; it must be a whole number or None"),
        ("x", {"temperature": "hot"}, TypeError, "temperature is 'hot'; it must be a number or None"),
        (None, {}, TypeError, "a conversation is a text, or a list of messages such as .* this is None"),
        (USER, {}, TypeError, "a conversation is a text"),
        ([USER], {"images": [SIX]}, TypeError, "media go with a text"),
    ],
    ids=str,
)
def test_what_is_wrong_is_told(llm: LLM, messages: Any, more: dict[str, Any], kind: Any, complaint: str) -> None:
    with pytest.raises(kind, match=complaint) as caught:
        llm.chat(messages, **more)
    str(caught.value).encode()  # can be printed


@pytest.mark.parametrize(
    "message",
    [
        {"role": "nobody", "content": "x"},
        {"role": "user", "content": []},
        {"role": "user", "content": None},
        {"role": "user"},
        {"role": "user", "content": "x", "contents": "y"},
        {"role": "user", "content": [5]},
        {"role": "user", "content": [{"type": "imag", "image": "a.png"}]},
        {"role": "user", "content": [{"type": "text", "text": "x", "txt": "y"}]},
        {"role": "user", "content": [{"type": "image"}]},
        {"role": "system", "content": [{"type": "image", "image": "data:image/png;base64,"}]},
        {"role": "assistant"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"arguments": "{}"}}]},
    ],
    ids=str,
)
def test_messages_are_checked_as_the_server_does(llm: LLM, message: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError) as of_server:
        checked({"model": "m", "messages": [message]}, ChatCompletionRequest)
    with pytest.raises(BadRequestError) as ours:
        llm.chat([message], max_tokens=2)
    assert (str(ours.value), ours.value.param) == (str(of_server.value), of_server.value.param)


def test_what_only_python_can_write_is_taken(llm: LLM) -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    part = {"type": "image", "image": Path(SIX)}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": (part,)}]
    assert llm.chat(messages, max_tokens=2).prompt_tokens > 20


def test_a_text_is_no_batch(llm: LLM) -> None:
    with pytest.raises(TypeError, match="chat_batch takes a list of conversations"):
        llm.chat_batch("Hello")


def test_urls_stay_what_they_are() -> None:
    for url in ("data:image/png;base64,eA==", "https://example.com/a.png", "file:///a.png", ""):
        [message] = conversation([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
        assert message["content"] == [{"type": "image_url", "image_url": {"url": url}}]
    odd = [
        {"role": "user", "content": [5, {"type": "image_url"}, {"type": "image"}, {"type": "text", "text": "a.png"}]}
    ]
    assert conversation(odd) == odd


def test_frames_may_be_files_and_urls_side_by_side():
    frames = ["data:image/png;base64,AA==", "b.png"]
    [message] = conversation([{"role": "user", "content": [{"type": "video", "video": frames}]}])
    assert message["content"] == [{"type": "video", "video": [frames[0], Path("b.png")]}]


def test_a_home_folder() -> None:
    [message] = conversation("x", images=["~/cat.png"])
    assert message["content"][0]["image"] == Path.home() / "cat.png"


def test_sampling_together() -> None:
    base = SamplingOverrides(max_new_tokens=5, temperature=0.5)
    assert sampling_of(base, {"max_tokens": 7, "stop": "x"}) == SamplingOverrides(
        max_new_tokens=7, temperature=0.5, stop=("x",)
    )
    assert sampling_of(None, {}) == SamplingOverrides()
    with pytest.raises(ValueError, match="max_tokens is 3, and max_new_tokens 4: give one"):
        SamplingOverrides(max_tokens=3, max_new_tokens=4)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"pge_size": 16}, "LLM has no setting 'pge_size'; did you mean page_size?"),
        ({"port": 80}, "LLM has no setting 'port'"),
        ({"page_size": "16"}, "page_size is '16'; it must be a whole number"),
        ({"page_size": True}, "page_size is True; it must be a whole number"),
        ({"page_size": 3}, "page_size is 3; it must be a divisor of chunked_prefill_size, which is 2048"),
        ({"block_size": 32, "chunked_prefill_size": 48}, "chunked_prefill_size is 48; it must be -1 (whole prompts), "),
        ({"nnodes": 2}, "nnodes is 2; it must be a divisor of tp_size, which is 1"),
        ({"dtype": "fp8"}, "dtype is 'fp8'; it must be one of auto, float32"),
        ({"cpu_offload_gb": 2}, "cpu_offload_gb is 2; only 0 is supported"),
        ({"limit_mm_per_prompt": {"image": "many"}}, "max_images_per_request is 'many'; it must be a whole number"),
        ({"enable_dp_lm_head": True}, "enable_dp_lm_head is not supported"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings("", None, settings)
    assert str(caught.value).startswith(complaint)


@pytest.mark.parametrize("make", [LLM, AsyncLLM])
def test_what_the_engine_refuses_is_named_as_it_was_given(make: Any) -> None:
    with pytest.raises(SettingsError, match=r"^max_model_len is 9999; the model was made for 4096 tokens$"):
        make(max_model_len=9999)


def test_a_closed_one_says_so() -> None:
    with LLM(num_threads=1) as llm:
        pass
    with pytest.raises(EngineError, match="this LLM is closed"):
        llm.chat("Hello", max_tokens=2)
    engine = AsyncLLM(num_threads=1)
    engine.close()
    request = GenerateReqInput(request_id="one", prompt=ChatPrompt(messages=[USER]))
    with pytest.raises(EngineError, match="this AsyncLLM is closed"):
        asyncio.run(anext(engine.generate(request)))


def test_settings_by_other_names(tmp_path: Path) -> None:
    given = {"gpu_memory_utilization": 0.5, "limit_mm_per_prompt": {"image": 2}, "trust_remote_code": True}
    args, limits = read_settings(tmp_path, None, {**given, "embedding_cache_dir": tmp_path / "cache"})
    assert (args.model, args.mem_fraction_static) == (str(tmp_path), 0.5)
    assert (limits.counts.images, limits.counts.videos) == (2, 8)
    assert args.embedding_cache_dir == str(tmp_path / "cache")


def picture(shade: int) -> bytes:
    return encoded(Image.new("RGB", (64, 64), (shade, 0, 0)))


def about(*pictures: bytes):
    parts = [{"type": "image", "image": data} for data in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


def test_the_next_request_s_media_are_loaded_meanwhile(llm, monkeypatch):
    load, second = llm._media.load, asyncio.Event()
    calls = []

    async def waiting(media):
        calls.append(media)
        if len(calls) == 1:
            await asyncio.wait_for(second.wait(), 60)  # for ever, if requests were loaded one after the other
        second.set()
        return await load(media)

    monkeypatch.setattr(llm._media, "load", waiting)
    conversations = [about(picture(shade)) for shade in (10, 200)]
    together = llm.chat_batch(conversations, max_tokens=4)
    monkeypatch.undo()
    assert len(calls) == 2
    assert [answer.text for answer in together] == [llm.chat(one, max_tokens=4).text for one in conversations]


def test_the_first_bad_request_is_named(llm):
    with pytest.raises(BadRequestError, match="not a picture"):
        llm.chat_batch([about(picture(1)), about(b"no picture"), [{"role": "nobody", "content": "x"}]], max_tokens=2)
    assert llm.chat("Hello", max_tokens=2).text
    assert llm.stats().num_running_reqs == 0


def test_a_request_of_many_media_is_loaded_alone(llm):
    [one, other] = llm.chat_batch([about(*[picture(shade) for shade in range(20)]), about(picture(3))], max_tokens=2)
    assert one.prompt_tokens > other.prompt_tokens
