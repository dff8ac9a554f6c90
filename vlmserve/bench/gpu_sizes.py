"""How much `vlmserve bench gpu` asks for, and of what size its checkpoint is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vlmserve.bench.random_checkpoint import TEXT_SIZES, VISION_SIZES
from vlmserve.tokenizer.text_tokenizer import TextTokenizer
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
    text={"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96},
    vision={"depth": 3, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]},
    pictures=2,
    side=128,
    long_prompt=64,
    short_prompt=16,
    answer=4,
    batches=(1, 8),
)


def make_prompts(tokenizer: TextTokenizer, count: int, tokens: int) -> list[str]:
    """Texts of so many tokens each, no two alike if they can be. EngineError where the tokenizer makes no such."""
    words = [f" {word}" for word in _WORDS.split() if len(tokenizer.encode(f" {word}")) == 1]
    rng = np.random.default_rng([count, tokens])
    made = ["".join(rng.choice(words, tokens)) for _ in range(count)] if words else []
    if not made or any(len(tokenizer.encode(text)) != tokens for text in made):
        raise EngineError("the checkpoint's tokenizer has too few of the words that prompts are made of")
    return made
