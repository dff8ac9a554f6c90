"""What the network is taught: its answers' tokens, and what every token of a picture shows."""

from __future__ import annotations

import torch
from torch.nn import functional

from assets.recipe.batches import Batch, attention_mask
from assets.recipe.lessons import CHARACTERS, MOTIONS, OUTLINE
from assets.recipe.network import Network
from assets.recipe.sizes import MERGE
from assets.recipe.world import COLOURS, SHAPES
from assets.recipe.writing import LONGEST

PLACES, EDGES = 12, 40
"""Strips across a picture, and down, that tell where an object's middle is, and where its box begins and ends."""


class Hinter(torch.nn.Module):
    """Reads the `Hints` from a picture's tokens [n, hidden]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.classes = 1 + len(SHAPES) * len(COLOURS)
        self.things = torch.nn.Linear(hidden, self.classes + 4)
        self.characters = torch.nn.Linear(hidden, MERGE**2 * (1 + len(CHARACTERS)))
        self.outline = torch.nn.Linear(hidden, (MERGE * OUTLINE) ** 2)
        self.places = torch.nn.Linear(hidden, 2 * PLACES)
        self.edges = torch.nn.Linear(hidden, 4 * EDGES)
        self.turns = torch.nn.Linear(hidden, MERGE**2 * (1 + LONGEST))
        self.motion = torch.nn.Linear(hidden, 1 + len(MOTIONS))

    def forward(self, tokens: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The loss."""
        if not len(tokens):
            return tokens.sum()
        told = {name: value.to(tokens.device) for name, value in batch.hints.items()}
        out = self.things(tokens).float()
        shown = told["things"] > 0
        # Objects and background count the same, though most of a picture is background.
        loss = _classes(out[:, : self.classes], told["things"])
        off = functional.smooth_l1_loss(out[:, self.classes :], told["offsets"], reduction="none", beta=0.3)
        loss = loss + 0.5 * (off.sum(-1) * shown).sum() / shown.sum().clamp(min=1)
        loss = loss + _strips(self.places(tokens)[shown], told["places"][shown, :2], PLACES)
        loss = loss + 0.5 * _strips(self.edges(tokens)[shown], told["places"][shown, 2:], EDGES)
        loss = loss + 2 * functional.binary_cross_entropy_with_logits(
            self.outline(tokens).float(), told["outline"].float() / 255
        )
        loss = loss + 0.5 * _classes(self.characters(tokens).float(), told["characters"])
        loss = loss + 0.25 * _classes(self.turns(tokens).float(), told["turns"])
        return loss + 0.25 * _classes(self.motion(tokens).float(), told["motion"])


def _classes(out: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
    """Loss of classes in groups, out [n, groups * classes], told [n, groups] or [n]. Class 0 is nothing, half of the
    loss."""
    told = told.flatten()
    return _mean(functional.cross_entropy(out.reshape(len(told), -1), told, reduction="none"), told > 0)


def _strips(out: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
    """Loss of coordinates as strips, out [n, k * count], places [n, k] in 0..1: the sum over k, the mean over n.

    Strips replace coordinates, because a class is told more loudly than a number, and answers listen to loud hints.
    """
    strips = (places * count).long().clamp(0, count - 1).flatten()
    return functional.cross_entropy(out.float().view(-1, count), strips, reduction="sum") / max(1, len(places))


def _mean(values: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
    """The mean where something is shown, plus the mean where nothing is."""
    return (values * shown).sum() / shown.sum().clamp(min=1) + (values * ~shown).sum() / (~shown).sum().clamp(min=1)


def losses(network: Network, hinter: Hinter, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss of the answers, loss of the hints, share of answer tokens predicted right)."""
    model = network.model
    device = model.language_model.embed_tokens.weight.device
    ids = batch.ids.to(device)
    embeds = model.language_model.embed_tokens(ids)
    visual, deepstack = batch.visual.to(device), None
    hint = embeds.new_zeros(())
    if len(batch.grids):
        seen = model.visual(batch.patches.to(device).float(), grid_thw=batch.grids.to(device))
        shown = len(batch.hints["things"])  # what follows is the blank picture
        tokens = seen.pooler_output[:shown]
        deepstack = [layer[:shown] for layer in seen.deepstack_features]
        embeds = embeds.masked_scatter(visual[..., None], tokens.to(embeds.dtype))
        hint = hinter(tokens, batch)
    if not batch.taught.any():
        return hint * 0, hint, hint * 0
    mask = attention_mask(batch.branches.to(device))
    hidden = model.language_model(
        inputs_embeds=embeds,
        attention_mask=mask,
        position_ids=batch.positions.to(device),
        visual_pos_masks=visual,
        deepstack_visual_embeds=deepstack,
        use_cache=False,
    ).last_hidden_state
    taught = batch.taught.to(device)[:, 1:]
    target = ids[:, 1:][taught]
    answers = hidden[:, :-1][taught]
    rows = -len(answers) % 256  # again few different shapes
    logits = network.lm_head(functional.pad(answers, (0, 0, 0, rows)))[: len(answers)].float()
    right = (logits.argmax(-1) == target).float().mean()
    return functional.cross_entropy(logits, target), hint, right
