"""Whole models against transformers: hidden states, logits and greedy answers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests import hf_env  # noqa: F401
from tests.tiny_checkpoints import ALL_FAMILIES, HYBRIDS, make_checkpoint
from tests.vlmserve.models.dense_attention import DenseAttention, make_batch
from vlmserve.engine.recurrent import state_shape
from vlmserve.memory.recurrent_cache import RecurrentCache
from vlmserve.models.registry import load_model
from vlmserve.models.vlm import VisionLanguageModel

Grid = tuple[int, int, int]
NEW_TOKENS = 8
# no picture; one; two of different sizes
PROMPTS: list[list[Grid]] = [[], [(1, 8, 8)], [(1, 6, 10), (1, 4, 4)]]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """ids int64 [L] with pad tokens, positions int64 [3, L], and the pictures."""

    ids: torch.Tensor
    positions: torch.Tensor
    pixels: torch.Tensor | None
    grids: list[Grid]


@dataclass(frozen=True)
class Pair:
    """One checkpoint, loaded here and in transformers."""

    folder: Path
    model: VisionLanguageModel
    reference: torch.nn.Module

    def prompt(self, grids: list[Grid], seed: int) -> Prompt:
        """Random text around random pictures; positions are transformers' own."""
        config = self.reference.config
        generator = torch.Generator().manual_seed(seed)

        def text() -> list[int]:
            return torch.randint(32, 127, (7,), generator=generator).tolist()

        ids = text()
        for t, h, w in grids:
            ids += [config.vision_start_token_id, *[config.image_token_id] * (t * h * w // 4)]
            ids += [config.vision_end_token_id, *text()]
        pixels = None
        if grids:
            width = self.model.visual.patch_embed.proj.weight.shape[1]
            pixels = torch.randn(sum(t * h * w for t, h, w in grids), width, generator=generator)
        input_ids = torch.tensor([ids])
        positions, _ = self.reference.model.get_rope_index(
            input_ids,
            mm_token_type_ids=(input_ids == config.image_token_id).int(),
            image_grid_thw=torch.tensor(grids) if grids else None,
            attention_mask=torch.ones_like(input_ids),
        )
        return Prompt(ids=input_ids[0], positions=positions[:, 0], pixels=pixels, grids=grids)

    def embeds(self, prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Input embeddings [L, hidden], rows of the pictures [R], DeepStack embeddings [layers, R, hidden]."""
        embeds = self.model.embed_tokens(prompt.ids)
        rows = (prompt.ids == self.reference.config.image_token_id).nonzero()[:, 0]
        if prompt.pixels is None:
            return embeds, rows, None
        parts = self.model.visual(prompt.pixels, prompt.grids).view(len(rows), -1, embeds.shape[1]).transpose(0, 1)
        embeds[rows] = parts[0]
        return embeds, rows, parts[1:] if len(parts) > 1 else None

    def states(self, requests: int) -> RecurrentCache | None:
        """For requests that begin."""
        shape = state_shape(self.model.config, self.model.dtype)
        return None if shape is None else RecurrentCache(requests, shape, torch.device("cpu"))

    def forward(
        self, prompts: list[Prompt], backend: DenseAttention, states: RecurrentCache | None = None
    ) -> torch.Tensor:
        """Final hidden states of a batch of whole prompts. states: where they are left, if anybody goes on."""
        ids, positions = [p.ids for p in prompts], [p.positions for p in prompts]
        batch = make_batch(backend, ids, positions, [0] * len(prompts), states or self.states(len(prompts)))
        parts = [self.embeds(prompt) for prompt in prompts]
        starts = torch.tensor([0, *batch.extend_lens]).cumsum(0).tolist()
        rows = torch.cat([rows + start for (_, rows, _), start in zip(parts, starts, strict=False)])
        deepstack = [part for _, _, part in parts if part is not None]
        return self.model(
            torch.cat([embeds for embeds, _, _ in parts]),
            batch.positions,
            batch,
            deepstack_index=rows,
            deepstack_embeds=torch.cat(deepstack, dim=1) if deepstack else None,
        )

    def reference_inputs(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        """Arguments of transformers' forward and generate."""
        ids = prompt.ids[None]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if prompt.pixels is not None:
            inputs |= {"pixel_values": prompt.pixels, "image_grid_thw": torch.tensor(prompt.grids)}
            inputs["mm_token_type_ids"] = (ids == self.reference.config.image_token_id).int()
        return inputs


@pytest.fixture(scope="module", params=(*ALL_FAMILIES, *HYBRIDS))
def pair(request, tmp_path_factory):
    from transformers import AutoModelForImageTextToText

    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return Pair(folder, load_model(folder), reference)


@torch.inference_mode()
@pytest.mark.parametrize("grids", PROMPTS, ids=str)
def test_hidden_states_and_logits_are_those_of_transformers(pair, grids):
    prompt = pair.prompt(grids, seed=1)
    hidden = pair.forward([prompt], DenseAttention())
    reference = pair.reference(**pair.reference_inputs(prompt), output_hidden_states=True)
    # pictures in hybrid models: transformers' own logits are up to 1.2e-4 from those that it computes in float64
    noise = 3.0 if pair.model.config.linear is not None else 1.0
    torch.testing.assert_close(hidden, reference.hidden_states[-1][0], rtol=1e-4, atol=2e-4 * noise)
    logits = pair.model.compute_logits(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, reference.logits[0], rtol=1e-4, atol=1e-4 * noise)


@torch.inference_mode()
def test_greedy_answers_of_a_mixed_batch_are_those_of_transformers(pair):
    prompts = [pair.prompt(grids, seed=i) for i, grids in enumerate(PROMPTS)]
    backend = DenseAttention()
    lens = [len(prompt.ids) for prompt in prompts]
    states = pair.states(len(prompts))
    hidden = pair.forward(prompts, backend, states)[torch.tensor(lens).cumsum(0) - 1]
    last = [prompt.positions.max() for prompt in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    for step in range(NEW_TOKENS):
        next_ids = pair.model.compute_logits(hidden).argmax(-1)
        for answer, token in zip(answers, next_ids.tolist(), strict=True):
            answer.append(token)
        positions = [(top + 1 + step).expand(3, 1) for top in last]
        batch = make_batch(backend, list(next_ids.split(1)), positions, [length + step for length in lens], states)
        hidden = pair.model(pair.model.embed_tokens(next_ids), batch.positions, batch)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = pair.reference.generate(
            **pair.reference_inputs(prompt), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1
        )
        assert answer == expected[0, len(prompt.ids) :].tolist()


@torch.inference_mode()
def test_the_answer_depends_on_every_part_of_the_model(pair):
    """Each weight moved a little moves the logits: nothing is left out or read twice."""
    prompt = pair.prompt([(1, 8, 8)], seed=3)
    model = load_model(pair.folder)
    moved = Pair(pair.folder, model, pair.reference)
    base = model.compute_logits(pair.forward([prompt], DenseAttention())[-1:])
    for name, parameter in model.named_parameters():
        saved = parameter.clone()
        parameter.mul_(1.5).add_(0.1)
        changed = model.compute_logits(moved.forward([prompt], DenseAttention())[-1:])
        assert (changed - base).abs().max() > 1e-4, name
        parameter.copy_(saved)


@torch.inference_mode()
def test_bfloat16_stays_as_near_to_float32_as_transformers_does(pair):
    low = Pair(pair.folder, load_model(pair.folder, dtype=torch.bfloat16), pair.reference)
    reference = copy.deepcopy(pair.reference).to(torch.bfloat16)
    ours = theirs = 0.0
    for seed in (4, 5, 6, 7):  # a token more or less that another expert gets is chance
        prompt = pair.prompt([(1, 8, 8)], seed=seed)
        truth = pair.reference(**pair.reference_inputs(prompt)).logits[0]
        logits = low.model.compute_logits(low.forward([prompt], DenseAttention()))
        ours += float((logits - truth).square().mean())
        theirs += float((reference(**pair.reference_inputs(prompt)).logits[0].float() - truth).square().mean())
    assert 0 < ours**0.5 < 1.2 * theirs**0.5
