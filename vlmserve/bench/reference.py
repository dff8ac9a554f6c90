"""transformers' model of a checkpoint, and its vision tower alone; whether ours does the same work as that."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from processors.families.registry import make_processor
from vision.towers.grids import Grid
from vision.towers.runner import pixel_values
from vision.towers.temporal_patch import temporal_patches
from vlmserve.bench.questions import Question
from vlmserve.tokenizer.chat_template import load_chat_template
from vlmserve.tokenizer.text_tokenizer import load_text_tokenizer
from vlmserve_common.checkpoint.reader import read_json
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


class Reference:
    """`generate` of transformers, that stops at no token. Its inputs are made by our own template and processor (equal
    to the reference's, as the tests show). dtype: "auto" for the checkpoint's."""

    def __init__(self, folder: Path, *, dtype: torch.dtype | str = "auto", device: torch.device = _CPU) -> None:
        self.model = load_reference(folder, dtype=dtype).to(device)
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

    def answer(self, prompts: Sequence[str], tokens: int) -> list[tuple[int, ...]]:
        """Greedy answers of exactly so many tokens, computed together. Prompts are equally long."""
        ids = torch.tensor([self.tokenizer.encode(text) for text in prompts])
        return self.generate(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)},
            tokens,
        )

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
