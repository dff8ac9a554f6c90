"""What `transformers` answers on the same checkpoint: the truth for whole requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import hf_env  # noqa: F401  (before transformers)

# isort: split
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.tiny_checkpoints import ALL_FAMILIES, make_checkpoint


@dataclass(frozen=True)
class Answer:
    prompt_tokens: int
    token_ids: list[int]
    logprobs: list[float]
    margins: list[float]


@dataclass(frozen=True)
class Forwarded:
    """logprobs: [L, vocab] of what follows each token; hidden: [L, hidden]; prompt: tokens before the continuation."""

    input_ids: list[int]
    logprobs: np.ndarray
    hidden: np.ndarray
    prompt: int


class Reference:
    def __init__(self, folder: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def answer(self, messages: list[dict], max_tokens: int, **kwargs: Any) -> Answer:
        """messages as `LLM.chat` takes them, pictures as PIL images, videos as bytes. kwargs: the processor's."""
        inputs = self._inputs(messages, **kwargs)
        self.model.model.rope_deltas = None
        out = self.model.generate(
            **inputs,
            max_new_tokens=max_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        prompt = inputs["input_ids"].shape[1]
        ids = out.sequences[0, prompt:].tolist()
        rows = [torch.log_softmax(row[0].float(), -1) for row in out.logits]
        best = [row.topk(2).values for row in rows]
        return Answer(
            prompt,
            ids,
            [float(row[i]) for row, i in zip(rows, ids, strict=True)],
            [float(a - b) for a, b in best],
        )

    @torch.no_grad()
    def forward(self, messages: list[dict], continuation: Sequence[int] = ()) -> Forwarded:
        """What it makes of a conversation and, behind its generation prompt, some token ids, in one pass."""
        inputs = dict(self._inputs(messages))
        start = inputs["input_ids"].shape[1]
        if continuation:
            more = torch.tensor([list(continuation)])
            fill = {"input_ids": more, "attention_mask": torch.ones_like(more)}
            for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
                if name in inputs:
                    inputs[name] = torch.cat([inputs[name], fill.get(name, torch.zeros_like(more))], dim=1)
        self.model.model.rope_deltas = None
        out = self.model(**inputs, output_hidden_states=True)
        return Forwarded(
            inputs["input_ids"][0].tolist(),
            torch.log_softmax(out.logits[0].float(), -1).numpy(),
            out.hidden_states[-1][0].float().numpy(),
            start,
        )

    def _inputs(self, messages: list[dict], **kwargs: Any) -> Any:
        parts = [p for m in messages if isinstance(m["content"], list) for p in m["content"]]
        images = [part["image"] for part in parts if part["type"] == "image"]
        clips = [_decode(part["video"]) for part in parts if part["type"] == "video"]
        plain = [
            {**m, "content": [{"type": p["type"]} if p["type"] != "text" else p for p in m["content"]]}
            if isinstance(m["content"], list)
            else m
            for m in messages
        ]
        text = self.processor.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        sampled = {
            "videos": [frames for frames, _ in clips],
            "video_metadata": [{"total_num_frames": len(frames), "fps": rate} for frames, rate in clips],
            "do_sample_frames": True,
            "fps": 2,
        }
        kwargs = (sampled if clips else {}) | kwargs
        return self.processor(text=[text], images=images or None, return_tensors="pt", **kwargs)


def _decode(video: bytes) -> tuple[np.ndarray, float]:
    from tests.processors.clips import decode_all  # needs PyAV, which pictures do without

    return decode_all(video)


def picture(seed: int, width: int, height: int) -> Image.Image:
    """A smooth picture of a few coloured blobs."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def ask(*parts) -> list[dict]:
    """One user message of texts and pictures."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return [{"role": "user", "content": content}]


def conversations() -> list[list[dict]]:
    """Text, pictures of awkward sizes, several of them, several turns, a system prompt, one picture twice."""
    a, b, c = picture(1, 96, 64), picture(2, 77, 131), picture(3, 200, 50)
    return [
        [{"role": "user", "content": "Name a colour."}],
        ask(a, "What is this?"),
        ask("Look:", b, "Describe it in detail, please."),
        ask(a, b, c, "Which is the widest?"),
        ask(c, b, a, "Which is the widest?"),
        ask(a, a, "Are these equal?"),
        [*ask(a, "What is this?"), {"role": "assistant", "content": "A disc."}, *ask("And this?", c)],
        [{"role": "system", "content": "Be brief."}, *ask(picture(4, 33, 300), "What now?")],
        ask(picture(5, 300, 300), "How many shapes are in the image on the left side of the blue square? " * 4),
    ]


SHARED = [
    {"tp_size": 2, "chunked_prefill_size": 48, "page_size": 4},
    {"pp_size": 2, "chunked_prefill_size": 16, "page_size": 4},
    {"encoder_dp_size": 1, "chunked_prefill_size": 48, "page_size": 1},
    {"speculative_algorithm": "ngram", "chunked_prefill_size": 48, "page_size": 4},
    {"speculative_algorithm": "ngram", "tp_size": 2, "encoder_dp_size": 1, "chunked_prefill_size": 16, "page_size": 16},
]
"""How processes share a model, and guess: what each costs is seconds."""


def over(
    families: Sequence[str], settings: Sequence[dict], often: Sequence[str], shared: Sequence[dict] = ()
) -> pytest.MarkDecorator:
    """Parametrize a fixture `family`, and `settings`; all but the first of these are slow, unless a family is often.
    shared: further settings, for `ALL_FAMILIES`, which are always slow."""
    cases = [
        pytest.param(family, one, marks=pytest.mark.slow if one and family not in often else ())
        for family in families
        for one in settings
    ]
    cases += [
        pytest.param(family, one, marks=pytest.mark.slow)
        for family in families
        if family in ALL_FAMILIES
        for one in shared
    ]
    return pytest.mark.parametrize(("family", "settings"), cases, indirect=["family"])


def known(family: str, folder: Path, asked: list, max_tokens: int) -> tuple[Path, list, list[Answer]]:
    """Return a checkpoint, conversations, and what transformers answers."""
    folder = make_checkpoint(family, folder)
    reference = Reference(folder)
    return folder, asked, [reference.answer(messages, max_tokens) for messages in asked]


def assert_equal_answers(got, want: Answer, tolerance: float = 1e-4) -> None:
    """`got` is a `Completion`: same prompt length, tokens (but for ties) and logprobs."""
    assert got.prompt_tokens == want.prompt_tokens
    for i, (ours, theirs) in enumerate(zip(got.token_ids, want.token_ids, strict=True)):
        if ours != theirs:
            assert want.margins[i] < 1e-3, f"token {i} is {ours}, not {theirs} (margin {want.margins[i]})"
            return
        assert abs(got.logprobs[i].logprob - want.logprobs[i]) < tolerance
