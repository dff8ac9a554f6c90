"""POST /generate: SGLang's form of requests and answers."""

from __future__ import annotations

import base64

import pytest

from tests.nasty_media import encoded, picture

PNG = base64.b64encode(encoded(picture(56, 84), "PNG")).decode()
PAD = "<|image_pad|>"


def ask(client, **body):
    reply = client.post("/generate", json={"sampling_params": {"max_new_tokens": 4}, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_one_prompt_and_several(client, served):
    served.scheduler.say("blue")
    one = ask(client, text="What?", rid="mine")
    assert one["text"] == "blue"
    assert one["output_ids"]
    meta = one["meta_info"]
    assert (meta["id"], meta["weight_version"]) == ("mine", "default")
    assert meta["completion_tokens"] == len(one["output_ids"])
    assert "output_token_logprobs" not in meta
    ids = served.frontend.manager.builder.tokenizer.encode("What?")
    assert ask(client, input_ids=ids)["meta_info"]["prompt_tokens"] == meta["prompt_tokens"] == len(ids)
    two = ask(client, input_ids=[ids, ids[:1]])
    assert [one["meta_info"]["prompt_tokens"] for one in two] == [len(ids), 1]
    assert len({one["meta_info"]["id"] for one in two}) == 2
    assert len(ask(client, text=["a"])) == 1, "a list for a list"
    assert len(ask(client, text="a", sampling_params={"n": 3, "max_new_tokens": 1})) == 3


@pytest.mark.parametrize("field", ["text", "input_ids", "image_data"])
def test_lists_are_limited(serve, field):
    _, client = serve(max_items_per_request=3)
    with client:
        one = [1] if field == "input_ids" else "a"
        reply = client.post("/generate", json={"text": "a", field: [one] * 4})
        assert reply.status_code == 400
        assert "--max-items-per-request" in reply.json()["error"]["message"]
        assert len(ask(client, input_ids=[[1] * 5])) == 1, "ids are no items"


def test_settings_reach_the_engine(client, served):
    params = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "sampling_seed": 3, "stop": ["x"]}
    params |= {"stop_token_ids": [5], "min_new_tokens": 2, "max_new_tokens": 9, "no_stop_trim": True}
    params |= {"skip_special_tokens": False, "repetition_penalty": 1.5, "ignore_eos": True}
    ask(client, text="a", sampling_params=params)
    found = served.scheduler.requests[-1].sampling_params
    assert (found.temperature, found.top_p, found.top_k, found.min_p, found.seed) == (0.5, 0.25, 7, 0.125, 3)
    assert (found.stop, found.stop_token_ids, found.min_tokens, found.max_new_tokens) == (("x",), (5,), 2, 9)
    assert (found.include_stop_str_in_output, found.skip_special_tokens, found.ignore_eos) == (True, False, True)
    ask(client, text="a", sampling_params={})
    assert served.scheduler.requests[-1].sampling_params.max_new_tokens == 128


def test_pictures_stand_at_their_places(client, served):
    text = f"Look: <|vision_start|>{PAD}<|vision_end|> What?"
    ask(client, text=text, image_data=PNG)
    ask(client, text=text.replace(PAD, PAD * 6), image_data=[f"data:image/png;base64,{PNG}"])
    ids = served.frontend.manager.builder.tokenizer.encode(text)
    ask(client, input_ids=ids, image_data=[PNG])
    first, *others = [request.input_ids.tolist() for request in served.scheduler.requests[-3:]]
    assert others == [first, first]
    assert len(served.scheduler.requests[-1].mm_inputs.items) == 1


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({}, "text", "give either text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "text", "give either text or input_ids"),
        ({"input_ids": []}, "input_ids", ""),
        ({"text": "a", "stream": True}, "stream", ""),
        ({"text": "a", "colour": 1}, "colour", ""),
        ({"text": "a", "image_data": PNG}, "image_data", "has 1 pictures, and the prompt has places for 0"),
        ({"text": ["a", "b"], "image_data": PNG}, "image_data", "one prompt"),
        ({"text": PAD, "image_data": base64.b64encode(b"no picture").decode()}, "image_data[0]", "not a picture"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature", "temperature is -1"),
        ({"text": "a", "sampling_params": {"n": 1000}}, "sampling_params.n", ""),
        ({"text": "a", "lora_path": "none"}, "lora_path", "there is no adapter"),
    ],
)
def test_what_is_refused(client, body, param, told):
    reply = client.post("/generate", json=body)
    assert reply.status_code == (404 if param == "lora_path" else 400), reply.text
    error = reply.json()["error"]
    assert error["param"] == param, error
    assert told in error["message"]
