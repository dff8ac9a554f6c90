"""Sounds in chats, and OpenAI's transcriptions, over a fake scheduler."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from processors.inputs import Modality
from tests.omni_checkpoints import clip, make_omni_checkpoint, tone, wav
from tests.vlmserve.api.fake_engine import MODEL, Served

PATH = "/v1/audio/transcriptions"
SOUND = wav(tone(1.3))
Serve = Callable[..., tuple[Served, TestClient]]


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_omni_checkpoint("qwen3_omni_moe", tmp_path_factory.mktemp("omni"))


@pytest.fixture
def heard(serve: Serve, omni: Path) -> tuple[Served, TestClient]:
    served, client = serve(folder=omni)
    served.scheduler.say("Three red circles.")
    return served, client


def url_of(data: bytes) -> str:
    return f"data:audio/wav;base64,{base64.b64encode(data).decode()}"


def test_a_sound_is_written_down(heard: tuple[Served, TestClient]) -> None:
    served, client = heard
    answer = client.post(PATH, files={"file": ("a.wav", SOUND)}, data={"language": "de", "prompt": "shapes"})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["text"] == "Three red circles."
    assert found["usage"]["total_tokens"] == found["usage"]["input_tokens"] + found["usage"]["output_tokens"]
    [request] = served.scheduler.requests
    assert request.mm_inputs is not None
    assert {item.modality for item in request.mm_inputs.items} == {Modality.AUDIO}
    prompt = served.scheduler.tokenizer.decode(request.input_ids.tolist())
    assert "Transcribe the German audio into text. Its context: shapes" in prompt
    assert request.sampling_params.temperature == 0


def test_plain_text_and_events(heard: tuple[Served, TestClient]) -> None:
    _, client = heard
    form: dict[str, Any] = {"files": {"file": ("a.wav", SOUND)}}
    plain = client.post(PATH, **form, data={"response_format": "text"})
    assert (plain.text, plain.headers["content-type"]) == ("Three red circles.\n", "text/plain; charset=utf-8")
    lines = client.post(PATH, **form, data={"stream": "true"}).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    *deltas, done = events
    assert len(deltas) > 1
    assert "".join(event["delta"] for event in deltas) == done["text"] == "Three red circles."
    assert done["type"] == "transcript.text.done"
    assert done["usage"]["output_tokens"] > 0


@pytest.mark.parametrize(
    ("data", "form", "param", "told"),
    [
        (b"no sound", {}, "file", "^the data is not a sound"),
        (SOUND, {"response_format": "srt"}, "response_format", "'srt'; it must be json or text"),
        (SOUND, {"temperature": "hot"}, "temperature", "'hot'; it must be a number from 0 to 2"),
        (SOUND, {"stream": "true", "response_format": "text"}, "response_format", "with stream it must be json"),
        (SOUND, {"model": "whisper-1"}, "model", "whisper-1"),
        (SOUND, {"timestamp_granularities[]": "word"}, None, "timestamp_granularities"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_forms_are_refused(
    heard: tuple[Served, TestClient], data: bytes, form: dict[str, str], param: str | None, told: str
) -> None:
    _, client = heard
    answer = client.post(PATH, files={"file": ("a.wav", data)}, data=form)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404), error
    assert told.removeprefix("^") in error["message"]
    assert not told.startswith("^") or error["message"].startswith(told[1:])
    assert param is None or error["param"] == param


def test_a_large_sound_is_refused(serve: Serve, omni: Path) -> None:
    _, client = serve(folder=omni, max_audio_bytes=1000)
    answer = client.post(PATH, files={"file": ("a.wav", SOUND)})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "file")
    assert error["message"] == f"the sound has {len(SOUND)} bytes; the limit is 1000 (setting --max-audio-bytes)"


def test_a_form_of_several_parts_is_put_together(heard: tuple[Served, TestClient]) -> None:
    served, client = heard
    sound = wav(tone(6.0, 200_000), 200_000)
    assert len(sound) > 2 * 2**20
    assert client.post(PATH, files={"file": ("a.wav", sound)}).status_code == 200
    assert served.scheduler.requests[-1].mm_inputs is not None


def test_a_model_without_ears_refuses(client: TestClient) -> None:
    answer = client.post(PATH, files={"file": ("a.wav", SOUND)})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the model takes no sounds")
    part = {"type": "audio_url", "audio_url": {"url": url_of(SOUND)}}
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [part]}]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[0].content[0]")
    assert "takes no sounds" in error["message"]


def ask(client: TestClient, *parts: dict[str, Any], **more: Any) -> Any:
    content = [*parts, {"type": "text", "text": "what"}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0}
    return client.post("/v1/chat/completions", json=body | more)


def test_all_ways_to_send_a_sound_give_the_same(heard: tuple[Served, TestClient]) -> None:
    served, client = heard
    upload = client.post("/v1/files", files={"file": ("a.wav", SOUND)}, data={"purpose": "user_data"}).json()["id"]
    url = url_of(SOUND)
    for part in (
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "audio_url", "audio_url": url},
        {"type": "audio_url", "audio_url": {"file_id": upload}},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(SOUND).decode(), "format": "wav"}},
        {"type": "audio", "audio": url},
        {"type": "file", "file": {"file_id": upload}},
    ):
        answer = ask(client, part)
        assert answer.status_code == 200, answer.text
    digests = {tuple(item.digest for item in request.mm_inputs.items) for request in served.scheduler.requests}
    assert len(digests) == 1


def test_reports_and_usage_tell_what_was_heard(heard: tuple[Served, TestClient]) -> None:
    _, client = heard
    parts = ({"type": "audio_url", "audio_url": {"url": url_of(SOUND)}},)
    found = ask(client, *parts, return_mm_report=True, return_usage_details=True).json()
    [report] = found["mm_report"]["media"]
    assert (report["kind"], report["audio"]["seconds"], report["audio"]["source_rate"]) == ("audio", 1.3, 16000)
    assert found["usage"]["prompt_tokens_details"]["audio_tokens"] == report["tokens"] == report["audio"]["tokens"]
    silent = {
        "type": "video_url",
        "nframes": 2,
        "video_url": {"url": url_of(clip(1.0, None)).replace("audio/wav", "video/mp4")},
    }
    found = ask(client, silent, return_mm_report=True, mm_processor_kwargs={"use_audio_in_video": True}).json()
    assert found["mm_report"]["media"][0]["ignored"] == ["use_audio_in_video"]
    assert "use_audio_in_video has no effect on this video" in found["warnings"][0]


def test_too_many_sounds_are_refused(serve: Serve, omni: Path) -> None:
    _, client = serve(folder=omni, max_audios_per_request=1)
    part = {"type": "audio_url", "audio_url": {"url": url_of(SOUND)}}
    answer = ask(client, part, part)
    assert answer.status_code == 400
    told = "the request has 2 sounds, the limit is 1 (setting --max-audios-per-request)"
    assert answer.json()["error"]["message"] == told


def test_placeholders_of_sounds_are_refused_in_texts(heard: tuple[Served, TestClient]) -> None:
    _, client = heard
    answer = ask(client, {"type": "text", "text": "<|audio_pad|>"})
    assert answer.status_code == 400
    assert "stands for media" in answer.json()["error"]["message"]
