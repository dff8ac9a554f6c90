"""Chat templates: where they are found, what they may do, and OpenAI messages on their way into them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from processors.video.options import Focus, VideoKnobs
from tests.vlmserve.tiny_tokenizer import TEMPLATE
from vlmserve.frontend.chat_messages import ImageRef, VideoRef, to_template_messages
from vlmserve.frontend.chat_template import ChatTemplate, load_chat_template
from vlmserve.frontend.media import same_media
from vlmserve_common.errors import BadRequestError, CheckpointError

HI = [{"role": "user", "content": "hi"}]


def test_the_places_of_a_template_in_order(tmp_path):
    with pytest.raises(CheckpointError, match="no chat template"):
        load_chat_template(tmp_path)
    config = {"chat_template": "config {{ eos_token }}", "eos_token": {"content": "<end>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_chat_template(tmp_path).render(HI) == "config <end>"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert load_chat_template(tmp_path).render(HI) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert load_chat_template(tmp_path).render(HI) == "jinja"
    assert load_chat_template(tmp_path, "own {{ eos_token }}").render(HI) == "own <end>"
    own = tmp_path / "own.txt"
    own.write_text("{{ messages[0].role }}")
    assert load_chat_template(tmp_path, str(own)).render(HI) == "user"
    for wrong in (tmp_path / "missing.jinja", "{% if %}"):
        with pytest.raises(CheckpointError):
            load_chat_template(tmp_path, str(wrong))


def test_a_template_of_its_own_for_tools(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = load_chat_template(tmp_path)
    assert (template.render(HI), template.render(HI, tools=[{"x": 1}])) == ("plain", "tools")


def test_as_transformers_renders():
    from transformers.utils.chat_template_utils import render_jinja_template

    from tests import hf_env  # noqa: F401

    messages = [
        {"role": "system", "content": "é"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "<b>'日'"}]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "ü & <x>"}}]
    for add in (False, True):
        (expected,), _ = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=TEMPLATE,
            add_generation_prompt=add,
            enable_thinking=False,
        )
        ours = ChatTemplate(TEMPLATE).render(
            messages, tools=tools, add_generation_prompt=add, kwargs={"enable_thinking": False}
        )
        assert ours == expected


def test_a_broken_template_is_the_checkpoints_fault():
    with pytest.raises(CheckpointError, match="line 2"):
        ChatTemplate("{% if x %}\n{% endfor %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no such order') }}",
        "{{ messages[5].content.x }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_what_a_template_cannot_do_is_the_requests_fault(source):
    with pytest.raises(BadRequestError, match="chat template") as caught:
        ChatTemplate(source).render(HI)
    assert caught.value.param == "messages"


def test_template_kwargs_cannot_replace_ours():
    with pytest.raises(BadRequestError) as caught:
        ChatTemplate("x").render(HI, kwargs={"tools": []})
    assert caught.value.param == "chat_template_kwargs"


def test_continuing_the_last_message():
    template = ChatTemplate(TEMPLATE)
    messages = [*HI, {"role": "assistant", "content": "It is "}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nIt is")
    for refused in (HI, [*HI, {"role": "assistant", "content": " "}]):
        with pytest.raises(BadRequestError):
            template.render(refused, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(BadRequestError):
        template.render(messages, continue_final_message=True)


def test_messages_on_their_way_to_the_template():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    cut = {"id": "2", "type": "function", "function": {"name": "f", "arguments": '{"x": '}}
    messages, media = to_template_messages(
        [
            {"role": "developer", "content": "d"},
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "u1", "detail": "low"}},
                    {"type": "text", "text": "t"},
                    {"type": "image_url", "image_url": "u2"},
                    {"type": "image", "image": "u3"},
                ],
                "name": "me",
            },
            {"role": "assistant", "content": None, "tool_calls": [call, cut], "refusal": None},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "r"}]},
        ]
    )
    image, text = {"type": "image"}, {"type": "text", "text": "t"}
    assert messages[0] == {"role": "system", "content": "d"}
    assert messages[1] == {"role": "user", "content": [image, text, image, image], "name": "me"}
    assert messages[2]["content"] == ""
    assert [c["function"]["arguments"] for c in messages[2]["tool_calls"]] == [{"x": 1}, '{"x": ']
    assert call["function"]["arguments"] == '{"x": 1}', "the caller's messages stay as they are"
    assert messages[3] == {"role": "tool", "content": [{"type": "text", "text": "r"}], "tool_call_id": "1"}
    assert media == [
        ImageRef(source="u1", detail="low", param="messages[1].content[0]"),
        ImageRef(source="u2", param="messages[1].content[2]"),
        ImageRef(source="u3", param="messages[1].content[3]"),
    ]


def test_videos_and_what_is_said_about_them():
    parts = [
        {"type": "video_url", "video_url": {"url": "u1"}, "fps": 1.5, "max_frames": 8},
        {"type": "image", "image": "u2"},
        {"type": "video", "video": "u3", "nframes": 6, "min_pixels": None, "video_start": 2},
        {"type": "video", "video": ["f1", "f2"], "sample_fps": 4},
    ]
    messages, media = to_template_messages([{"role": "user", "content": parts}])
    assert [part["type"] for part in messages[0]["content"]] == ["video", "image", "video", "video"]
    where = "messages[0].content"
    assert media == [
        VideoRef(source="u1", param=f"{where}[0]", knobs=VideoKnobs(fps=1.5, max_frames=8)),
        ImageRef(source="u2", param=f"{where}[1]"),
        VideoRef(source="u3", param=f"{where}[2]", knobs=VideoKnobs(num_frames=6, video_start=2)),
        VideoRef(source=("f1", "f2"), param=f"{where}[3]", knobs=VideoKnobs(fps=4)),
    ]


PICTURE = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)


def media_of(*parts):
    return to_template_messages([{"role": "user", "content": list(parts)}])[1]


def test_arrays_are_pictures_and_videos():
    clip = np.stack([PICTURE, PICTURE[::-1], PICTURE[:, ::-1]])
    image, strided, video, listed = media_of(
        {"type": "image", "image": PICTURE},
        {"type": "image", "image": PICTURE[::-1, ::2]},
        {"type": "video", "video": clip},
        {"type": "video", "video": [PICTURE, "f", Image.fromarray(PICTURE)]},
    )
    assert image.source.size == (4, 5)
    assert np.array_equal(image.source, PICTURE)
    assert np.array_equal(strided.source, PICTURE[::-1, ::2])
    assert np.array_equal([np.asarray(frame) for frame in video.source], clip)
    assert np.array_equal(listed.source[0], PICTURE)
    assert listed.source[1] == "f"


@pytest.mark.parametrize(
    ("part", "param", "what"),
    [
        ({"type": "image", "image": 5}, "image", "is of type int; it must be a URL, or without a server bytes"),
        ({"type": "image"}, "image", "is missing"),
        ({"type": "image", "image": PICTURE / 255}, "image", r"is a numpy array float64 \[5, 4, 3\]; .*uint8 \[height"),
        ({"type": "image", "image": PICTURE[:0]}, "image", r"is a numpy array uint8 \[0, 4, 3\]"),
        ({"type": "image", "image": PICTURE.transpose(2, 0, 1)}, "image", r"uint8 \[3, 5, 4\]"),
        ({"type": "image_url", "image_url": Image.fromarray(PICTURE)}, "image_url", "a part of type 'image'"),
        ({"type": "image_url", "image_url": {"url": b"x"}}, "image_url", "is of type bytes, not a URL"),
        ({"type": "image_embeds", "image_embeds": 5}, "image_embeds", "is of type int; it must be a safetensors file"),
        ({"type": "video", "video": 5}, "video", "is of type int; it must be a URL or a list of frames"),
        ({"type": "video", "video": Image.fromarray(PICTURE)}, "video", "is of type Image; it must be"),
        ({"type": "video", "video": PICTURE}, "video", r"uint8 \[5, 4, 3\]; .*uint8 \[frames, height"),
        ({"type": "video", "video": ["f", 5]}, "video[1]", "is of type int; it must be a URL"),
        ({"type": "video", "video": [PICTURE[None]]}, "video[0]", r"uint8 \[1, 5, 4, 3\]"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_a_medium(part, param, what):
    with pytest.raises(BadRequestError, match=what) as caught:
        media_of(part)
    assert caught.value.param == f"messages[0].content[0].{param}"


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "text", "text": "t", "txt": 5}, "txt"),
        ({"type": "image", "image": "u", "fps": 2}, "fps"),
        ({"type": "image_url", "image_url": {"url": "u", "max_pixels": 5}}, "image_url.max_pixels"),
        ({"type": "video", "video": "u", "num_frames": 5}, "num_frames"),
        ({"type": "video_url", "video_url": {"url": "u", "detail": "low"}}, "video_url.detail"),
    ],
)
def test_unknown_fields_of_a_part_are_refused(part, param):
    with pytest.raises(BadRequestError, match=f"{param} is not a known field; known are ") as caught:
        media_of(part)
    assert caught.value.param == f"messages[0].content[0].{param}"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].image_url"),
        (
            {"role": "user", "content": [{"type": "video", "video": "x", "fps": 1, "sample_fps": 1}]},
            "messages[0].content[0]",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            "messages[0].content[0].input_audio.data",
        ),
        ({"role": "system", "content": [{"type": "audio", "audio": "x"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "hologram"}]}, "messages[0].content[0].type"),
        ({"role": "system", "content": [{"type": "image", "image": "x"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": "a <pad> b"}, "messages[0].content"),
    ],
)
def test_bad_messages(message, param):
    with pytest.raises(BadRequestError) as caught:
        to_template_messages([message], reserved=["<pad>"])
    assert caught.value.param == param


def test_the_question_about_a_video_is_its_messages_text_or_the_next_one():
    clip = {"type": "video", "video": "u", "sampling": "question"}
    other = {"type": "video", "video": "v"}

    def text(said):
        return {"type": "text", "text": said}

    _, media = to_template_messages(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [text("See"), clip, text("this."), other]},
            {"role": "assistant", "content": "Fine."},
            {"role": "user", "content": [clip]},
            {"role": "assistant", "content": "And?"},
            {"role": "user", "content": " What is red? "},
            {"role": "user", "content": [clip]},
        ]
    )
    assert [one.question for one in media] == ["See this.", "See this.", "What is red?", ""]
    assert [one.asked.focus for one in media] == [
        Focus(question="See this."),
        None,
        Focus(question="What is red?"),
        Focus(question=""),
    ]
    assert same_media(media[1:2], [replace(media[1], question="else")])
    assert not same_media(media[:1], [replace(media[0], question="else")])
    long = replace(media[0], question="x" * 3000 + "end").asked.focus.question
    assert (len(long), long[-3:]) == (2000, "end")
