"""Guessed tokens of hybrid models: with their MTP head, and in general. Their states go back behind wrong guesses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from tests.tiny_checkpoints import HYBRID, HYBRID_MOE, make_checkpoint
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
    check_shared,
    questions,
)
from tests.vlmserve.reference import Reference
from vlmserve import LLM, SamplingOverrides
from vlmserve_common.errors import CheckpointError, EngineError


class Head:
    """The MTP head in plain torch, as published: entry i joins hidden state i and the embedding
    of token i + 1."""

    heads, kv_heads, dim, turning, theta, axes = 4, 2, 32, 8, 500.0, [0, 1, 2, 0]

    def __init__(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        self.w = {name.removeprefix("mtp."): value for name, value in tensors.items() if name.startswith("mtp.")}
        embedding = tensors["model.language_model.embed_tokens.weight"]
        self.embed, self.logits = embedding, tensors.get("lm_head.weight", embedding)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.w[f"{name}.weight"])

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.w[f"{name}.weight"].T

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [n, heads, dim], positions [3, n]: the first elements of each head turn, by interleaved axes."""
        half = self.turning // 2
        angles = positions[self.axes].T.float() * self.theta ** (-torch.arange(half) * 2 / self.turning)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b, rest = x.split([half, half, self.dim - self.turning], dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)

    def entries(self, hidden: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return x, queries, gates, keys and values of entries."""
        both = self.norm(embeds, "pre_fc_norm_embedding"), self.norm(hidden, "pre_fc_norm_hidden")
        x, attn = self.linear(torch.cat(both, -1), "fc"), "layers.0.self_attn"
        y = self.norm(x, "layers.0.input_layernorm")
        q, gate = self.linear(y, f"{attn}.q_proj").view(-1, self.heads, 2 * self.dim).chunk(2, -1)
        k = self.norm(self.linear(y, f"{attn}.k_proj").view(-1, self.kv_heads, self.dim), f"{attn}.k_norm")
        v = self.linear(y, f"{attn}.v_proj").view(-1, self.kv_heads, self.dim)
        return x, self.turn(self.norm(q, f"{attn}.q_norm"), positions), gate, self.turn(k, positions), v

    def output(self, x: torch.Tensor, q: torch.Tensor, gate: torch.Tensor, keys: torch.Tensor, values: torch.Tensor):
        """Return the output of the last entry, whose x, q and gate have one row."""
        more = self.heads // self.kv_heads
        scores = torch.einsum("qhd,nhd->hqn", q, keys.repeat_interleave(more, 1)) * self.dim**-0.5
        out = torch.einsum("hqn,nhd->qhd", scores.softmax(-1), values.repeat_interleave(more, 1)) * gate.sigmoid()
        x = x + self.linear(out.flatten(1), "layers.0.self_attn.o_proj")
        return self.norm(x + self.mlp(self.norm(x, "layers.0.post_attention_layernorm")), "norm")

    def mlp(self, y: torch.Tensor) -> torch.Tensor:
        at = "layers.0.mlp"
        if f"{at}.gate.weight" not in self.w:
            return self.gated(y, at)
        odds, ids = self.linear(y, f"{at}.gate").softmax(-1)[0].topk(3)
        out = sum(p * self.gated(y, f"{at}.experts.{i}") for p, i in zip(odds / odds.sum(), ids.tolist(), strict=True))
        return out + self.linear(y, f"{at}.shared_expert_gate").sigmoid() * self.gated(y, f"{at}.shared_expert")

    def gated(self, y: torch.Tensor, at: str) -> torch.Tensor:
        return self.linear(
            F.silu(self.linear(y, f"{at}.gate_proj")) * self.linear(y, f"{at}.up_proj"), f"{at}.down_proj"
        )

    def guess(self, hidden: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor, prompt: int):
        """Return guesses and margins [tokens of the answer - 1, DRAFTS], and all entries' keys. hidden, embeds [n,
        width], positions [3, n]: of prompt and answer."""
        x, q, gate, keys, values = self.entries(hidden[:-1], embeds[1:], positions[:, :-1])
        rows, margins = [], []
        for last in range(prompt - 1, len(hidden) - 2):
            own = [part[last : last + 1] for part in (x, q, gate)] + [part[: last + 1] for part in (keys, values)]
            for step in range(DRAFTS):
                out = self.output(*own)
                best = (out @ self.logits.T)[0].topk(2)
                rows.append(best.indices[0])
                margins.append(best.values[0] - best.values[1])
                place = positions[:, last : last + 1] + step + 1
                *new, k, v = self.entries(out, self.embed[best.indices[:1]], place)
                own = [*new, torch.cat((own[3], k)), torch.cat((own[4], v))]
        return torch.stack(rows).view(-1, DRAFTS), torch.stack(margins).view(-1, DRAFTS), keys


@torch.no_grad()
def known(folder: Path, asked: list) -> list[Known]:
    reference, head, found = Reference(folder), Head(folder), []
    text, seen = reference.model.model.language_model, {}
    text.register_forward_pre_hook(lambda m, a, k: seen.update(embeds=k["inputs_embeds"]), with_kwargs=True)
    text.rotary_emb.register_forward_pre_hook(lambda m, a: seen.update(positions=a[1]))
    for messages in asked:
        answer = reference.answer(messages, NEW)
        hidden = torch.from_numpy(reference.forward(messages, answer.token_ids).hidden)
        drafts = head.guess(hidden, seen["embeds"][0], seen["positions"][:, 0], answer.prompt_tokens)
        found.append(Known(messages, answer, *drafts))
    return found


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), mtp=True)
    return folder, known(folder, questions())


each_family = pytest.mark.parametrize(
    "family", [HYBRID_MOE, pytest.param(HYBRID, marks=pytest.mark.slow)], indirect=True
)
sparse = pytest.mark.parametrize("family", [HYBRID_MOE], indirect=True)


@each_family
@pytest.mark.parametrize("settings", HYBRID_CHUNKS)
def test_guesses_are_the_reference_s(family, settings):
    """Token by token."""
    folder, cases = family
    with LLM(str(folder), num_threads=1, speculative_algorithm="mtp", **FOUR, **settings) as llm:
        check_guesses(llm, cases, -1)


@pytest.fixture(scope="module")
def of_two_stages(tmp_path_factory):
    """A model with layers of both kinds in each of two stages."""
    mixers = ("linear_attention", "full_attention") * 2
    folder = make_checkpoint(HYBRID_MOE, tmp_path_factory.mktemp("stages"), mtp=True, mixers=mixers)
    return folder, known(folder, questions())


@pytest.mark.parametrize("settings", [PP, GROUPS, *MORE_SHARED])
def test_processes_that_share_the_model(of_two_stages, settings):
    folder, cases = of_two_stages
    check_shared(folder, cases, settings, speculative_algorithm="mtp")


class Knowing:
    """A drafter that knows the answers by their requests' order, and makes mistakes."""

    def __init__(self, answers: list) -> None:
        self.answers = answers

    def propose(self, req) -> tuple[int, ...]:
        index = len(req.output_ids)
        drafts = self.answers[req.arrival % len(self.answers)].token_ids[index : index + DRAFTS]
        return (*drafts[: index % 5], *((token + 1) % 448 for token in drafts[index % 5 :]))


