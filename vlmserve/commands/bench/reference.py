"""transformers' model of a checkpoint, and its vision tower alone; whether ours does the same work as that."""

from __future__ import annotations

import io
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
from vlmserve.commands.bench.questions import Question
from vlmserve.commands.bench.random_checkpoint import published_tensors
from vlmserve.frontend.chat_template import load_chat_template
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.checkpoint.reader import read_json
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer
from vlmserve_common.compute.torchvision_shim import make_torchvision_importable

_CPU = torch.device("cpu")
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


def load_reference(folder: Path, *, dtype: torch.dtype | str) -> Any:
    """transformers' model of a checkpoint folder, on the CPU, with sdpa attention."""
    make_torchvision_importable()
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    load: Callable[..., Any] = AutoModelForImageTextToText.from_pretrained
    return load(folder, dtype=dtype, attn_implementation="sdpa").eval()


def share_weights(folder: Path, model: VisionLanguageModel, *, device: torch.device) -> Any:
    """transformers' model of a checkpoint folder, whose parameters are those of ours: one memory for both, and no
    weights in the folder needed. AssertionError where the two have different ones."""
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
    """`generate` of transformers, that stops at no token. Its inputs are made by our own template and processor (equal
    to the reference's, as the tests show). model: transformers', on `device`."""

    def __init__(self, folder: Path, model: Any, *, device: torch.device) -> None:
        self.model = model
        self.model.generation_config.eos_token_id = None
        self.tokenizer = load_text_tokenizer(folder)
        self._template = load_chat_template(folder)
        self._processor = make_processor(folder, read_json(folder, "config.json"))
        self._device = device

    def prepare(self, question: Question) -> dict[str, torch.Tensor]:
        """A question about one picture as the model's inputs, on the CPU."""
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

    def prepare_batch(self, questions: Sequence[Question]) -> dict[str, torch.Tensor]:
        """Of questions whose prompts are equally long."""
        prepared = [self.prepare(question) for question in questions]
        return {name: torch.cat([one[name] for one in prepared]) for name in prepared[0]}

    def answer(self, prompts: np.ndarray, tokens: int) -> list[tuple[int, ...]]:
        """Greedy answers of exactly so many tokens to ids int64 [B, L], computed together."""
        ids = torch.from_numpy(prompts)
        return self.generate(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)},
            tokens,
        )

    @torch.inference_mode()
    def logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of an answer's first token, float32 [vocabulary]."""
        self.model.model.rope_deltas = None  # of the last call
        here = {name: value.to(self._device) for name, value in inputs.items()}
        logits: torch.Tensor = self.model(**here, logits_to_keep=1).logits[0, -1]
        return logits.float()

    @torch.inference_mode()
    def generate(self, inputs: dict[str, torch.Tensor], tokens: int, streamer: Any = None) -> list[tuple[int, ...]]:
        """As `answer`, from inputs."""
        self.model.model.rope_deltas = None  # of the last call
        here = {name: value.to(self._device) for name, value in inputs.items()}
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        out = self.model.generate(**here, max_new_tokens=tokens, streamer=streamer, **greedy)
        return [tuple(row) for row in out[:, inputs["input_ids"].shape[1] :].tolist()]


class ReferenceTower:
    """`model.visual` of what `load_reference` gives, moved to a device."""

    def __init__(self, model: Any, *, device: torch.device, dtype: torch.dtype) -> None:
        self._visual: Any = model.model.visual.to(device)
        self._device = device
        self._dtype = dtype

    @torch.inference_mode()
    def encode(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """pixels float32 [P, patch elements] of several media, packed; grids: (t, h, w) of each. Rows [n, row width],
        DeepStack's beside the main ones."""
        made = self._visual(
            pixels.to(self._device, self._dtype), grid_thw=torch.tensor(grids, device=self._device), return_dict=True
        )
        return torch.cat([made.pooler_output, *(getattr(made, "deepstack_features", None) or [])], dim=1)


def check_rows(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest distance of a row of ours [n, width] from theirs, as a part of its length. What is compared in speed
    must be the same work: AssertionError for rows further away than rounding in their dtype takes them."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise AssertionError(f"rows differ: {list(ours.shape)} {ours.dtype}, not {list(theirs.shape)} {theirs.dtype}")
    wide = theirs.float()
    off = float(((ours.float() - wide).norm(dim=1) / wide.norm(dim=1)).max())
    limit = _TOLERANCE[ours.dtype]
    if not off < limit:
        raise AssertionError(f"rows differ by {off:.2g} of their length; {limit} is allowed in {ours.dtype}")
    return off


def check_logits(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> float:
    """The distance of our logits from theirs, both float32 [vocabulary], as a part of their length; AssertionError as
    for rows. dtype: what they were computed in."""
    off = float((ours - theirs).norm() / theirs.norm())
    if not off < _TOLERANCE[dtype]:
        raise AssertionError(f"logits differ by {off:.2g} of their length; {_TOLERANCE[dtype]} is allowed in {dtype}")
    return off
