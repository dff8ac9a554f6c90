"""EAGLE-3 heads, in both published layouts: what they guess, and which are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from tests.tiny_checkpoints import VOCAB_SIZE, make_checkpoint
from tests.vlmserve.known_guesses import (
    DRAFTS,
    FOUR,
    GROUPS,
    MORE_SHARED,
    NEW,
    PP,
    SMALL,
    Known,
    check_guesses,
    check_many,
    check_shared,
    questions,
)
from tests.vlmserve.reference import Reference
from vlmserve import LLM
from vlmserve_common.errors import CheckpointError, SettingsError

SIZE, DIM, DRAFT_VOCAB, THETA = 64, 24, 200, 300.0
HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": SIZE,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,  # not the target's
    "num_key_value_heads": 3,
    "head_dim": DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": THETA,
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": DRAFT_VOCAB,
    "torch_dtype": "float32",
}


def make_head(folder: Path, config: dict, *, embedding: bool, layer: str = "midlayer", seed: int = 0) -> Path:
    """A random head. embedding: it has its own. layer: what its layer is called."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain / math.sqrt(columns)

    heads, kv_heads, inner = (
        HEAD[name] for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    )
    kept = torch.randperm(VOCAB_SIZE, generator=generator)[:DRAFT_VOCAB].sort().values
    tensors = {
        "fc.weight": matrix(SIZE, 3 * SIZE),
        f"{layer}.self_attn.q_proj.weight": matrix(heads * DIM, 2 * SIZE, 2.0),
        f"{layer}.self_attn.k_proj.weight": matrix(kv_heads * DIM, 2 * SIZE, 2.0),
        f"{layer}.self_attn.v_proj.weight": matrix(kv_heads * DIM, 2 * SIZE),
        f"{layer}.self_attn.o_proj.weight": matrix(SIZE, heads * DIM, 4.0),
        f"{layer}.mlp.gate_proj.weight": matrix(inner, SIZE, 2.0),
        f"{layer}.mlp.up_proj.weight": matrix(inner, SIZE, 2.0),
        f"{layer}.mlp.down_proj.weight": matrix(SIZE, inner, 2.0),
        "lm_head.weight": matrix(DRAFT_VOCAB, SIZE, 3.0),
        "d2t": kept - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, kept, True),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{layer}.{name}.weight"] = 1 + 0.3 * torch.randn(SIZE, generator=generator)
    tensors["norm.weight"] = 1 + 0.3 * torch.randn(SIZE, generator=generator)
    if embedding:
        tensors["embed_tokens.weight"] = 0.5 * torch.randn(VOCAB_SIZE, SIZE, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Head:
    """An EAGLE-3 head in plain torch, as published: entry i joins features of token i and the embedding of token
    i + 1. axes: of its rotary frequencies; None: it turns by places of tokens."""

    heads, kv_heads = HEAD["num_attention_heads"], HEAD["num_key_value_heads"]

    def __init__(
        self, folder: Path, target_embedding: torch.Tensor, axes: list[int] | None, *, norm_first: bool
    ) -> None:
        tensors = load_file(folder / "model.safetensors")
        self.w = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
        self.own = self.w.get("embed_tokens.weight")
        self.embed = target_embedding if self.own is None else self.own
        self.axes, self.norm_first = axes, norm_first

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.w[f"{name}.weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.w[f"{name}.weight"].T

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [n, heads, dim], positions [3, n]."""
        half = DIM // 2
        angles = positions[self.axes or [0] * half].T.float() * THETA ** (-torch.arange(half) * 2 / DIM)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x.split(half, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def entries(
        self, features: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return what is added to, queries, keys and values of entries."""
        normed = self.norm(features, "midlayer.hidden_norm")
        y = torch.cat((self.norm(embeds, "midlayer.input_layernorm"), normed), -1)
        q, k, v = (self.linear(y, f"midlayer.self_attn.{name}_proj").view(len(y), -1, DIM) for name in ("q", "k", "v"))
        return normed if self.norm_first else features, self.turn(q, positions), self.turn(k, positions), v

    def output(self, x: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for the last entry, whose x and q have one row."""
        more = self.heads // self.kv_heads
        scores = torch.einsum("qhd,nhd->hqn", q, keys.repeat_interleave(more, 1)) * DIM**-0.5
        out = torch.einsum("hqn,nhd->qhd", scores.softmax(-1), values.repeat_interleave(more, 1))
        x = x + self.linear(out.flatten(1), "midlayer.self_attn.o_proj")
        y = self.norm(x, "midlayer.post_attention_layernorm")
        gated = F.silu(self.linear(y, "midlayer.mlp.gate_proj")) * self.linear(y, "midlayer.mlp.up_proj")
        return x + self.linear(gated, "midlayer.mlp.down_proj")

    def guess(
        self, tapped: torch.Tensor, embeds: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, prompt: int
    ):
        """Return guesses and margins [tokens of the answer - 1, DRAFTS], and all entries' keys. tapped [n, taps *
        width], embeds [n, width], ids [n], positions [3, n]: of prompt and answer."""
        if self.own is not None:
            text = ids < VOCAB_SIZE
            embeds = torch.where(text[:, None], self.own[ids.clamp(max=VOCAB_SIZE - 1)], embeds)
        if self.axes is None:
            positions = torch.arange(len(ids)).expand(3, -1)
        x, q, keys, values = self.entries(self.linear(tapped, "fc")[:-1], embeds[1:], positions[:, :-1])
        rows, margins = [], []
        for last in range(prompt - 1, len(ids) - 2):
            own = [part[last : last + 1] for part in (x, q)] + [part[: last + 1] for part in (keys, values)]
            for step in range(DRAFTS):
                out = self.output(*own)
                best = self.linear(self.norm(out, "norm"), "lm_head")[0].topk(2)
                token = best.indices[:1] + self.w["d2t"][best.indices[:1]]
                rows.append(token[0])
                margins.append(best.values[0] - best.values[1])
                *new, k, v = self.entries(out, self.embed[token], positions[:, last : last + 1] + step + 1)
                own = [*new, torch.cat((own[2], k)), torch.cat((own[3], v))]
        return torch.stack(rows).view(-1, DRAFTS), torch.stack(margins).view(-1, DRAFTS), keys


@torch.no_grad()
def known(folder: Path, head_folder: Path, taps: list[int], axes: list[int] | None, *, norm_first: bool) -> list[Known]:
    reference, found = Reference(folder), []
    text, seen = reference.model.model.language_model, {}
    head = Head(head_folder, text.embed_tokens.weight, axes, norm_first=norm_first)
    text.register_forward_pre_hook(lambda m, a, k: seen.update(embeds=k["inputs_embeds"]), with_kwargs=True)
    text.rotary_emb.register_forward_pre_hook(lambda m, a: seen.update(positions=a[1]))
    for number, layer in enumerate(text.layers):
        layer.register_forward_pre_hook(lambda m, a, number=number: seen.update({number: a[0].clone()}))
    text.norm.register_forward_pre_hook(lambda m, a: seen.update({len(text.layers): a[0]}))
    for messages in questions():
        answer = reference.answer(messages, NEW)
        ids = torch.tensor(reference.forward(messages, answer.token_ids).input_ids)
        pads = torch.isin(
            ids, torch.tensor([reference.model.config.image_token_id, reference.model.config.video_token_id])
        )
        tapped = torch.cat([seen[tap][0] for tap in taps], dim=-1)
        shown = ids.masked_fill(pads, VOCAB_SIZE)
        drafts = head.guess(tapped, seen["embeds"][0], shown, seen["positions"][:, 0], answer.prompt_tokens)
        found.append(Known(messages, answer, *drafts))
    return found


INTERLEAVED = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 0, 0]
LAYOUTS = {
    "own": (
        {**HEAD, "rope_scaling": {"type": "mrope", "mrope_section": [6, 3, 3], "mrope_interleaved": True},
         "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}},
        {"embedding": False},
        {"taps": [1, 2, 3], "axes": INTERLEAVED, "norm_first": False},
    ),
    "speculators": (
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": {name: HEAD[name] for name in list(HEAD)[1:] if name != "draft_vocab_size"},
            "draft_vocab_size": DRAFT_VOCAB,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        },
        {"embedding": True, "layer": "layers.0"},
        {"taps": [0, 1, 2], "axes": None, "norm_first": True},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=LAYOUTS)
def heads(request, tmp_path_factory):
    config, made, formula = LAYOUTS[request.param]
    base = tmp_path_factory.mktemp(request.param)
    folder = make_checkpoint("qwen3_vl" if request.param == "own" else "qwen2_5_vl", base / "model")
    head = make_head(base / "head", config, **made)
    return folder, head, known(folder, head, **formula)


@pytest.mark.parametrize(
    "settings",
    [{"chunked_prefill_size": 48, "page_size": 4}, {"attention_backend": "torch", "chunked_prefill_size": 16}],
)
def test_guesses_are_the_reference_s(heads, settings):
    folder, head, cases = heads
    eagle = {"speculative_algorithm": "eagle3", "speculative_draft_model_path": str(head)}
    with LLM(str(folder), num_threads=1, **eagle, **FOUR, **settings) as llm:
        check_guesses(llm, cases, -2)


@pytest.mark.parametrize(
    "settings",
    [
        {"chunked_prefill_size": 48, **SMALL},
        {
            "speculative_num_draft_tokens": "auto",
            "enable_hierarchical_cache": True,
            "hicache_size_gib": 0.01,  # small machines have no 4 GiB beside other tests
            "max_total_tokens": 512,
        },
        pytest.param({"kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
    ],
)
def test_answers_of_many_at_a_time(heads, settings):
    """Guesses, good or bad, change no answer: where slots run out, in chunks, with KV that was elsewhere."""
    folder, head, cases = heads
    eagle = {"speculative_algorithm": "eagle3", "speculative_draft_model_path": str(head)}
    check_many(folder, cases, settings, **eagle)


@pytest.mark.parametrize("settings", [PP, GROUPS, *MORE_SHARED, pytest.param({"pp_size": 3}, marks=pytest.mark.slow)])
def test_processes_that_share_the_model(heads, settings):
    folder, head, cases = heads
    check_shared(folder, cases, settings, speculative_algorithm="eagle3", speculative_draft_model_path=str(head))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"an EAGLE-3 head has LlamaForCausalLMEagle3"),
        (
            {"hidden_size": 32, "head_dim": 8},
            r"is a head for a model with hidden states of 32, and .*model has 64",
        ),
        ({"vocab_size": 500}, r"head is a head for a model with a vocabulary of 500, and .*model has 448"),
        ({"target_model_type": "qwen3_vl"}, r"a model with model_type of qwen3_vl, and .*model has qwen2_5_vl"),
        ({"draft_vocab_size": 100}, r"must map 100 tokens of the head to the 448 of .*, and d2t is \[200\]"),
        ({"draft_vocab_size": None}, r"must map 448 tokens of the head"),
        ({"intermediate_size": 90}, r"tensors do not fit the configuration"),
        ({"num_hidden_layers": 2}, r"num_hidden_layers is 2; supported: 1"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]},
            r"layers \[1, 2, 9\], which must ascend and be at most 3",
        ),
        ({}, r"before layers \[2, 1, 0\], which must ascend"),  # the usual ones, of a model with three layers
    ],
)
def test_a_head_for_another_model_is_refused(change, message, tmp_path):
    folder = make_checkpoint("qwen2_5_vl", tmp_path / "model")
    config = {**HEAD, "eagle_aux_hidden_state_layer_ids": [0, 1, 2] if change else None, **change}
    head = make_head(tmp_path / "head", config, embedding=True)
    with pytest.raises(CheckpointError, match=message):
        LLM(str(folder), speculative_algorithm="eagle3", speculative_draft_model_path=str(head))


def test_settings_that_do_not_go_together(tmp_path):
    head = {"speculative_draft_model_path": str(tmp_path)}
    for settings, message in (
        ({"speculative_algorithm": "eagle3"}, "speculative_draft_model_path is None; it must be a folder or id with"),
        (head, "must be a folder or id with"),
    ):
        with pytest.raises(SettingsError, match=message):
            LLM("builtin:tiny", **settings)
