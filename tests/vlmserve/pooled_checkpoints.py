"""Tiny embedders and rerankers, with the files of published ones, and what `transformers` makes of their prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import Reference

INSTRUCTION = "Represent the user's input."
QUERY = "Find what the user asks for."
RERANK = "Given a search query, retrieve relevant candidates that answer the query."
WIDTH = 64
YES, NO = 300, 301
_OLD = "sentence_transformers.models."
_NEW = "sentence_transformers.sentence_transformer.modules."
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def make_embedder(folder: Path, *, old: bool = False, pooling: str = "lasttoken", normalize: bool = True) -> Path:
    """old: older names of classes and fields, and a tokenizer that ends each text with a token of its own."""
    make_checkpoint("qwen3_vl", folder)
    kinds = [f"{_OLD}{kind}" for kind in ("Transformer", "Pooling", "Normalize")]
    if not old:
        kinds = ["sentence_transformers.base.modules.transformer.Transformer"]
        kinds += [f"{_NEW}pooling.Pooling", f"{_NEW}normalize.Normalize"]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [{"idx": at, "name": str(at), "path": path, "type": kinds[at]} for at, path in enumerate(paths)]
    write(folder / "modules.json", modules if normalize else modules[:2])
    poolings = ("cls_token", "mean_tokens", "lasttoken")
    switches = {f"pooling_mode_{kind}": kind == pooling for kind in poolings}
    write(folder / "1_Pooling" / "config.json", switches if old else {"pooling_mode": pooling})
    prompts = {"query": QUERY, "document": INSTRUCTION}
    write(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "document"})
    if old:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        [end] = [one for one in tokenizer["added_tokens"] if one["content"] == "<|endoftext|>"]
        sequence = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}]
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": sequence,
            "pair": sequence,
            "special_tokens": {
                "<|endoftext|>": {"id": "<|endoftext|>", "ids": [end["id"]], "tokens": ["<|endoftext|>"]}
            },
        }
        write(folder / "tokenizer.json", tokenizer)
    return folder


def make_reranker(folder: Path, *, tied: bool = True, template: bool = True) -> Path:
    """template: it brings its own, which is the published prompt with an exclamation mark."""
    make_checkpoint("qwen3_vl", folder, tied=tied)
    kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    write(folder / "modules.json", [{"path": "", "type": f"{_OLD}Transformer"}, {"path": "1_LogitScore", "type": kind}])
    write(folder / "1_LogitScore" / "config.json", {"true_token_id": YES, "false_token_id": NO})
    if template:
        path = folder / "additional_chat_templates" / "reranker.jinja"
        path.parent.mkdir()
        path.write_text(
            "{{- messages[0].content if messages[0].role == 'system' else 'Default.' -}}!"
            "{%- for message in messages if message.role in ('query', 'document') -%}"
            "<{{- message.role -}}>{{- message.content if message.content is string else message.content[0].text -}}"
            "{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
        )
    return folder


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def embed_prompt(*parts: Any, instruction: str = INSTRUCTION) -> str:
    """The published prompt; what is no text is a picture."""
    system = f"<|im_start|>system\n{instruction}<|im_end|>\n" if instruction else ""
    return f"{system}<|im_start|>user\n{_shown(parts)}<|im_end|>\n<|im_start|>assistant\n"


def rerank_prompt(query: tuple[Any, ...], document: tuple[Any, ...], instruction: str = RERANK) -> str:
    system = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".'
    )
    pair = f"<Instruct>: {instruction}<Query>:{_shown(query)}\n<Document>:{_shown(document)}"
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{pair}<|im_end|>\n<|im_start|>assistant\n"


def _shown(parts: tuple[Any, ...]) -> str:
    return "".join(part if isinstance(part, str) else _IMAGE for part in parts)


class States(Reference):
    """The hidden states of a prompt behind the final norm."""

    def states(self, prompt: str, *parts: Any) -> np.ndarray:
        """[L, hidden]. parts: of which pictures stand in the prompt."""
        images = [part for part in parts if not isinstance(part, str)]
        inputs = self.processor(text=[prompt], images=images or None, return_tensors="pt")
        self.model.model.rope_deltas = None
        return self.model.model(**inputs).last_hidden_state[0].detach().numpy()

    def vector(self, prompt: str, *parts: Any, mean: bool = False, dimensions: int = WIDTH) -> np.ndarray:
        states = self.states(prompt, *parts)
        row = (states.mean(0) if mean else states[-1])[:dimensions]
        return row / np.linalg.norm(row)

    def score(self, prompt: str, *parts: Any) -> float:
        head = self.model.lm_head.weight.detach().numpy()
        return float(1 / (1 + np.exp(-self.states(prompt, *parts)[-1] @ (head[YES] - head[NO]))))
