"""Train the default model: `python -m recipe.train RUN_FOLDER`. Stop it at any time; the same command goes on.

The network is transformers' own. The loss is that of the answers' tokens, plus that of two small heads which are thrown
away afterwards: they ask every token of a picture what it shows, and so teach the vision tower long before the answers
would.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from recipe.batches import Batch, attention_mask, batches
from recipe.lessons import CHARACTERS, OUTLINE
from recipe.network import Network, make_network, write_checkpoint
from recipe.sizes import MERGE
from recipe.tokenizer import make_recipe_tokenizer
from recipe.world import COLOURS, SHAPES

STAGES: dict[str, dict[str, float]] = {
    "look": {"scene": 0.7, "print": 0.27, "strange": 0.03},
    "shapes": {"scene": 0.77, "album": 0.05, "print": 0.12, "strange": 0.04, "talk": 0.02},
    "prints": {"scene": 0.52, "album": 0.12, "print": 0.28, "strange": 0.05, "talk": 0.03},
    "clips": {"scene": 0.45, "album": 0.12, "print": 0.2, "clip": 0.15, "strange": 0.05, "talk": 0.03},
}
"""How often each kind of lesson comes, stage by stage. "look" asks nothing: the hints alone teach the tower."""


WARMUP = 200
"""Steps in which a stage gets up to its learning rate."""


class Hinter(torch.nn.Module):
    """Reads from a picture's tokens [n, hidden] what they show (`Hints`)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.classes = 1 + len(SHAPES) * len(COLOURS)
        self.things = torch.nn.Linear(hidden, self.classes + 4)
        self.characters = torch.nn.Linear(hidden, MERGE**2 * (1 + len(CHARACTERS)))
        self.outline = torch.nn.Linear(hidden, (MERGE * OUTLINE) ** 2)

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


def optimizers(network: Network, hinter: Hinter, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for all else."""
    matrices: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for name, weight in network.named_parameters():
        inside = weight.ndim == 2 and not any(part in name for part in ("embed", "lm_head"))
        (matrices if inside else others).append(weight)
    others += list(hinter.parameters())
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate_at(step: int, begun: int, steps: int, decay: int) -> float:
    """Share of the full rate: up at a stage's beginning, level, and down to nothing over the last `decay` steps."""
    return min(1.0, (step - begun + 1) / WARMUP, max(0.0, (steps - step) / max(1, decay)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the run's state and the published checkpoint are kept")
    parser.add_argument("--steps", type=int, default=8000, help="batches in all")
    parser.add_argument("--decay", type=int, default=1500, help="the last so many lower the learning rate")
    parser.add_argument("--stage", choices=STAGES, default="shapes", help="which lessons")
    parser.add_argument("--batch", type=int, default=24, help="lessons in a batch")
    parser.add_argument("--budget", type=int, default=256, help="most tokens in a lesson")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--hint-weight", type=float, default=0.3, help="of the hints' loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=250, help="steps between saved states")
    parser.add_argument("--workers", type=int, default=1, help="processes that make lessons")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    train(args)


def train(args: argparse.Namespace) -> None:
    """Train from the folder's saved state, or from nothing."""
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else make_recipe_tokenizer()
    tokenizer.save(str(path))
    network = make_network(tokenizer, args.seed).to(args.device)
    hinter = Hinter(network.config.text_config.hidden_size).to(args.device)
    optims = optimizers(network, hinter, args.rate)
    average = {name: value.clone() for name, value in network.state_dict().items()}
    first, begun, hours = 0, 0, 0.0
    state_path = folder / "state.pt"
    if state_path.is_file():
        state = torch.load(state_path, map_location=args.device)
        network.load_state_dict(state["network"])
        hinter.load_state_dict(state["hinter"])
        for optim, saved in zip(optims, state["optims"], strict=True):
            optim.load_state_dict(saved)
        average, first, hours = state["average"], state["step"], state["hours"]
        begun = state["begun"] if state.get("stage") == args.stage else first
    parameters = [*network.parameters(), *hinter.parameters()]
    print(f"{sum(p.numel() for p in network.parameters()):,} parameters; from step {first}", flush=True)

    network.train()
    started = last = time.monotonic()
    sums = [0.0, 0.0, 0.0]
    data = batches(
        tokenizer,
        STAGES[args.stage],
        budget=0 if args.stage == "look" else args.budget,
        size=args.batch,
        seed=args.seed,
        first=first,
        end=args.steps,
        workers=args.workers,
    )
    for step, batch in enumerate(data, first):
        share = rate_at(step, begun, args.steps, args.decay)
        for optim in optims:
            for group in optim.param_groups:
                group["lr"] = args.rate * share
        with torch.autocast(args.device.split(":")[0], torch.bfloat16):
            answer, hint, right = losses(network, hinter, batch)
        (answer + args.hint_weight * hint).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optim in optims:
            optim.step()
            optim.zero_grad(set_to_none=True)
        keep = min(0.998, 1 - 1 / (step + 2))
        with torch.no_grad():
            for name, value in network.state_dict().items():
                average[name].lerp_(value, 1 - keep)
        sums = [a + b.item() for a, b in zip(sums, (answer.detach(), hint.detach(), right), strict=True)]
        if (step + 1) % 50 == 0:
            now = time.monotonic()
            line = {
                "step": step + 1,
                "loss": round(sums[0] / 50, 4),
                "hints": round(sums[1] / 50, 4),
                "right": round(sums[2] / 50, 4),
                "lessons_per_s": round(50 * args.batch / (now - last), 1),
                "hours": round(hours + (now - started) / 3600, 3),
                "stage": args.stage,
            }
            with (folder / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
            last, sums = now, [0.0, 0.0, 0.0]
            if not math.isfinite(line["loss"]):
                raise RuntimeError(f"the loss at step {step + 1} is {line['loss']}; the last saved state is kept")
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            unfinished = folder / "state.pt.new"
            torch.save(
                {
                    "network": network.state_dict(),
                    "hinter": hinter.state_dict(),
                    "optims": [optim.state_dict() for optim in optims],
                    "average": average,
                    "step": step + 1,
                    "stage": args.stage,
                    "begun": begun,
                    "hours": hours + (time.monotonic() - started) / 3600,
                },
                unfinished,
            )
            os.replace(unfinished, state_path)
            current = {name: value.clone() for name, value in network.state_dict().items()}
            network.load_state_dict(average)
            write_checkpoint(folder / "checkpoint", network, tokenizer)
            network.load_state_dict(current)


if __name__ == "__main__":
    main()
