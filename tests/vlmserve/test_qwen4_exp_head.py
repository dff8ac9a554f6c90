"""Tokens that the MTP head of Qwen4Exp guesses, beside transformers' own layer with the head's weights."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache

from tests.tiny_checkpoints import STREAMED, make_checkpoint
from tests.vlmserve.known_guesses import (
    DRAFTS,
    FOUR,
    GROUPS,
    HYBRID_CHUNKS,
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

OF_THE_HEAD = 2  # behind two layers of the model; those of the index come last


class Head(torch.nn.Module):
    """Entry i joins the streams of token i with the embedding of token i + 1."""

    def __init__(self, folder: Path, text: torch.nn.Module) -> None:
        super().__init__()
        self.config = config = copy.deepcopy(text.config)
        config.num_hidden_layers, config.layer_types, config.ple_layer_ids = 1, ["indexed_attention"], []
        self.layers = torch.nn.ModuleList([type(text.layers[0])(config, 0)])
        self.hyper_connection_mixer = type(text.hyper_connection_mixer)(config, use_combine=False)
        size, streams, Norm = config.hidden_size, config.hc_count, type(text.layers[-1].self_attn.q_norm)
        self.pre_fc_norm_embedding = Norm(size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = Norm(size * streams, eps=config.rms_norm_eps)
        self.fc_embedding = torch.nn.Linear(size, size, bias=False)
        self.fc_hidden = torch.nn.Linear(size, size, bias=False)
        tensors = load_file(folder / "model.safetensors")
        own = {name.removeprefix("mtp."): value for name, value in tensors.items() if name.startswith("mtp.")}
        self.load_state_dict(own)
        self.rotary = text.rotary_emb
        self.embed, self.logits = tensors["model.language_model.embed_tokens.weight"], tensors["lm_head.weight"]

    def forward(self, streams: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor, cache: DynamicCache):
        """Return the streams and logits of new entries. streams [n, C * H], embeds [n, H]. positions [3, all]."""
        token = self.fc_embedding(self.pre_fc_norm_embedding(embeds))
        each = self.pre_fc_norm_hidden(streams).unflatten(-1, (self.config.hc_count, -1))
        x = (self.fc_hidden(each) + token[:, None]).flatten(1)[None]
        total, new = positions.shape[1], len(embeds)
        mask = torch.full((total, total), torch.finfo(torch.float32).min).triu(1)[None, None, -new:]
        turned = self.rotary(x, positions[:, None])
        x = self.layers[0](x, position_embeddings=turned, attention_mask=mask, past_key_values=cache)
        return x[0], self.hyper_connection_mixer(x)[0] @ self.logits.T

    def guess(self, streams: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor, prompt: int):
        """Return guesses and margins [tokens of the answer - 1, DRAFTS], and all entries' keys [n, heads, dim]. They
        are those of prompt and answer."""
        whole = DynamicCache(config=self.config)
        streams, logits = self(streams[:-1], embeds[1:], positions[:, :-1], whole)
        rows, margins = [], []
        for last in range(prompt - 1, len(streams) - 1):
            cache, own, row = copy.deepcopy(whole), streams[last : last + 1], logits[last]
            cache.layers[0].crop(last + 1 - len(streams))
            places = positions[:, : last + 1]
            for step in range(DRAFTS):
                best = row.topk(2)
                rows.append(best.indices[0])
                margins.append(best.values[0] - best.values[1])
                if step == DRAFTS - 1:
                    break
                places = torch.cat((places, places[:, -1:] + 1), dim=1)
                own, (row,) = self(own, self.embed[best.indices[:1]], places, cache)
        keys = whole.layers[0].keys[0].transpose(0, 1)
        return torch.stack(rows).view(-1, DRAFTS), torch.stack(margins).view(-1, DRAFTS), keys


@torch.no_grad()
def known(folder: Path) -> list[Known]:
    reference, found = Reference(folder), []
    text, seen = reference.model.model.language_model, {}
    head = Head(folder, text)
    text.register_forward_pre_hook(lambda m, a, k: seen.update(embeds=k["inputs_embeds"]), with_kwargs=True)
    text.rotary_emb.register_forward_pre_hook(lambda m, a: seen.update(positions=a[1]))
    text.hyper_connection_mixer.register_forward_pre_hook(lambda m, a: seen.update(streams=a[0]))
    for messages in questions():
        answer = reference.answer(messages, NEW)
        reference.forward(messages, answer.token_ids)
        streams, embeds, positions = seen["streams"][0], seen["embeds"][0], seen["positions"][:, 0]
        found.append(Known(messages, answer, *head.guess(streams, embeds, positions, answer.prompt_tokens)))
    return found


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    folder = make_checkpoint(STREAMED, tmp_path_factory.mktemp(STREAMED), mtp=True)
    return folder, known(folder)


@pytest.mark.parametrize("settings", HYBRID_CHUNKS)
def test_guesses_are_the_reference_s(family, settings):
    """Token by token, with contexts that are longer than the budget of sparse attention."""
    folder, cases = family
    with LLM(str(folder), num_threads=1, speculative_algorithm="mtp", **FOUR, **settings) as llm:
        check_guesses(llm, cases, OF_THE_HEAD)


@pytest.mark.parametrize("settings", [{"chunked_prefill_size": 48}, SMALL])
def test_no_answer_changes(family, settings):
    folder, cases = family
    check_many(folder, cases, settings, speculative_algorithm="mtp")


@pytest.mark.parametrize("settings", [PP, pytest.param(GROUPS, marks=pytest.mark.slow), *MORE_SHARED])
def test_processes_that_share_the_model(family, settings):
    folder, cases = family
    check_shared(folder, cases, settings, speculative_algorithm="mtp")
