"""transformers' model of a checkpoint: its answers, its vision tower, and whether ours computes the same.

`python -m vlmserve.commands.bench.reference MODEL COUNT SIDE TOKENS SEED THREADS` times a loop of `generate` calls in a
process of its own, so that its memory is its own.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from processors.families.registry import make_processor
from vision.towers.grids import Grid
from vision.towers.runner import pixel_values
from vision.towers.temporal_patch import temporal_patches
from vlmserve.commands.bench.checkpoints import published_tensors
from vlmserve.commands.bench.media import Question, make_questions
from vlmserve.commands.bench.processes import process_memory
from vlmserve.frontend.chat_template import load_chat_template
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.checkpoint.reader import read_json
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer
from vlmserve_common.compute.torchvision_shim import make_torchvision_importable

_CPU = torch.device("cpu")
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


def load_reference(folder: Path, *, dtype: torch.dtype | str) -> Any:
    """Return transformers' model of a checkpoint folder, on the CPU, with sdpa attention."""
    make_torchvision_importable()
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    load: Callable[..., Any] = AutoModelForImageTextToText.from_pretrained
    return load(folder, dtype=dtype, attn_implementation="sdpa").eval()


def share_weights(folder: Path, model: VisionLanguageModel, *, device: torch.device) -> Any:
    """Return transformers' model with the parameters of ours: both use one memory, and the folder needs no weights.

    Raises AssertionError if the two models have different parameters.
    """
    make_torchvision_importable()
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.set_verbosity_error()
    make: Callable[..., Any] = AutoModelForImageTextToText.from_config
    with device:
        made = make(AutoConfig.from_pretrained(folder), dtype=model.dtype, attn_implementation="sdpa").eval()
    missing, unexpected = made.load_state_dict(dict(published_tensors(model)), strict=False, assign=True)
    if unexpected or set(missing) - ({"lm_head.weight"} if model.lm_head is None else set()):
        raise AssertionError(f"transformers' model has other parameters: {missing} are missing, {unexpected} too many")
    made.tie_weights()
    return made


class Reference:
    """`generate` of transformers without a token that ends an answer. model: transformers', on `device`.

    Our own template and processor make its inputs. Tests show that they are equal to the reference's.
    """

    def __init__(self, folder: Path, model: Any, *, device: torch.device) -> None:
        model.generation_config.eos_token_id = None
        self.model, self._device = model, device
        self.tokenizer, self._template = load_text_tokenizer(folder), load_chat_template(folder)
        self._processor = make_processor(folder, read_json(folder, "config.json"))

    def prepare(self, questions: Sequence[Question]) -> dict[str, torch.Tensor]:
        """Return the inputs of a batch, on the CPU. Each question has one picture, and all prompts are equally long."""
        prepared = [self._prepare(question) for question in questions]
        return {name: torch.cat([one[name] for one in prepared]) for name in prepared[0]}

    def _prepare(self, question: Question) -> dict[str, torch.Tensor]:
        text = self._template.render(question.messages(lambda _: {"type": "image"}))
        images = [Image.open(io.BytesIO(picture)) for picture in question.pictures]
        ids, media = self._processor.process(self.tokenizer.encode(text), images)
        assert media is not None
        [item] = media.items
        kinds = torch.zeros(1, len(ids), dtype=torch.long)
        for start, end in item.offsets:
            kinds[0, start:end] = 1
        return {
            "input_ids": torch.from_numpy(ids)[None],
            "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
            "pixel_values": pixel_values(temporal_patches(item), _CPU),
            "image_grid_thw": torch.tensor([item.grid_thw]),
            "mm_token_type_ids": kinds,
        }

    def answer(self, prompts: np.ndarray, tokens: int) -> list[tuple[int, ...]]:
        """Return greedy answers of exactly `tokens` tokens to ids int64 [B, L], computed together."""
        ids = torch.from_numpy(prompts)
        return self.generate(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)},
            tokens,
        )

    @torch.inference_mode()
    def logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits of the first token of an answer, float32 [vocabulary]."""
        logits: torch.Tensor = self.model(**self._fresh(inputs), logits_to_keep=1).logits[0, -1]
        return logits.float()

    @torch.inference_mode()
    def generate(self, inputs: dict[str, torch.Tensor], tokens: int, streamer: Any = None) -> list[tuple[int, ...]]:
        """Return greedy answers of exactly `tokens` tokens to inputs of `prepare`."""
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        out = self.model.generate(**self._fresh(inputs), max_new_tokens=tokens, streamer=streamer, **greedy)
        return [tuple(row) for row in out[:, inputs["input_ids"].shape[1] :].tolist()]

    def _fresh(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.model.model.rope_deltas = None  # of the last call
        return {name: value.to(self._device) for name, value in inputs.items()}


class ReferenceTower:
    """The vision tower of a model of transformers, moved to a device."""

    def __init__(self, model: Any, *, device: torch.device, dtype: torch.dtype) -> None:
        self._visual: Any = model.model.visual.to(device)
        self._device = device
        self._dtype = dtype

    @torch.inference_mode()
    def encode(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Return rows [n, row width], those of DeepStack beside the main ones.

        pixels: float32 [P, patch elements] of several media, packed. grids: (t, h, w) of each medium.
        """
        made = self._visual(
            pixels.to(self._device, self._dtype), grid_thw=torch.tensor(grids, device=self._device), return_dict=True
        )
        return torch.cat([made.pooler_output, *(getattr(made, "deepstack_features", None) or [])], dim=1)


