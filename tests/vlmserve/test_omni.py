"""Omni models whole: answers are those of transformers' thinker, whatever the chunks, batches and processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests import hf_env  # noqa: F401

# isort: split
from transformers import AutoConfig, AutoProcessor

from processors.families.registry import make_processor
from processors.pruning import STAYS
from processors.video.options import VideoKnobs
from tests.omni_checkpoints import FAMILIES, THINKERS, clip, heard, make_omni_checkpoint, tone, wav
from tests.processors.clips import decode_all
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import picture
from vlmserve.commands.offline.llm import LLM, Completion
from vlmserve_common.checkpoint.hf_config import read_hf_config
from vlmserve_common.errors import BadRequestError

NEW = 12
Parts = list[dict[str, Any]]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"chunked_prefill_size": 16, "page_size": 4},
    {"chunked_prefill_size": 48, "disable_radix_cache": True},
    {"chunked_prefill_size": 16, "encoder_dp_size": 1},
]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def sound(seconds: float, seed: int = 0) -> dict[str, Any]:
    return {"type": "audio", "audio": wav(tone(seconds, seed=seed))}


CASES: dict[str, Parts] = {
    "sound": [sound(2.3), text("What is it?")],
    "other sound": [sound(2.3, 1), text("What is it?")],
    "two sounds": [sound(0.5, 2), text("And:"), sound(3.3, 3), text("Which is longer?")],
    "picture and sound": [{"type": "image", "image": picture(1, 96, 64)}, sound(1.1), text("Do they fit?")],
    "clip with sound": [text("Look:"), {"type": "video", "video": clip(2.0, tone(2.6)), "hear": True}, text("What?")],
    "clip": [{"type": "video", "video": clip(2.0, tone(2.6))}, sound(0.7), text("What?")],
}


class Reference:
    """transformers' processor and thinker. Each sound is processed by itself, as here."""

    def __init__(self, folder: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = THINKERS[AutoConfig.from_pretrained(folder).model_type].from_pretrained(folder).eval()

    @torch.no_grad()
    def answer(self, parts: Parts) -> tuple[int, list[int], list[float]]:
        sounds = [heard(part["audio"]) for part in parts if part["type"] == "audio"]
        hears = any(part.get("hear") for part in parts)
        if hears:
            from processors.audio.decoding import decode_sound
            from processors.audio.options import AudioLimits

            sounds = [decode_sound(p["video"], 16000, AudioLimits()).samples for p in parts if p.get("hear")]
        clips = [decode_all(part["video"]) for part in parts if part["type"] == "video"]
        plain = [part if part["type"] == "text" else {"type": part["type"]} for part in parts]
        prompt = self.processor.apply_chat_template(
            [{"role": "user", "content": plain}], tokenize=False, add_generation_prompt=True
        )
        more: dict[str, Any] = {}
        if clips:
            more = {
                "videos": [frames for frames, _ in clips],
                "video_metadata": [{"total_num_frames": len(frames), "fps": rate} for frames, rate in clips],
                "do_sample_frames": True,
                "fps": 2,
            }
        if hears:
            more |= {"load_audio_from_video": True, "audio_from_video_indices": [0]}
        inputs = self.processor(
            text=[prompt],
            images=[part["image"] for part in parts if part["type"] == "image"] or None,
            audio=sounds or None,
            return_tensors="pt",
            **more,
        )
        self.model.rope_deltas = self.model.model.rope_deltas = None
        out = self.model.generate(
            **inputs,
            **({"use_audio_in_video": True} if hears else {}),
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        length = inputs["input_ids"].shape[1]
        ids = out.sequences[0, length:].tolist()
        logprobs = [float(torch.log_softmax(row[0].float(), -1)[i]) for row, i in zip(out.logits, ids, strict=True)]
        return length, ids, logprobs


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_omni_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str, tuple[int, list[int], list[float]]]:
    """Sounds that transformers pads together are left out: there the references differ by design."""
    reference = Reference(folder)
    alone = {name for name in CASES if "qwen2" in folder.name or name != "two sounds"}
    return {name: reference.answer(CASES[name]) for name in CASES if name in alone}


def asked(llm: LLM, parts: Parts) -> Completion:
    plain = [{name: value for name, value in part.items() if name != "hear"} for part in parts]
    hears = any(part.get("hear") for part in parts)
    return llm.chat(
        [{"role": "user", "content": plain}],
        temperature=0.0,
        max_tokens=NEW,
        num_logprobs=0,
        mm_processor_kwargs={"use_audio_in_video": True} if hears else None,
    )


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, dtype="float32", sampling_defaults="openai", max_running_requests=8, **settings)


