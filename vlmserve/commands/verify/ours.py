"""Our answers: each case whole, again out of a warm prefix cache, and all together in small chunks."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from vlmserve.commands.offline.llm import LLM, Completion
from vlmserve.commands.verify.cases import Case
from vlmserve.commands.verify.comparison import TOP, Answer, Step

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
