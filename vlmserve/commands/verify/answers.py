"""The cases, the answers of both sides, and their comparison.

Theirs are by the processor of `transformers`, its model class and its greedy search.

We answer each case whole, again out of a warm prefix cache, and all together in small chunks. For transformers, clips
are read by PyAV alone: every frame is decoded, one after the other. Nothing of our own reader is used. Nor is
transformers' PyAV reader, which trusts the number of frames in the header: WebM and Matroska have none, and in MP4 it
counts frames that an edit list leaves out.
"""

from __future__ import annotations

import enum
import gc
import importlib.util
import io
import warnings
import wave
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import av
import numpy as np
import torch
from PIL import Image, ImageOps

from vlmserve.commands.offline.llm import LLM, Completion
from vlmserve.frontend.chat_messages import joined_texts
from vlmserve_common.checkpoint.fields import Fields
from vlmserve_common.checkpoint.hf_config import ARCHITECTURES, has_tower, read_hf_config, text_fields
from vlmserve_common.compute.devices import resolve_device
from vlmserve_common.compute.torchvision_shim import make_torchvision_importable
from vlmserve_common.errors import EngineError
from vlmserve_common.installing import install, pip_install

Kind = Literal["text", "image", "video", "audio"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_STORY = (
    "In the morning the street was empty. A woman put a blue cup on the table next to the window, opened a book at its "
    "first page and began to read; two hours later the cup was still full, the dog had eaten half of the bread, and it "
    "had started to rain. Retell this in your own words, and say what you think happened to the other half."
)
_SAMPLES = Path(__file__).resolve().parents[1] / "demo" / "samples"
_RATE, _TONES = 16000, ((220, 5.0), (900, 8.0), (2100, 3.0))  # Hz; of pitches, and of how often they pulse
_DESCRIBE = "Describe the picture in detail."


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A conversation in OpenAI's form. Its media are {"type": "image", "image": Path}, the same with "video", or
    {"type": "audio", "audio": bytes} with a WAV file of 16 kHz."""

    name: str
    messages: tuple[dict[str, Any], ...]


def made_cases(kinds: Collection[str]) -> list[Case]:
    """Return the cases of these kinds, in a fixed order."""
    wide, tall, still, clip = (
        _SAMPLES / name for name in ("shapes.png", "receipt.png", "two-stars.jpg", "rolling.mp4")
    )
    cases = []
    if "text" in kinds:
        brief = {"role": "system", "content": "Answer in one short sentence."}
        turns = (_user("Name three colours."), {"role": "assistant", "content": "Red, green and blue."})
        cases += [
            Case(name="text", messages=(_user(_STORY),)),
            Case(name="text, several turns", messages=(brief, *turns, _user("Which of them is the sky's?"))),
        ]
    if "image" in kinds:
        turns = (_user(_image(wide), "What is this?"), {"role": "assistant", "content": "Coloured shapes."})
        cases += [
            Case(name="image", messages=(_user(_image(wide), _DESCRIBE),)),
            Case(name="images, several turns", messages=(*turns, _user("And this?", _image(tall)))),
        ]
    if "video" in kinds:
        cases += [
            Case(name="video", messages=(_user(_video(clip), "What happens in the video?"),)),
            Case(name="image and video", messages=(_user("Compare:", _image(still), _video(clip), "What differs?"),)),
        ]
    if "audio" in kinds:
        cases += [
            Case(name="sound", messages=(_user(_sound(), "What do you hear?"),)),
            Case(name="image and sound", messages=(_user(_image(still), _sound(), "Do they belong together?"),)),
        ]
    return cases


def _sound() -> dict[str, Any]:
    """Return a sound of some seconds: three tones that glide and pulse."""
    time = np.arange(7 * _RATE // 2) / _RATE
    tones = [np.sin(2 * np.pi * (pitch + 40 * time) * time) * (np.sin(pace * time) > 0) for pitch, pace in _TONES]
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(_RATE)
        out.writeframes((8000 * np.sum(tones, axis=0)).astype("<i2").tobytes())
    return {"type": "audio", "audio": file.getvalue()}


def kinds_of(folder: Path) -> tuple[Kind, ...]:
    """Return the kinds that the checkpoint's model takes. CheckpointError."""
    hf_config = read_hf_config(folder)
    hears = "audio_config" in hf_config.get("vision_config", {})
    return KINDS if hears else KINDS[:3] if has_tower(hf_config) else KINDS[:1]


def own_case(pictures: Sequence[Path], videos: Sequence[Path], prompt: str | None) -> Case:
    """Return a question about the user's own files, in their order."""
    text = prompt or ("Describe what you see in detail." if pictures or videos else "Hello!")
    return Case(name="own", messages=(_user(*map(_image, pictures), *map(_video, videos), text),))


def media_of(case: Case, kind: Kind) -> list[Any]:
    """Return the media of one kind, in prompt order."""
    contents = [message["content"] for message in case.messages]
    return [part[kind] for parts in contents if isinstance(parts, list) for part in parts if part["type"] == kind]


def _user(*parts: str | dict[str, Any]) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


def _medium(kind: Kind, path: Path) -> dict[str, Any]:
    return {"type": kind, kind: path}


_image, _video = partial(_medium, "image"), partial(_medium, "video")


TOP = 20
"""The number of likely tokens that are kept of each step, on both sides."""
_FIRST_STEP_TOP = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """An output token and its logprob. top: the TOP most likely tokens and their logprobs, best first."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A greedy answer. steps: one for each token, with the one that ends the answer.

    prompt_tokens: with all pad tokens. cached_tokens: of the prompt, taken from the prefix cache.
    """

    prompt_tokens: int
    steps: tuple[Step, ...]
    cached_tokens: int = 0


class Verdict(enum.StrEnum):
    """The outcome of a comparison."""

    EQUAL = "equal"
    NEAR_TIE = "near tie"
    DIFFERENT = "DIFFERENT"


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseFinding:
    """The comparison of two answers.

    `equal_tokens` come before the first different one; `tokens` are those of the reference's answer.
    `logprob_difference` is the largest over the equal tokens, `first_step_difference` the largest over the most likely
    first tokens. `why` has the differences in words, "" for none.
    """

    case: str
    variant: str
    prompt_tokens: int
    cached_tokens: int
    equal_tokens: int
    tokens: int
    logprob_difference: float
    first_step_difference: float
    verdict: Verdict
    why: str = ""


def compare(
    case: str, variant: str, ours: Answer, theirs: Answer, *, tolerance: float, allow_near_ties: bool
) -> CaseFinding:
    """Compare an answer of ours with the reference's. tolerance: of logprobs.

    allow_near_ties: True if answers may part at two tokens whose logprobs in the reference are within the tolerance, as
    rounding in 16 bits makes them do.
    """
    pairs = list(zip(ours.steps, theirs.steps, strict=False))
    equal = next((i for i, (a, b) in enumerate(pairs) if a.token_id != b.token_id), len(pairs))
    difference = max((_distance(a.logprob, b.logprob) for a, b in pairs[:equal]), default=0.0)
    first = _first_step(*pairs[0]) if pairs else 0.0
    problems = []
    if ours.prompt_tokens != theirs.prompt_tokens:
        problems.append(f"the prompt has {ours.prompt_tokens} tokens, the reference's {theirs.prompt_tokens}")
    if not max(difference, first) <= tolerance:
        problems.append(f"logprobs differ by {max(difference, first):.2g}, the tolerance is {tolerance:g}")
    near_tie = False
    if equal < len(pairs):
        a, b = pairs[equal]
        gap = b.logprob - b.top.get(a.token_id, -float("inf"))
        near_tie = allow_near_ties and gap <= tolerance
        if not near_tie:
            beyond = f"{gap:.2g} below" if a.token_id in b.top else "not among the most likely"
            problems.append(f"token {equal} is {a.token_id}, the reference's is {b.token_id} (to it, ours is {beyond})")
    elif len(ours.steps) != len(theirs.steps):
        problems.append(f"the answer has {len(ours.steps)} tokens, the reference's {len(theirs.steps)}")
    return CaseFinding(
        case=case,
        variant=variant,
        prompt_tokens=ours.prompt_tokens,
        cached_tokens=ours.cached_tokens,
        equal_tokens=equal,
        tokens=len(theirs.steps),
        logprob_difference=difference,
        first_step_difference=first,
        verdict=Verdict.DIFFERENT if problems else Verdict.NEAR_TIE if near_tie else Verdict.EQUAL,
        why="; ".join(problems),
    )


def _first_step(ours: Step, theirs: Step) -> float:
    """Return the largest difference over the reference's most likely tokens; a token missing in ours is below all."""
    lowest = min(ours.top.values())
    likely = list(theirs.top.items())[:_FIRST_STEP_TOP]
    return max(_distance(ours.top.get(token, lowest), logprob) for token, logprob in likely)


def _distance(a: float, b: float) -> float:
    """Return the difference; infinity if either is not a number."""
    difference = abs(a - b)
    return difference if difference == difference else float("inf")


WHOLE, WARM, CHUNKS = "whole", "warm cache", "small chunks"
_CHUNK = 32  # tokens: every case is cut, most of them inside a picture


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """The settings of both sides. dtype: "float32", "bfloat16" or "float16". num_threads: of a CPU, None for all.

    parallel: settings of this engine alone, how many processes share the model (tp_size ...). chat_template: Jinja in
    place of the checkpoint's.
    """

    dtype: Literal["float32", "bfloat16", "float16"]
    device: str
    max_tokens: int
    num_threads: int | None = None
    parallel: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None


def our_answers(folder: Path, cases: Sequence[Case], settings: RunSettings) -> dict[str, list[Answer]]:
    """Return the answers of each variant in the order of the cases. Leaves no model in memory. Raises as `LLM` does."""
    asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": settings.max_tokens, "num_logprobs": TOP}
    answers: dict[str, list[Answer]] = {WHOLE: [], WARM: []}
    with _load(folder, cases, settings, chunked_prefill_size=-1) as llm:
        for case in cases:
            llm.flush_cache()
            for several in answers.values():
                several.append(_answer(llm.chat(case.messages, **asked)))
    del llm  # one model is in memory at a time
    chunks = {"chunked_prefill_size": _CHUNK, "enable_mixed_chunk": True, "disable_radix_cache": True}
    with _load(folder, cases, settings, **chunks) as llm:
        answers[CHUNKS] = list(map(_answer, llm.chat_batch([case.messages for case in cases], **asked)))
    del llm
    _free_memory()
    return answers


def _load(folder: Path, cases: Sequence[Case], settings: RunSettings, **variant: Any) -> LLM:
    _free_memory()  # of the one before
    return LLM(
        str(folder),
        dtype=settings.dtype,
        device=settings.device,
        num_threads=settings.num_threads,
        **settings.parallel,
        chat_template=settings.chat_template,
        max_running_requests=len(cases),
        max_pixels="checkpoint",
        video_reference="transformers",
        sampling_defaults="openai",  # without the checkpoint's penalties: only the model is compared
        **variant,
    )


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _answer(completion: Completion) -> Answer:
    assert completion.logprobs is not None
    steps = (
        Step(token_id=one.token_id, logprob=one.logprob, top=dict(zip(one.top_ids, one.top_logprobs, strict=True)))
        for one in completion.logprobs
    )
    return Answer(prompt_tokens=completion.prompt_tokens, steps=tuple(steps), cached_tokens=completion.cached_tokens)


_READERS: Mapping[str, str] = MappingProxyType({"fp8": "accelerate", "compressed-tensors": "compressed_tensors"})
"""The packages that transformers needs for quantised checkpoints, by quant_method."""
_DEFAULT_FPS = 2.0  # ours, too, if a checkpoint says nothing


def check_reference_can_run() -> None:
    """Raise EngineError if a package is not installed, before anything expensive begins."""
    for name in ("transformers", "torchvision"):
        if importlib.util.find_spec(name) is None:
            raise EngineError(
                f"this compares with the processors and models of transformers, which need {name}: "
                f"{install('verify')}; beside a torch of another build: {pip_install('--no-deps', 'torchvision')}"
            )


def check_reference_can_load(folder: Path) -> None:
    """Raise EngineError if transformers lacks a package for a quantised checkpoint, or CheckpointError."""
    config = Fields(read_hf_config(folder), "config.json")
    for fields in (config, text_fields(config)):
        method = fields.section("quantization_config").string("quant_method", "")
        package = _READERS.get(method)
        if package is not None and importlib.util.find_spec(package) is None:
            raise EngineError(
                f"{folder}: transformers reads checkpoints of quant_method {method!r} with {package}: "
                f"{pip_install(package.replace('_', '-'))}"
            )


@torch.no_grad()
def reference_answers(folder: Path, cases: Sequence[Case], settings: RunSettings) -> list[Answer]:
    """Return the greedy answers of the checkpoint, in the order of the cases."""
    make_torchvision_importable()
    import transformers
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoProcessor,
        AutoTokenizer,
        GenerationConfig,
    )
    from transformers.utils import logging

    logging.set_verbosity_error()  # it prints advice
    device = resolve_device(settings.device)
    sees = has_tower(read_hf_config(folder))
    processor: Any = (AutoProcessor if sees else AutoTokenizer).from_pretrained(folder)
    processor.chat_template = settings.chat_template or processor.chat_template
    model_class: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    if "audio" in kinds_of(folder):  # only a part of such a model answers in text
        architecture = ARCHITECTURES[read_hf_config(folder)["model_type"]]
        model_class = getattr(transformers, architecture.replace("ForCond", "ThinkerForCond"))
    loaded: Any = model_class.from_pretrained(folder, dtype=getattr(torch, settings.dtype))
    model, own = loaded.to(device).eval(), loaded.generation_config
    # only the ends of answers: no sampling, no penalties
    model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id)
    answers = []
    for case in cases:
        inputs = (_inputs if sees else _text_inputs)(processor, case).to(device)
        model.model.rope_deltas = None  # of the answer before
        out = model.generate(
            **inputs,
            max_new_tokens=settings.max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        length = inputs["input_ids"].shape[1]
        ids = out.sequences[0, length:].tolist()
        steps = [_step(row[0], token) for row, token in zip(out.logits, ids, strict=True)]
        answers.append(Answer(prompt_tokens=length, steps=tuple(steps)))
    return answers


def _inputs(processor: Any, case: Case) -> Any:
    messages = [_without_media(message) for message in case.messages]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    images = [ImageOps.exif_transpose(Image.open(path)) for path in media_of(case, "image")]
    clips = [_read_video(processor.video_processor, path) for path in media_of(case, "video")]
    videos: dict[str, Any] = {}
    if clips:
        frames, metadata = map(list, zip(*clips, strict=True))
        # frames have been sampled, while they were read
        videos = {"videos": frames, "video_metadata": metadata, "do_sample_frames": False}
        if hasattr(processor, "feature_extractor"):  # Omni models count the time by it, not by the metadata
            videos["fps"] = _DEFAULT_FPS
    sounds = [_samples(data) for data in media_of(case, "audio")]
    if sounds:
        videos["audio"] = sounds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return processor(text=[text], images=images or None, return_tensors="pt", **videos)


def _samples(data: bytes) -> np.ndarray:
    with wave.open(io.BytesIO(data)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def _text_inputs(tokenizer: Any, case: Case) -> Any:
    """Return the inputs of a model that reads text only, whose template knows no parts."""
    text = tokenizer.apply_chat_template(joined_texts(case.messages), tokenize=False, add_generation_prompt=True)
    return tokenizer([text], return_tensors="pt")


def _read_video(processor: Any, path: Path) -> tuple[Any, Any]:
    """Return the frames uint8 [T, H, W, 3] that transformers' processor of videos asks for, and their metadata."""
    from transformers.video_utils import VideoMetadata

    frames, rate = length_of(path)
    metadata = VideoMetadata(total_num_frames=frames, fps=rate)
    names = ("num_frames", "min_frames", "max_frames", "temporal_patch_size")
    asked = {name: getattr(processor, name, None) for name in names}
    fps = None if asked["num_frames"] else getattr(processor, "fps", None) or _DEFAULT_FPS
    metadata.frames_indices = [int(index) for index in processor.sample_frames(metadata, fps=fps, **asked)]
    return read_frames(path, metadata.frames_indices), metadata


def _without_media(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": [p if p["type"] == "text" else {"type": p["type"]} for p in content]}


def _step(logits: torch.Tensor, token: int) -> Step:
    logprobs = torch.log_softmax(logits.float(), -1)
    best = logprobs.topk(TOP)
    top = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Step(token_id=token, logprob=float(logprobs[token]), top=top)


def length_of(path: Path) -> tuple[int, float]:
    """Return the number of frames that are shown, and their average rate a second. Decodes the whole clip."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        count, first, end = 0, 0.0, 0.0
        for frame in container.decode(stream):
            at = frame.time or 0.0
            first = at if count == 0 else first
            end = at + float((frame.duration or 0) * (frame.time_base or 0))
            count += 1
        if "matroska" in container.format.name and end > first:  # WebM is a kind of it
            # Its header has no number of frames to take an average of. `average_fps` of torchcodec, from a scan.
            return count, count / (end - first)
        return count, float(stream.average_rate or stream.guessed_rate or 24)


def read_frames(path: Path, indices: Sequence[int]) -> np.ndarray:
    """Return frames uint8 [len(indices), H, W, 3], upright. indices: ascending, and may repeat."""
    found = {}
    with av.open(str(path)) as container:
        for number, frame in zip(range(indices[-1] + 1), container.decode(video=0), strict=False):
            if number in indices:
                turns = round(frame.rotation / 90)  # counterclockwise, as a player shows it
                found[number] = np.rot90(frame.to_ndarray(format="rgb24"), turns)
    return np.stack([found[index] for index in indices])