def check_rows(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest distance of a row of ours [n, width] from theirs, as a part of its length.

    Only equal work may be compared in speed: raises AssertionError for a distance beyond the rounding of the dtype.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise AssertionError(f"rows differ: {list(ours.shape)} {ours.dtype}, not {list(theirs.shape)} {theirs.dtype}")
    wide = theirs.float()
    return _checked(float(((ours.float() - wide).norm(dim=1) / wide.norm(dim=1)).max()), "rows", ours.dtype)


def check_logits(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the distance of our logits from theirs, both float32 [vocabulary], as a part of their length.

    dtype: the type that they were computed in. Raises AssertionError as `check_rows` does.
    """
    return _checked(float((ours - theirs).norm() / theirs.norm()), "logits", dtype)


def _checked(off: float, what: str, dtype: torch.dtype) -> float:
    if not off < _TOLERANCE[dtype]:
        raise AssertionError(f"{what} differ by {off:.2g} of their length; {_TOLERANCE[dtype]} is allowed in {dtype}")
    return off


def run_baseline(folder: Path, count: int, side: int, tokens: int, seed: int, threads: int) -> dict[str, Any]:
    """Answer the questions of `make_questions` one at a time; return answers, seconds and the peak of memory in bytes.

    Inputs are ready before the clock starts: decoding and resizing pictures does not count.
    """
    from transformers.generation.streamers import BaseStreamer

    class FirstToken(BaseStreamer):
        calls = 0
        at = 0.0

        def put(self, value: Any) -> None:
            self.calls += 1
            if self.calls == 2:  # the first call brings the prompt
                self.at = time.perf_counter()

        def end(self) -> None:
            pass

    torch.set_num_threads(threads)
    reference = Reference(folder, load_reference(folder, dtype="auto"), device=_CPU)
    inputs = [reference.prepare([question]) for question in make_questions(count, side=side, seed=seed)]
    answers = []
    began = time.perf_counter()
    for prepared in inputs:
        streamer, started = FirstToken(), time.perf_counter()
        [ids] = reference.generate(prepared, tokens, streamer=streamer)
        seconds = {"ttft_s": streamer.at - started, "total_s": time.perf_counter() - started}
        answers.append({**seconds, "tokens": len(ids), "text": reference.tokenizer.decode(ids)})
    return {
        "answers": answers,
        "wall_s": time.perf_counter() - began,
        "peak_bytes": process_memory(os.getpid(), "VmHWM"),
    }


if __name__ == "__main__":
    print(json.dumps(run_baseline(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
