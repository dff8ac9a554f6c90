"""What `vlmserve bench gpu` measures: a checkpoint in our engine and in transformers, on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlmserve.bench.baseline import Preparation
from vlmserve.bench.load import BenchRequest
from vlmserve.bench.vision_reference import load_reference
from vlmserve.checkpoints.random import TEXT_SIZES, VISION_SIZES
from vlmserve.offline.llm import LLM
from vlmserve.tokenizer.sampling import SamplingOverrides
from vlmserve.tokenizer.text_tokenizer import TextTokenizer
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.errors import EngineError

_HIDDEN = 2048
_WORDS = "the a an is in of and to it on red blue green one two three circle square picture image street river book"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """text, vision: of the checkpoint (see `write_random_checkpoint`). pictures: in the tower's batch, of side x side
    pixels. batches: prompts of `short_prompt` tokens answered together, with `answer` tokens each."""

    what: str
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    pictures: int
    side: int
    long_prompt: int
    short_prompt: int
    answer: int
    batches: tuple[int, ...]

    @property
    def kv_tokens(self) -> int:
        """KV slots for the largest of what is asked, and a picture; in whole pages."""
        together = max(self.batches) * (self.short_prompt + self.answer + 32)
        return (max(together, self.long_prompt, self.side**2 // 256) + 1024) // 64 * 64


FULL = Sizes(
    what="random weights in the shape of Qwen3-VL-2B, with a head of its own",
    text=TEXT_SIZES | {"hidden_size": _HIDDEN, "intermediate_size": 6144},
    vision=VISION_SIZES | {"out_hidden_size": _HIDDEN},
    pictures=4,
    side=1024,
    long_prompt=2048,
    short_prompt=16,
    answer=256,
    batches=(1, 8, 32),
)
SMALL = Sizes(
    what="random weights in a tiny shape",
    text={"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 1024},
    vision={"depth": 3, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]},
    pictures=2,
    side=128,
    long_prompt=64,
    short_prompt=16,
    answer=4,
    batches=(1, 8),
)


def finish(device: torch.device) -> None:
    """Wait for what the device still computes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_prompts(tokenizer: TextTokenizer, count: int, tokens: int, seed: int) -> list[str]:
    """Texts of so many tokens each, no two alike if they can be. EngineError where the tokenizer makes no such."""
    words = [f" {word}" for word in _WORDS.split() if len(tokenizer.encode(f" {word}")) == 1]
    rng = np.random.default_rng([seed, count, tokens])
    made = ["".join(rng.choice(words, tokens)) for _ in range(count)] if words else []
    if not made or any(len(tokenizer.encode(text)) != tokens for text in made):
        raise EngineError("the checkpoint's tokenizer has too few of the words that prompts are made of")
    return made


class Ours:
    """The engine, without a prefix cache: equal work every time. Embeddings are kept as they are by default."""

    def __init__(self, folder: Path, sizes: Sizes, *, device: torch.device, dtype: torch.dtype) -> None:
        self.llm = LLM(
            str(folder),
            device=str(device),
            dtype=dtype_name(dtype),
            disable_radix_cache=True,
            max_total_tokens=sizes.kv_tokens,
        )
        self._device = device

    def answer(self, prompts: Sequence[str], tokens: int) -> list[tuple[int, ...]]:
        """Greedy answers of exactly so many tokens, computed together."""
        found = [done.token_ids for done in self.llm.generate(prompts, _greedy(tokens))]
        finish(self._device)
        return found

    def first_token(self, request: BenchRequest) -> tuple[int, ...]:
        """From a picture's file and a question to one token."""
        messages = request.messages({"type": "image", "image": request.picture})
        found = self.llm.chat(messages, _greedy(1)).token_ids
        finish(self._device)
        return found


class Theirs:
    """`generate` of transformers, with sdpa attention. It stops at no token, as ours does not here."""

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        self.model = load_reference(folder, dtype=dtype).to(device)
        self.model.generation_config.eos_token_id = None
        self._prepare = Preparation(folder)
        self._device = device

    @property
    def tokenizer(self) -> TextTokenizer:
        """The checkpoint's."""
        return self._prepare.tokenizer

    def answer(self, prompts: Sequence[str], tokens: int) -> list[tuple[int, ...]]:
        """As `Ours.answer`; prompts are equally long."""
        ids = torch.tensor([self.tokenizer.encode(text) for text in prompts])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)}
        return self._generate(inputs, tokens)

    def prepare(self, request: BenchRequest) -> dict[str, torch.Tensor]:
        """A picture and a question as the model's inputs, on the CPU."""
        inputs: dict[str, torch.Tensor] = self._prepare(request)
        return inputs

    def first_token(self, inputs: dict[str, torch.Tensor]) -> tuple[int, ...]:
        """From inputs to one token."""
        return self._generate(inputs, 1)[0]

    @torch.inference_mode()
    def _generate(self, inputs: dict[str, torch.Tensor], tokens: int) -> list[tuple[int, ...]]:
        self.model.model.rope_deltas = None  # of the last call
        here = {name: value.to(self._device) for name, value in inputs.items()}
        out = self.model.generate(
            **here, max_new_tokens=tokens, do_sample=False, temperature=None, top_p=None, top_k=None
        )
        return [tuple(row) for row in out[:, inputs["input_ids"].shape[1] :].tolist()]


def _greedy(tokens: int) -> SamplingOverrides:
    return SamplingOverrides(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