@pytest.mark.parametrize(
    "settings", [pytest.param(one, marks=pytest.mark.slow if i > 1 else ()) for i, one in enumerate(SETTINGS)]
)
def test_answers_are_those_of_transformers(
    folder: Path, wanted: dict[str, tuple[int, list[int], list[float]]], settings: dict[str, Any]
) -> None:
    with load(folder, **settings) as llm:
        for _ in range(2):  # the second time out of the caches
            for name, (length, ids, logprobs) in wanted.items():
                found = asked(llm, CASES[name])
                assert found.prompt_tokens == length, name
                assert list(found.token_ids) == ids, name
                assert found.logprobs is not None
                ours = [one.logprob for one in found.logprobs]
                np.testing.assert_allclose(ours, logprobs, atol=1e-3, err_msg=name)


def test_a_clip_without_its_repeats_is_answered_as_by_transformers(folder: Path) -> None:
    """Columns of repeats are left out of what transformers' decoder gets."""
    noise = np.random.default_rng(0).integers(0, 256, (128, 128, 3), np.uint8)
    frames = [noise.copy() for _ in range(8)]
    for number, frame in enumerate(frames):  # a corner moves; no area is of one colour, which would not be encoded
        frame[:40, :40] = noise[number // 2 :, number // 2 :][:40, :40]
    data = clip(2.0, tone(0.6), side=128, pictures=frames)
    parts: Parts = [{"type": "video", "video": data, "hear": True}, text("What?")]
    reference = Reference(folder)
    whole, decoder = reference.model.model, reference.model.model.language_model
    ids: list[torch.Tensor] = []
    given: list[dict[str, Any]] = []
    whole.register_forward_pre_hook(lambda *call: ids.append(call[2]["input_ids"][0]), with_kwargs=True)
    hook = decoder.register_forward_pre_hook(lambda *call: given.append(call[2]), with_kwargs=True)
    reference.answer(parts)
    hook.remove()
    processor = make_processor(folder, read_hf_config(folder))
    made = processor.process_video(data, VideoKnobs(skip_repeats=True))
    assert made.num_tokens < 0.6 * made.grid_thw[0] * made.grid_thw[1] * made.grid_thw[2] / 4
    pads = ids[0] == processor.token_ids.video_pad
    there = ~pads
    there[pads] = torch.frombuffer(bytearray(b"".join(made.kept)), dtype=torch.uint8) == STAYS
    deep = {}
    if (rows := given[0].get("deepstack_visual_embeds")) is not None:
        stays = there[given[0]["visual_pos_masks"][0]]
        deep = {
            "visual_pos_masks": given[0]["visual_pos_masks"][:, there],
            "deepstack_visual_embeds": [layer[stays] for layer in rows],
        }
    embeds, places = given[0]["inputs_embeds"][:, there], given[0]["position_ids"][-3:, :, there]
    with torch.no_grad():
        out = decoder(inputs_embeds=embeds, position_ids=places, use_cache=False, **deep)
        wanted = torch.log_softmax(reference.model.lm_head(out.last_hidden_state[0, -1]).float(), -1)
    with load(folder, skip_repeats=True) as llm:
        found = asked(llm, parts)
    assert found.prompt_tokens == int(there.sum())
    assert found.token_ids[0] == int(wanted.argmax())
    assert found.logprobs is not None
    assert abs(found.logprobs[0].logprob - float(wanted.max())) < 1e-3


def test_a_sound_is_encoded_once(folder: Path) -> None:
    with load(folder) as llm:
        asked(llm, [sound(3.0), text("What?")])
        encoded = llm.stats().encoder.encoded
        asked(llm, [text("Listen."), sound(3.0), text("What?")])
        assert llm.stats().encoder.encoded == encoded > 0
        asked(llm, [sound(3.0, 1), text("What?")])
        assert llm.stats().encoder.encoded > encoded


def test_models_without_ears_say_so(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_vl", tmp_path / "model")
    with load(folder) as llm:
        with pytest.raises(BadRequestError, match="the model takes no sounds"):
            asked(llm, [sound(1.0)])
        frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
        with pytest.raises(BadRequestError, match="use_audio_in_video is true; the model takes no sounds"):
            asked(llm, [{"type": "video", "video": frames, "hear": True}])
