"""The answers of both sides: ours, and those of `transformers` by its processor, its model class, its greedy search.

We answer each case whole, again out of a warm prefix cache, and all together in small chunks. For transformers, clips
are read by PyAV alone: every frame is decoded, one after the other. Nothing of our own reader is used. Nor is
transformers' PyAV reader, which trusts the number of frames in the header: WebM and Matroska have none, and in MP4 it
counts frames that an edit list leaves out.
"""

from __future__ import annotations

import gc
import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import av
import numpy as np
import torch
from PIL import Image, ImageOps

from vlmserve.commands.offline.llm import LLM, Completion
from vlmserve.commands.verify.cases import TOP, Answer, Case, Step, media_paths
from vlmserve_common.checkpoint.fields import Fields
from vlmserve_common.checkpoint.hf_config import read_hf_config, text_fields
from vlmserve_common.compute.devices import resolve_device
from vlmserve_common.compute.torchvision_shim import make_torchvision_importable
from vlmserve_common.errors import EngineError

WHOLE, WARM, CHUNKS = "whole", "warm cache", "small chunks"
_CHUNK = 32  # tokens: every case is cut, most of them inside a picture


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """The settings of both sides. dtype: "float32", "bfloat16" or "float16". num_threads: of a CPU, None for all.

    parallel: settings of this engine alone, how many processes share the model (tp_size ...).
    """

    dtype: Literal["float32", "bfloat16", "float16"]
    device: str
    max_tokens: int
    num_threads: int | None = None
    parallel: Mapping[str, Any] = field(default_factory=dict)


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
        max_running_requests=len(cases),
        max_pixels="checkpoint",
        video_reference="transformers",
        sampling_defaults="openai",  # without the checkpoint's penalties: only the model is compared
        **variant,
    )


def _free_memory() -> None:
    """Give back the memory that a model has left behind."""
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
                f"this compares with the processors and models of transformers, which need {name}: install it with "
                "pip install 'vlmserve[verify]', or pip install --no-deps torchvision beside a torch of another build"
            )


def check_reference_can_load(folder: Path) -> None:
    """Raise EngineError if transformers lacks a package for a quantised checkpoint, or CheckpointError."""
    config = Fields(read_hf_config(folder), "config.json")
    for fields in (config, text_fields(config)):
        method = fields.section("quantization_config").string("quant_method", "")
        package = _READERS.get(method)
        if package is not None and importlib.util.find_spec(package) is None:
            raise EngineError(
                f"{folder}: transformers reads checkpoints of quant_method {method!r} with {package}: install it with "
                f"pip install {package.replace('_', '-')}"
            )


@torch.no_grad()
def reference_answers(folder: Path, cases: Sequence[Case], settings: RunSettings) -> list[Answer]:
    """Return the greedy answers of the checkpoint, in the order of the cases."""
    make_torchvision_importable()
    from transformers import AutoModelForImageTextToText, AutoProcessor, GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()  # it prints advice
    device = resolve_device(settings.device)
    processor: Any = AutoProcessor.from_pretrained(folder)
    loaded: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, settings.dtype))
    model, own = loaded.to(device).eval(), loaded.generation_config
    # only the ends of answers: no sampling, no penalties
    model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id)
    answers = []
    for case in cases:
        inputs = _inputs(processor, case).to(device)
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
    images = [ImageOps.exif_transpose(Image.open(path)) for path in media_paths(case, "image")]
    clips = [_read_video(processor.video_processor, path) for path in media_paths(case, "video")]
    videos: dict[str, Any] = {}
    if clips:
        frames, metadata = map(list, zip(*clips, strict=True))
        # frames have been sampled, while they were read
        videos = {"videos": frames, "video_metadata": metadata, "do_sample_frames": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return processor(text=[text], images=images or None, return_tensors="pt", **videos)


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
