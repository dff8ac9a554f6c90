"""What the network is taught: its answers' tokens, and what every token of a picture shows."""

from __future__ import annotations

import torch
from torch.nn import functional

from recipe.batches import Batch, attention_mask
from recipe.lessons import CHARACTERS, OUTLINE
from recipe.network import Network
from recipe.sizes import MERGE
from recipe.world import COLOURS, SHAPES

PLACES = 12
"""Strips across a picture, and down, that tell where an object's middle is."""


class Hinter(torch.nn.Module):
    """Reads from a picture's tokens [n, hidden] what they show (`Hints`)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.classes = 1 + len(SHAPES) * len(COLOURS)
        self.things = torch.nn.Linear(hidden, self.classes + 4)
        self.characters = torch.nn.Linear(hidden, MERGE**2 * (1 + len(CHARACTERS)))
        self.outline = torch.nn.Linear(hidden, (MERGE * OUTLINE) ** 2)
        self.places = torch.nn.Linear(hidden, 2 * PLACES)

    def forward(self, tokens: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The loss."""
        if not len(tokens):
            return tokens.sum()
        device = tokens.device
        out = self.things(tokens).float()
        things = batch.things.to(device)
        shown = things > 0
        # What is there and what is not count the same, though most of a picture is background.
        loss = _mean(functional.cross_entropy(out[:, : self.classes], things, reduction="none"), shown)
        off = functional.smooth_l1_loss(out[:, self.classes :], batch.offsets.to(device), reduction="none", beta=0.3)
        loss = loss + 0.5 * (off.sum(-1) * shown).sum() / shown.sum().clamp(min=1)
        # Strips, not coordinates: a class is told more loudly than a number, and answers listen to what is loud.
        strips = (batch.places.to(device) * PLACES).long().clamp(0, PLACES - 1)
        where = self.places(tokens).float().view(-1, 2, PLACES)[shown]
        loss = loss + functional.cross_entropy(where.flatten(0, 1), strips[shown].flatten(), reduction="sum") / (
            shown.sum().clamp(min=1)
        )
        covered = batch.outline.to(device).float() / 255
        loss = loss + 2 * functional.binary_cross_entropy_with_logits(self.outline(tokens).float(), covered)
        marks = batch.characters.to(device).view(-1)
        letters = self.characters(tokens).float().view(-1, 1 + len(CHARACTERS))
        return loss + 0.5 * _mean(functional.cross_entropy(letters, marks, reduction="none"), marks > 0)


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
        shown = len(batch.things)  # what follows is the blank picture
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