@sparse
@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_algorithm": "ngram", **FOUR, "chunked_prefill_size": 16, "mamba_track_interval": 64},
        pytest.param(
            {"speculative_algorithm": "ngram", **FOUR, "mamba_track_interval": 64, **SMALL}, marks=pytest.mark.slow
        ),
        {"speculative_algorithm": "mtp", **FOUR, "chunked_prefill_size": 48, **SMALL},
    ],
)
def test_answers_of_many_at_a_time(family, settings):
    """Steps hold prompts, guesses and requests without any; slots run out; answers are found again behind states that
    were kept among guesses."""
    folder, cases = family
    random = SamplingOverrides(temperature=0.8, seed=5, max_new_tokens=100)  # an end may come at any time
    asked = [case.messages for case in cases]
    turns = [[*messages, {"role": "user", "content": "And then?"}] for messages in asked]
    with LLM(str(folder), num_threads=1) as plain:
        wanted = plain.chat_batch(asked, random)
        for messages, answer in zip(turns, wanted, strict=True):
            messages.insert(-1, {"role": "assistant", "content": answer.text})
        wanted += plain.chat_batch(turns, random)
    with LLM(str(folder), num_threads=1, **settings) as llm:
        scheduler = llm.engine.loop.schedulers[0]
        if settings["speculative_algorithm"] == "ngram":
            scheduler._guesser._drafter = Knowing(wanted)
        done = llm.chat_batch(asked, random) + llm.chat_batch(turns, random)
        assert [one.token_ids for one in done] == [one.token_ids for one in wanted]
        stats = llm.stats()
        assert stats.steps.guesses.steps > 100
        if settings["speculative_algorithm"] == "ngram":
            assert stats.steps.guesses.right > 500
        assert bool(stats.retracted_total) == ("max_total_tokens" in settings)
        assert scheduler.kv.states.held == 0


@sparse
def test_what_cannot_guess_is_refused(family, tmp_path):
    folder, _ = family
    other = make_checkpoint("qwen3_vl", tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"other: speculative_algorithm mtp needs .* this qwen3_vl has none"):
        LLM(str(other), speculative_algorithm="mtp")
    headless = make_checkpoint(HYBRID, tmp_path / "headless")
    with pytest.raises(CheckpointError, match=r"headless: speculative_algorithm mtp needs .* no tensors mtp.layers"):
        LLM(str(headless), speculative_algorithm="mtp")
    with pytest.raises(EngineError, match="speculative_num_draft_tokens is 48, and must be below 48, the tokens"):
        LLM(str(folder), speculative_algorithm="mtp", speculative_num_draft_tokens=48, max_total_tokens=64)
